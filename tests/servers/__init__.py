"""Servers for the tests: real ones started on free loopback ports, and a proxy that causes faults.

```python
with Standalone(password="secret") as server:      # also Cluster(), SentinelSet(), FakeServer()
    redis.Redis.from_url(server.url).ping()
```
Every server keeps its files in a temporary folder, persists nothing, and is stopped by its pid: at
the end of the `with`, or at exit when a test run is interrupted.
"""

from tests.servers.binary import NoServer, find_binary, server_version
from tests.servers.certificates import Certificates
from tests.servers.cluster import Cluster, Migration
from tests.servers.container import Container
from tests.servers.fake import FakeServer
from tests.servers.faults import (
    Blackhole,
    Delay,
    DropReply,
    Fault,
    Pass,
    Refuse,
    ResetAfterSend,
    ResetBeforeSend,
    Silent,
    Trickle,
)
from tests.servers.process import RedisProcess
from tests.servers.proxy import Proxy
from tests.servers.sentinel import SentinelSet
from tests.servers.standalone import Standalone
from tests.servers.stepped_clock import SteppedClock
from tests.servers.wait import free_port, until, until_async

__all__ = [
    "Blackhole",
    "Certificates",
    "Cluster",
    "Container",
    "Delay",
    "DropReply",
    "FakeServer",
    "Fault",
    "Migration",
    "NoServer",
    "Pass",
    "Proxy",
    "RedisProcess",
    "Refuse",
    "ResetAfterSend",
    "ResetBeforeSend",
    "SentinelSet",
    "Silent",
    "Standalone",
    "SteppedClock",
    "Trickle",
    "find_binary",
    "free_port",
    "server_version",
    "until",
    "until_async",
]
