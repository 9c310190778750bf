"""The libraries that distwindow is compared with, and distwindow, behind one interface.

Peers get their best settings: clients without retries or health checks, pools large enough, no
background work, and the fastest documented call. Where there are several settings, a preselection
before the comparison measures which are the best.
"""

from benchmarks.peers.base import (
    DISTWINDOW,
    HIGH_QUOTA,
    LEASED,
    LIBRARIES,
    LOW_QUOTA,
    TIMEOUT_S,
    Acquire,
    AsyncAcquire,
    AsyncPeer,
    Peer,
    Quota,
    check_decisions,
)
from benchmarks.peers.blocking import blocking_peers
from benchmarks.peers.libraries import BLOCKING, SHARED
from benchmarks.peers.memory import memory_peers
from benchmarks.peers.own import (
    async_leased_limiters,
    async_limiters,
    leased_limiters,
    limiters,
    more_limiters,
)
from benchmarks.peers.tasks import async_peers

__all__ = [
    "BLOCKING",
    "DISTWINDOW",
    "HIGH_QUOTA",
    "LEASED",
    "LIBRARIES",
    "LOW_QUOTA",
    "SHARED",
    "TIMEOUT_S",
    "Acquire",
    "AsyncAcquire",
    "AsyncPeer",
    "Peer",
    "Quota",
    "async_leased_limiters",
    "async_limiters",
    "async_peers",
    "blocking_peers",
    "check_decisions",
    "leased_limiters",
    "limiters",
    "memory_peers",
    "more_limiters",
]
