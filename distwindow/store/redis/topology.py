"""Where a ring lives: the one server, the primary that Sentinel names, or a node of a cluster.

redis-py knows how to connect (TLS, AUTH, topology); here its connections are made one by one, with
its own retries switched off: a client library that sends a lost call again charges it again.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import redis
import redis.asyncio
from redis.asyncio.retry import Retry as AsyncRetry
from redis.backoff import NoBackoff
from redis.crc import key_slot
from redis.exceptions import RedisClusterException
from redis.retry import Retry

from ...core.clock import Clock
from ...core.errors import ConfigurationError, StoreUnavailable, short_repr
from ...protocol.commands import Command
from .guard import ServerClock

_BACKOFF_S = 0.1
"""Seconds in which a node that could not be connected to is not tried again."""

_MIN_REFRESH_S = 1.0
"""Seconds between two readings of a cluster's map, at the least."""


@dataclass(frozen=True, slots=True)
class CallSettings:
    """Under which terms calls are made."""

    clock: Clock
    timeout: float
    """Seconds for one whole call."""
    client_clock: bool = False
    """Send our time with each command, and let the server's alone."""
    name: str | None = None
    """Who we are in the server's CLIENT LIST."""


class Node:
    """One server: how to connect to it, what its clock says, and whether it is worth trying now."""

    def __init__(
        self, name: str, new_connection: Callable[[], Any], settings: CallSettings
    ) -> None:
        self.name = name
        self.new_connection = new_connection
        """Makes a redis-py connection to it, not connected yet."""
        self.clock = ServerClock(settings.clock, used=not settings.client_clock)
        self.generation = 0
        """Connections of an earlier generation are to be closed."""
        self.version_checked = False
        """True once a connection has found its version to be new enough."""
        self.ask_next_sentinel: Callable[[], None] = lambda: None
        """Have the next connect ask another sentinel first."""
        self._clock = settings.clock
        self._down: tuple[float, object] | None = None
        self._failed_before = False

    def drop_connections(self) -> None:
        """Connect anew: what answers there is no primary any more, or talks out of step."""
        self.generation += 1

    def on_connect_failed(self, why: object, *, slow: bool = False) -> None:
        """Connecting failed. Once may be an accident; after the second time in a row, or where it
        took a whole `slow` timeout, it is not tried for a moment, so that callers fail fast.
        """
        if self._failed_before or slow:
            self._down = (self._clock.monotonic() + _BACKOFF_S, why)
        self._failed_before = True

    def on_connected(self) -> None:
        """Connecting worked."""
        self._down, self._failed_before = None, False

    def unavailable_reason(self) -> object | None:
        """Why connecting is not worth trying now, or None."""
        if self._down is not None and self._clock.monotonic() < self._down[0]:
            return self._down[1]
        return None


class Topology(Protocol):
    """Finds the node of a command."""

    release: Callable[[], object] | None
    """Closes the client it was found with, where that is ours."""

    def node_of(self, command: Command[Any]) -> Node: ...

    def on_failure(self) -> None:
        """A node did not serve: look soon whether it still is the one."""
        ...

    def redirected(
        self, node: Node, host: str, port: int, command: Command[Any], *, permanent: bool
    ) -> Node:
        """The node that `node` points to."""
        ...


class SingleServer:
    """A standalone server, or whatever primary a Sentinel pool resolves to when it connects."""

    release: Callable[[], object] | None = None

    def __init__(self, pool: Any, settings: CallSettings) -> None:
        kwargs = _connection_kwargs(pool.connection_kwargs, pool.connection_class, settings)
        self._pool = pool  # connections of a sentinel pool know it weakly: it has to live

        def connect() -> Any:
            return pool.connection_class(**kwargs)

        self.node = Node(_pool_name(pool), connect, settings)
        self.node.ask_next_sentinel = self._ask_another

    def _ask_another(self) -> None:
        watch = getattr(self._pool, "sentinel_manager", None)
        if watch is not None:
            watch.sentinels = [*watch.sentinels[1:], watch.sentinels[0]]

    def node_of(self, command: Command[Any]) -> Node:
        return self.node

    def on_failure(self) -> None:
        """Every new connection asks anew."""

    def redirected(
        self, node: Node, host: str, port: int, command: Command[Any], *, permanent: bool
    ) -> Node:
        raise ConfigurationError(
            f"{node.name} is a node of a Redis Cluster; use redis+cluster://{node.name}"
        )


class ClusterTopology:
    """A Redis Cluster, by redis-py's map of slots; corrected by MOVED between its refreshes."""

    release: Callable[[], object] | None = None

    def __init__(self, client: Any, settings: CallSettings) -> None:
        self.client = client
        """The redis-py client, its map read."""
        self._settings = settings
        self._nodes: dict[tuple[str, int], Node] = {}
        self._moved: dict[int, Node] = {}
        self._refreshed = settings.clock.monotonic()
        self._stale = False

    def node_of(self, command: Command[Any]) -> Node:
        slot = _slot_of(command)
        node = self._moved.get(slot)
        if node is not None:
            return node
        try:
            known = self.client.nodes_manager.get_node_from_slot(slot)
        except (redis.RedisError, RedisClusterException) as exc:
            self._stale = True
            raise StoreUnavailable(f"no node of the cluster serves slot {slot}: {exc}") from exc
        return self._node(known.host, int(known.port))

    def on_failure(self) -> None:
        self._stale = True

    def redirected(
        self, node: Node, host: str, port: int, command: Command[Any], *, permanent: bool
    ) -> Node:
        host = host or node.name.rpartition(":")[0]
        remap = getattr(self.client.nodes_manager, "remap_host_port", None)
        to = self._node(*remap(host, port)) if remap else self._node(host, port)
        if permanent:
            self._moved[_slot_of(command)] = to
            self._stale = True
        return to

    def is_refresh_due(self) -> bool:
        """Should the map be read again now? Only when stale, and at most once a second."""
        now = self._settings.clock.monotonic()
        if not self._stale or now - self._refreshed < _MIN_REFRESH_S:
            return False
        self._refreshed = now
        return True

    def on_refreshed(self) -> None:
        """The client has read the map again."""
        self._moved.clear()
        self._stale = False

    def _node(self, host: str, port: int) -> Node:
        node = self._nodes.get((host, port))
        if node is None:
            connection_class, base = self._template()
            kwargs = _connection_kwargs(base, connection_class, self._settings) | {
                "host": host,
                "port": port,
            }

            def connect() -> Any:
                return connection_class(**kwargs)

            node = Node(f"{host}:{port}", connect, self._settings)
            self._nodes[host, port] = node
        return node

    def _template(self) -> tuple[Any, dict[str, Any]]:
        """How the client connects to its nodes; every node is connected to alike."""
        known = next(iter(self.client.nodes_manager.nodes_cache.values()))
        if hasattr(known, "connection_class"):  # redis.asyncio
            return known.connection_class, known.connection_kwargs
        pool = self.client.get_redis_connection(known).connection_pool
        return pool.connection_class, pool.connection_kwargs


def _slot_of(command: Command[Any]) -> int:
    charges = command.charges
    slot: int = key_slot(charges[0].ring)
    for charge in charges[1:]:
        if key_slot(charge.ring) != slot:
            raise ConfigurationError(
                f"keys {short_repr(charges[0].key)} and {short_repr(charge.key)} lie on different "
                "slots of the cluster, so no script can decide over both; give them a common tag: "
                "Key(resource, tag=...)"
            )
    return slot


_NOT_OURS = (
    # redis-py's own retries, health checks and push messages; the exchange here has its own.
    "retry_on_error", "retry_on_timeout", "health_check_interval",
    "maint_notifications_config", "maint_notifications_pool_handler", "event_dispatcher",
    "maint_notifications_handler", "oss_cluster_maint_notifications_handler", "orig_host_address",
    "orig_socket_timeout", "orig_socket_connect_timeout", "response_callbacks",
)  # fmt: skip


def _connection_kwargs(
    kwargs: dict[str, Any], connection_class: Any, settings: CallSettings
) -> dict[str, Any]:
    """A connection's arguments without anything that would send a command twice or change replies.

    RESP2, because a RESP3 server may push messages between our replies.
    """
    aio = issubclass(connection_class, redis.asyncio.connection.AbstractConnection)
    plain = {name: value for name, value in kwargs.items() if name not in _NOT_OURS}
    for name in ("ssl_ca_certs", "ssl_certfile", "ssl_keyfile"):
        if plain.get(name) is not None and not Path(plain[name]).is_file():
            raise ConfigurationError(f"{name}={plain[name]!r} is not a file")
    if settings.name is not None:
        plain["client_name"] = settings.name
    return plain | {
        "retry": (AsyncRetry if aio else Retry)(NoBackoff(), 0),
        "decode_responses": False,
        "protocol": 2,
        "socket_timeout": settings.timeout,
        "socket_connect_timeout": settings.timeout,
    }


def _pool_name(pool: Any) -> str:
    """How messages call this server; never with its password."""
    kwargs = pool.connection_kwargs
    if hasattr(pool, "service_name"):
        return f"the primary of {pool.service_name!r}"
    return str(
        kwargs.get("path") or f"{kwargs.get('host', 'localhost')}:{kwargs.get('port', 6379)}"
    )
