"""Which node has a ring: the only server, the primary that Sentinel names, or a node of a cluster.

redis-py connects (TLS, AUTH, topology). Its connections are made one by one here, without its
retries: a client library that sends a call again, because no reply came, may charge it twice.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias

import redis
import redis.asyncio
from redis.asyncio.retry import Retry as AsyncRetry
from redis.backoff import NoBackoff
from redis.crc import key_slot
from redis.exceptions import RedisClusterException
from redis.retry import Retry

from ...away.outages import BACKOFF_S, Outages, Reachability
from ...errors import ConfigurationError, KeysOnSeveralNodes, StoreUnavailable, short_repr
from ...ring.clock import Clock
from ...ring.command import Command, ServerClock
from .wrong_server import Address, WrongServerCheck

_MIN_PROBE_TIMEOUT_S = 0.25
_MIN_REFRESH_S = 1.0
"""The least number of seconds between two readings of a cluster's map of slots."""
_MIN_REFRESH_AWAY_S = 0.25
"""The same while a node is away: another may take its place at any moment."""


@dataclass(frozen=True, slots=True)
class CallSettings:
    """Settings of calls."""

    clock: Clock
    timeout: float
    """Seconds for one whole call."""
    client_clock: bool = False
    """True if each command carries our time, and the server's is not looked at."""
    name: str | None = None
    """The name of our connections in the server's CLIENT LIST."""
    outages: Outages = field(default_factory=Outages)
    """Those of the store."""
    secrets: tuple[str, ...] = field(default=(), repr=False)
    """The passwords of the store, which no text may show."""
    addresses: tuple[Address, ...] = ()
    """Where the map of a cluster is read, if a URL has named it."""


class Node(Reachability):
    """One server: how to connect to it, its clock, and whether connecting is worth trying now."""

    def __init__(
        self, name: str, new_connection: Callable[[], Any], settings: CallSettings
    ) -> None:
        super().__init__(name, settings.clock, settings.outages)
        self.new_connection = new_connection
        """Makes a redis-py connection to it that is not connected yet; blocking or asyncio."""
        self.secrets = settings.secrets
        """The passwords of the store, which no text may show."""
        self.clock = ServerClock(enabled=not settings.client_clock)
        self.generation = 0
        """A connection that was opened in an earlier generation is closed before its next call."""
        self.round_trip_s: float | None = None
        """Seconds of the last round trip of a handshake; None before the first."""
        self.version_checked = False
        """True once a connection has found its version to be new enough."""
        self.wrong_server = WrongServerCheck(settings.clock)
        """Whether another server answers in its place."""
        self.rotate_sentinels: Callable[[], None] = lambda: None
        """Makes the next connection ask another sentinel first."""
        self._kept_until = -math.inf
        """Until when connections are kept although the server refuses calls (monotonic seconds)."""

    @property
    def answered_at(self) -> float:
        return max(self.clock.answered_at, self.clock.read_at)

    @property
    def executed_at(self) -> float:
        return self.clock.answered_at

    def probe_timeout_s(self, timeout: float) -> float:
        """Return the seconds for each step of a probe. It is shorter than a long timeout of calls,
        so that a server that is back is found soon: packets to one that was away are repeated after
        1 s, and 2 s later.
        """
        if self.round_trip_s is None:
            return timeout
        return min(timeout, max(_MIN_PROBE_TIMEOUT_S, 4 * self.round_trip_s))

    def invalidate_connections(self, generation: int) -> None:
        """Reopen this generation's connections before their next calls: replies do not match."""
        if generation == self.generation:
            self.generation += 1

    def on_refused(self, generation: int) -> None:
        """Note that the server has refused a call of this generation, because it is no primary any
        more. Connections are opened again, as another server may be the primary now; but no sooner
        than `BACKOFF_S` after the last time, since each call may be refused.
        """
        now = self._clock.monotonic()
        if generation == self.generation and now >= self._kept_until:
            self._kept_until = now + BACKOFF_S
            self.generation += 1


class ClusterMap(Reachability):
    """The map of a cluster, which is read before any node of it is known."""

    def __init__(self, settings: CallSettings) -> None:
        super().__init__("the cluster", settings.clock, settings.outages)
        self.addresses = settings.addresses
        self.wrong_server = WrongServerCheck(settings.clock)
        """Whether other servers answer at the addresses of the URL."""

    @property
    def executed_at(self) -> float:
        return self._connected_at

    def on_refused_map(self, why: ConfigurationError) -> None:
        """Record that the map cannot be read, if it is that of a cluster."""
        if self.addresses:
            self.on_refused_client(why)


class SingleServer:
    """A standalone server, or the primary that a Sentinel pool finds when it connects."""

    close_client: Callable[[], object] | None = None
    """Closes the redis-py client that it was made of; None if that is the caller's."""

    def __init__(self, pool: Any, settings: CallSettings) -> None:
        self._pool = pool  # connections of a sentinel pool hold only a weak reference to it
        kwargs = _connection_kwargs(pool.connection_kwargs, pool.connection_class, settings)
        connect = _connector(pool.connection_class, kwargs)
        self.node = Node(_pool_name(pool), connect, settings)
        self.node.rotate_sentinels = self._rotate_sentinels

    def _rotate_sentinels(self) -> None:
        manager = getattr(self._pool, "sentinel_manager", None)
        if manager is not None:
            manager.sentinels = [*manager.sentinels[1:], manager.sentinels[0]]

    def node_of(self, command: Command[Any]) -> Node:
        """The node, whatever the command."""
        return self.node

    def request_refresh(self, command: Command[Any]) -> None:
        """Do nothing: every new connection asks a sentinel."""

    def follow_redirect(
        self, node: Node, host: str, port: int, command: Command[Any], *, permanent: bool
    ) -> Node:
        raise ConfigurationError(
            f"{node.name} is a node of a Redis Cluster; use redis+cluster://{node.name}"
        )


class ClusterTopology:
    """A Redis Cluster: redis-py's map of slots, corrected by MOVED until it is read again."""

    close_client: Callable[[], object] | None = None
    """As for `SingleServer`."""

    def __init__(self, client: Any, settings: CallSettings) -> None:
        self.client = client
        """The redis-py client, which has read the map."""
        self._settings = settings
        self._nodes: dict[tuple[str, int], Node] = {}
        self._by_slot: dict[int, Node] = {}
        """The nodes of slots that were looked up, or that MOVED has named, since the map was read.
        To look one up takes redis-py several times as long as all else in a call.
        """
        self._refreshed_at = settings.clock.monotonic()
        self._stale = False

    def known_node_of(self, command: Command[Any]) -> Node | None:
        """The node of `command`, for a call sent at once; None if it has to be found out."""
        if self._stale:  # it is read again by calls that look for their node
            return None
        try:
            return self._by_slot.get(_slot_of(command))
        except ConfigurationError:  # `node_of` raises it for this call alone
            return None

    def node_of(self, command: Command[Any]) -> Node:
        """The node that has the rings of `command`."""
        slot = _slot_of(command)
        node = self._by_slot.get(slot)
        if node is not None:
            return node
        try:
            known = self.client.nodes_manager.get_node_from_slot(slot)
        except (redis.RedisError, RedisClusterException) as exc:
            self._stale = True
            raise StoreUnavailable(f"no node of the cluster serves slot {slot}: {exc}") from exc
        node = self._by_slot[slot] = self._node(known.host, int(known.port))
        return node

    def request_refresh(self, command: Command[Any]) -> None:
        """Read the map of slots again soon, and look up the slot of `command` again at once, as its
        node did not serve: a client of the caller's may know another one by now.
        """
        self._by_slot.pop(_slot_of(command), None)
        self._stale = True

    def follow_redirect(
        self, node: Node, host: str, port: int, command: Command[Any], *, permanent: bool
    ) -> Node:
        """The node that `node` redirects `command` to. `permanent`: MOVED, not ASK."""
        host = host or node.name.rpartition(":")[0]
        remap = getattr(self.client.nodes_manager, "remap_host_port", None)
        to = self._node(*remap(host, port)) if remap else self._node(host, port)
        if permanent:
            self._by_slot[_slot_of(command)] = to
            self._stale = True
        return to

    def claim_refresh(self) -> bool:
        """True, for the first caller, if the map is stale and not read in `_MIN_REFRESH_S`."""
        now = self._settings.clock.monotonic()
        pause_s = _MIN_REFRESH_AWAY_S if self._settings.outages.away else _MIN_REFRESH_S
        if not self._stale or now - self._refreshed_at < pause_s:
            return False
        self._refreshed_at = now
        return True

    def on_refreshed(self) -> None:
        """Note that the map was read again. A node that is not in it is not waited for."""
        self._by_slot.clear()
        known = {(n.host, int(n.port)) for n in self.client.nodes_manager.nodes_cache.values()}
        for address in self._nodes.keys() - known:
            self._nodes.pop(address).on_replaced()
        # While a node is away, another may take its place, also of one that nobody calls any more.
        self._stale = bool(self._settings.outages.away)

    def _node(self, host: str, port: int) -> Node:
        node = self._nodes.get((host, port))
        if node is None:
            connection_class, base = self._template()
            kwargs = _connection_kwargs(base, connection_class, self._settings) | {
                "host": host,
                "port": port,
            }
            node = Node(f"{host}:{port}", _connector(connection_class, kwargs), self._settings)
            # Of two threads that come here at once, one has its node kept: `on_refreshed` would
            # never end the probes of another one.
            node = self._nodes.setdefault((host, port), node)
        return node

    def _template(self) -> tuple[Any, dict[str, Any]]:
        """Connection class and arguments with which the client connects to any of its nodes."""
        known = next(iter(self.client.nodes_manager.nodes_cache.values()))
        if hasattr(known, "connection_class"):  # redis.asyncio
            return known.connection_class, known.connection_kwargs
        pool = self.client.get_redis_connection(known).connection_pool
        return pool.connection_class, pool.connection_kwargs


Topology: TypeAlias = "SingleServer | ClusterTopology"
"""Finds the node of a command."""


def _slot_of(command: Command[Any]) -> int:
    if command.hash_slot is None:
        charges = command.charges
        # A command on a single resource charges no ring.
        slot: int = key_slot(charges[0].ring if charges else command.keys[0])
        for charge in charges[1:]:
            if key_slot(charge.ring) != slot:
                raise KeysOnSeveralNodes(
                    f"keys {short_repr(charges[0].key)} and {short_repr(charge.key)} lie on "
                    "different slots of the cluster, so no script can decide over both; give them "
                    "a common tag: Key(resource, tag=...)"
                )
        command.hash_slot = slot
    return command.hash_slot


_DROPPED_ARGUMENTS = (
    # For redis-py's retries, health checks and push messages: with them, commands would be sent
    # again or between our requests, and messages would come in place of replies.
    "retry_on_error", "retry_on_timeout", "health_check_interval",
    "maint_notifications_config", "maint_notifications_pool_handler", "event_dispatcher",
    "maint_notifications_handler", "oss_cluster_maint_notifications_handler", "orig_host_address",
    "orig_socket_timeout", "orig_socket_connect_timeout", "response_callbacks",
)  # fmt: skip


def _connection_kwargs(
    kwargs: dict[str, Any], connection_class: Any, settings: CallSettings
) -> dict[str, Any]:
    """The arguments of a connection, without any that would send a command twice or change replies.

    The protocol is RESP2, because a RESP3 server may push messages between replies.
    """
    aio = issubclass(connection_class, redis.asyncio.connection.AbstractConnection)
    plain = {name: value for name, value in kwargs.items() if name not in _DROPPED_ARGUMENTS}
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


def _connector(connection_class: Any, kwargs: dict[str, Any]) -> Callable[[], Any]:
    """Return a function that makes a connection. The first one finds out the version of redis-py,
    which takes longer than all else (1.4 ms); the others are given it.
    """

    def connect() -> Any:
        connection = connection_class(**kwargs)
        if hasattr(connection, "driver_info"):  # of recent versions
            kwargs["driver_info"] = connection.driver_info
        return connection

    return connect


def _pool_name(pool: Any) -> str:
    """The name of this server in messages, never with its password."""
    kwargs = pool.connection_kwargs
    if hasattr(pool, "service_name"):
        return f"the primary of {pool.service_name!r}"
    return str(
        kwargs.get("path") or f"{kwargs.get('host', 'localhost')}:{kwargs.get('port', 6379)}"
    )
