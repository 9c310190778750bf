"""Which node of a cluster serves each slot, as the hosts of its URL say."""

from __future__ import annotations

import asyncio
import math
import threading
from collections.abc import Callable, Generator, Sequence
from functools import cached_property, partial
from typing import Any, TypeAlias
from weakref import WeakKeyDictionary, WeakValueDictionary

from ...errors import ConfigurationError, StoreUnavailable
from .urls import StoreUrl, connection_template

SLOTS = 16_384

Address: TypeAlias = "tuple[str, int]"
"""Host and port."""
Questions: TypeAlias = "Generator[tuple[Any, tuple[str, ...]], Any, None]"
"""Yields a redis-py connection that is not connected yet, with the words of a command for it, and
is sent the reply, or why there is none. The connection is closed then.
"""


class SlotMap:
    """The nodes of a cluster, and the slots that each of them serves.

    All limiters of a process that name the same URL have one map, which is read once for all of
    them. A reading asks the hosts of the URL, whose names are resolved anew, before it asks nodes
    that earlier readings have named: a cluster may have moved to other addresses altogether, and
    then only the URL leads to it. Each reading begins with another host, because one that is cut
    off from the others answers as well.
    """

    def __init__(
        self,
        hosts: Sequence[Address],
        template: Callable[[], tuple[Any, dict[str, Any]]],
        remap: Callable[[str, int], Address] | None = None,
    ) -> None:
        self._find_template = template
        self.remap = remap or (lambda host, port: (host, port))
        """Where a node is for us that names itself so."""
        self.ranges: list[tuple[int, int, Address]] = []
        """The first and the last of some slots, and their node; replaced by each reading."""
        self.nodes: frozenset[Address] = frozenset()
        """All nodes, replicas too."""
        self.of_good_version: set[str] = set()
        """The names of nodes whose version has been looked at, and is new enough."""
        self.version = 0
        """The number of readings that have brought a map."""
        self.mistake: str | None = None
        """What no retry helps: the answer of a host, also in a reading that was too slow."""
        self.asked_at = -math.inf
        """When the last reading began, monotonic seconds."""
        self.first_reading = threading.Lock()
        """Held by the thread that makes the first reading, for which the others wait."""
        self._hosts = list(hosts)
        self._begin = 0
        """The number of the host with which the next reading begins."""
        self._locks: WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Lock] = (
            WeakKeyDictionary()
        )

    @cached_property
    def template(self) -> tuple[Any, dict[str, Any]]:
        """redis-py's class of connections to any node, blocking or asyncio, and its arguments."""
        return self._find_template()

    def read(self, connect: Callable[[Address], Any]) -> Questions:
        """Ask one node after the other. Ends with the first map of all slots. Raises a failure if
        no node has sent any part of a map. `connect` makes a connection to a node.
        """
        ranges: list[tuple[int, int, Address]] = []
        nodes: set[Address] = set()
        failures: list[Any] = []
        begin, self._begin = self._begin, (self._begin + 1) % len(self._hosts)
        for asked in dict.fromkeys([*self._hosts[begin:], *self._hosts[:begin], *self.nodes]):
            reply = yield connect(asked), ("CLUSTER", "SLOTS")
            if not isinstance(reply, list):
                failures.append(reply)
                if isinstance(reply, ConfigurationError):
                    self.mistake = str(reply)
                continue
            for low, high, *serving in reply:
                found = [self._address(node, asked) for node in serving]
                nodes.update(found)
                ranges.append((low, high, found[0]))
            if sum(high - low + 1 for low, high, *_ in reply) == SLOTS:
                ranges = ranges[-len(reply) :]
                break
        mistakes = [each for each in failures if isinstance(each, ConfigurationError)]
        self.mistake = str(mistakes[0]) if mistakes else None
        if not ranges:
            # A mistake is not hidden by hosts that are away.
            failures = mistakes + failures
            if failures and isinstance(failures[0], Exception):
                raise failures[0]
            raise StoreUnavailable("no node of the cluster serves any slot")
        self.ranges, self.nodes = ranges, frozenset(nodes)
        self.version += 1

    def node_of(self, slot: int) -> Address | None:
        """Return the node of a slot. Topologies keep it, so that this is asked once a reading."""
        return next((node for low, high, node in self.ranges if low <= slot <= high), None)

    def first_reading_in_loop(self) -> asyncio.Lock:
        """Return the lock that the task holds that makes the first reading in this event loop."""
        return self._locks.setdefault(asyncio.get_running_loop(), asyncio.Lock())

    def _address(self, node: Sequence[Any], asked: Address) -> Address:
        """Return the address of a node. One that does not know its own is that which was asked."""
        host = node[0] if isinstance(node[0], str) else (node[0] or b"").decode()
        return self.remap(host if host not in ("", "?") else asked[0], int(node[1]))


_maps: WeakValueDictionary[tuple[str, bool], SlotMap] = WeakValueDictionary()


def map_of_url(url: StoreUrl, *, is_async: bool) -> SlotMap:
    """Return the map of the cluster at `url`, which the limiters of this process share."""
    found = _maps.get((url.url, is_async))
    if found is None:
        found = SlotMap(url.hosts, partial(connection_template, url, is_async=is_async))
        found = _maps.setdefault((url.url, is_async), found)  # another thread may have been first
    return found


def map_of_client(client: Any) -> SlotMap:
    """Return a map by the settings of a cluster client, and of the hosts that it knows now."""
    manager = client.nodes_manager
    known = list((manager.nodes_cache or manager.startup_nodes).values())
    hosts = [(node.host, int(node.port)) for node in manager.startup_nodes.values()]
    if hasattr(known[0], "connection_class"):  # redis.asyncio
        template = known[0].connection_class, known[0].connection_kwargs
    else:
        pool = client.get_redis_connection(known[0]).connection_pool
        template = pool.connection_class, pool.connection_kwargs
    return SlotMap(hosts, lambda: template, getattr(manager, "remap_host_port", None))
