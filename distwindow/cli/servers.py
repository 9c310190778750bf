"""The servers of a store, each with a redis-py client for the commands that inspect them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import redis

from ..connect import admin_client


class Server(NamedTuple):
    """One server that holds keys: the only one, or a primary of a cluster."""

    name: str
    client: Any
    """A `redis.Redis` with undecoded replies. redis-py's own types say that each command may return
    an awaitable, so they would need a cast at every call.
    """


@contextmanager
def open_servers(url: str) -> Iterator[list[Server]]:
    """Connect to all servers of the store at `url`; the connections are closed at the end."""
    client = admin_client(url)
    try:
        if isinstance(client, redis.RedisCluster):
            cluster: Any = client
            yield [
                Server(node.name, cluster.get_redis_connection(node))
                for node in sorted(cluster.get_primaries(), key=lambda node: str(node.name))
            ]
        else:
            # A URL may ask for decoded replies, but a key need not be valid text.
            client.connection_pool.connection_kwargs["decode_responses"] = False
            kwargs = client.connection_pool.connection_kwargs
            name = kwargs.get("path") or f"{kwargs.get('host', 'primary')}:{kwargs.get('port', '')}"
            yield [Server(str(name).rstrip(":"), client)]
    finally:
        client.close()
