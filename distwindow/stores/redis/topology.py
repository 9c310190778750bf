"""Which node has a ring: the only server, the primary that Sentinel names, or a node of a cluster.

redis-py connects (TLS, AUTH, topology). Its connections are made one by one here, without its
retries: a client library that sends a call again, because no reply came, may charge it twice.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias

import redis.asyncio
from redis.asyncio.retry import Retry as AsyncRetry
from redis.backoff import NoBackoff
from redis.crc import key_slot
from redis.retry import Retry

from ...away.outages import BACKOFF_S, Outages
from ...away.outages import Reachability as Reachability  # other files of stores import both here
from ...away.outages import probe_pause_s as probe_pause_s
from ...errors import ConfigurationError, KeysOnSeveralNodes, StoreUnavailable, short_repr
from ...ring.clock import Clock
from ...ring.command import Command, ServerClock
from .slot_map import Address, Questions, SlotMap
from .urls import hide_secrets
from .wrong_server import Endpoint, WrongServerCheck

_MIN_PROBE_TIMEOUT_S = 0.25
_MIN_REFRESH_S = 1.0
"""The least number of seconds between two readings of a cluster's map of slots."""
_MIN_REFRESH_AWAY_S = 0.25
"""The same while a node is away: another may take its place at any moment."""
ASK_SENTINELS_EVERY_S = 1.0
"""Seconds between two questions to the sentinels, while calls are made. A primary that was replaced
goes on to execute calls until a sentinel reaches it.
"""


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
    endpoints: tuple[Endpoint, ...] = ()
    """Where the map of a cluster is read, if a URL has named it."""


class Node(Reachability):
    """One server: how to connect to it, its clock, and whether connecting is worth trying now."""

    def __init__(
        self,
        name: str,
        new_connection: Callable[[], Any],
        settings: CallSettings,
        of_good_version: set[str] | None = None,
    ) -> None:
        super().__init__(name, settings.clock, settings.outages)
        self.new_connection = new_connection
        """Makes a redis-py connection to it that is not connected yet; blocking or asyncio."""
        self.secrets = settings.secrets
        """The passwords of the store, which no text may show."""
        self.clock = ServerClock(enabled=not settings.client_clock)
        self.script_stamps: dict[str, bytes] = {}
        """By the name of a script: the stamp of the last `EVAL`, which has sent all of it."""
        self.generation = 0
        """A connection that was opened in an earlier generation is closed before its next call."""
        self.round_trip_s: float | None = None
        """Seconds of the last round trip of a handshake; None before the first."""
        self.of_good_version = set[str]() if of_good_version is None else of_good_version
        """The names of servers whose version a connection has found to be new enough."""
        self.wrong_server = WrongServerCheck(settings.clock)
        """Whether another server answers in its place."""
        self.connected_to: Address | None = None
        """Where the last connection has found it: the primary of a Sentinel set may be anywhere."""
        self.rotate_sentinels: Callable[[], None] = lambda: None
        """Makes the next connection ask another sentinel first."""
        self.ask_sentinels_at = math.inf
        """When the next call has the sentinels asked for their primary (monotonic seconds)."""
        self.ask_sentinels: Callable[[], object] = lambda: None
        """Asks them, in the background."""
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
            if self.ask_sentinels_at != math.inf:
                self.ask_sentinels_at = now


class ClusterMap(Reachability):
    """The map of a cluster, which is read before any node of it is known."""

    def __init__(self, settings: CallSettings) -> None:
        super().__init__("the cluster", settings.clock, settings.outages)
        self.endpoints = settings.endpoints
        self._secrets = settings.secrets
        self.wrong_server = WrongServerCheck(settings.clock)
        """Whether other servers answer at the addresses of the URL."""

    @property
    def executed_at(self) -> float:
        return self._connected_at

    def on_reading_timed_out(
        self, slot_map: SlotMap | None, began_at: float
    ) -> ConfigurationError | None:
        """Record that a reading was given up, for the mistake that it has met, if there is one."""
        if slot_map is None or slot_map.mistake is None:
            self.on_connect_failed("reading its map timed out", began_at, slow=True)
            return None
        error = ConfigurationError(slot_map.mistake)
        hide_secrets(error, self._secrets)
        self.on_refused_map(error)
        return error

    def on_refused_map(self, why: ConfigurationError) -> None:
        """Record that the map cannot be read, if it is that of a cluster."""
        if self.endpoints:
            self.on_refused_client(why)


class Sentinels:
    """Which primary the sentinels of a set name, and which of them new connections ask first."""

    def __init__(self, pool: Any, settings: CallSettings) -> None:
        self._manager = pool.sentinel_manager
        self._service = str(pool.service_name).encode()
        self._all = list(self._manager.sentinels)
        """In the order in which connections ask them. redis-py reorders its own list meanwhile."""
        self._connectors = {
            sentinel: _question_connector(
                sentinel.connection_pool.connection_class,
                sentinel.connection_pool.connection_kwargs,
                settings,
            )
            for sentinel in self._all
        }
        self._named: Address | None = None
        self._epoch = -1
        """The number of the configuration that has named it: higher after each failover."""
        self._is_asking = False

    def rotate(self) -> None:
        """Have new connections ask another one first."""
        self._put_first(self._all[1 % len(self._all)])

    def ask(self, node: Node) -> Questions:
        """Ask all of them for their primary. After a failover they learn of it one after the other,
        so connections do not ask one first that knows less than another. If the one that knows most
        names another primary than before, or than `node` was connected to, connections are opened
        again.
        """
        if self._is_asking:
            return
        self._is_asking = True
        try:
            answers = []
            for sentinel in list(self._all):
                reply = yield self._connectors[sentinel](), ("SENTINEL", "MASTERS")
                for words in reply if isinstance(reply, list) else ():
                    pairs = isinstance(words, list) and zip(words[::2], words[1::2], strict=False)
                    said = dict(pairs or words)  # a map of RESP3
                    if said.get(b"name") == self._service and b"config-epoch" in said:
                        named = said[b"ip"].decode(), int(said[b"port"])
                        answers.append((int(said[b"config-epoch"]), named, sentinel))
        finally:
            self._is_asking = False
        if not answers:
            return
        epoch, named, knows_most = max(answers, key=lambda answer: answer[0])
        if epoch < self._epoch and 2 * len(answers) <= len(self._all):
            return  # those that know more do not answer now; all may have been set up anew
        first = self._manager.sentinels[0]
        is_stale = any(each is first and number < epoch for number, _, each in answers)
        if is_stale or len(set(self._manager.sentinels)) < len(self._all):
            self._put_first(knows_most)
        before = node.connected_to if self._named is None else self._named
        self._epoch = epoch
        if before is None:
            return  # not connected yet: what the connection leads to is compared the next time
        self._named = named
        if before != named:
            node.generation += 1

    def _put_first(self, sentinel: Any) -> None:
        at = self._all.index(sentinel)
        self._all = self._all[at:] + self._all[:at]
        self._manager.sentinels = list(self._all)


class SingleServer:
    """A standalone server, or the primary that a Sentinel pool finds when it connects."""

    close_client: Callable[[], object] | None = None
    """Closes the redis-py client that it was made of; None if that is the caller's."""

    def __init__(self, pool: Any, settings: CallSettings) -> None:
        self._pool = pool  # connections of a sentinel pool hold only a weak reference to it
        kwargs = _connection_kwargs(pool.connection_kwargs, pool.connection_class, settings)
        connect = _connector(pool.connection_class, kwargs)
        self.node = Node(_pool_name(pool), connect, settings)
        if hasattr(pool, "sentinel_manager"):
            self._sentinels = Sentinels(pool, settings)
            self.node.rotate_sentinels = self._sentinels.rotate
            self.node.ask_sentinels_at = -math.inf

    def ask_sentinels(self) -> Questions:
        return self._sentinels.ask(self.node)

    def node_of(self, command: Command[Any]) -> Node:
        """The node, whatever the command."""
        return self.node

    def request_refresh(self) -> None:
        """Do nothing: every new connection asks a sentinel."""

    def follow_redirect(
        self, node: Node, host: str, port: int, command: Command[Any], *, permanent: bool
    ) -> Node:
        raise ConfigurationError(
            f"{node.name} is a node of a Redis Cluster; use redis+cluster://{node.name}"
        )


class ClusterTopology:
    """A Redis Cluster: the map of its slots, corrected by MOVED until it is read again."""

    close_client: Callable[[], object] | None = None
    """None: there is no client, as the map is read over connections of our own."""

    def __init__(self, slot_map: SlotMap, settings: CallSettings) -> None:
        self.map = slot_map
        self._settings = settings
        self._nodes: dict[Address, Node] = {}
        self._by_slot: dict[int, Node] = {}
        """The nodes of slots that were looked up, or named by MOVED, since the map was read."""
        self._version = slot_map.version
        """That of the map when `_by_slot` was emptied."""
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
        if self._version != self.map.version:
            self.on_refreshed()
        node = self._by_slot.get(slot)
        if node is not None:
            return node
        address = self.map.node_of(slot)
        if address is None:
            self._stale = True
            raise StoreUnavailable(f"no node of the cluster serves slot {slot}")
        node = self._by_slot[slot] = self._node(address)
        return node

    def request_refresh(self) -> None:
        """Read the map of slots again soon, as a node did not serve."""
        self._stale = True

    def follow_redirect(
        self, node: Node, host: str, port: int, command: Command[Any], *, permanent: bool
    ) -> Node:
        """The node that `node` redirects `command` to. `permanent`: MOVED, not ASK."""
        to = self._node(self.map.remap(host or node.name.rpartition(":")[0], port))
        if permanent:
            self._by_slot[_slot_of(command)] = to
            self._stale = True
        return to

    def claim_refresh(self) -> bool:
        """True, for the first caller of the process, if the map is stale and not asked for in
        `_MIN_REFRESH_S`.
        """
        if not self._stale:
            return False
        now = self._settings.clock.monotonic()
        pause_s = _MIN_REFRESH_AWAY_S if self._settings.outages.away else _MIN_REFRESH_S
        if 0 <= now - self.map.asked_at < pause_s:
            return False
        self.map.asked_at = now
        return True

    def on_refreshed(self) -> None:
        """Note that the map was read again. A node that is not in it is not waited for."""
        self._version = self.map.version
        self._by_slot.clear()
        for address in self._nodes.keys() - self.map.nodes:
            if (node := self._nodes.pop(address, None)) is not None:
                node.on_replaced()
        # While a node is away, another may take its place, also of one that nobody calls any more.
        self._stale = bool(self._settings.outages.away)

    def read_map(self) -> Questions:
        """Read the map, of which `on_refreshed` is told afterwards."""

        def connect(address: Address) -> Any:
            connection_class, base = self.map.template
            kwargs = base | dict(zip(("host", "port"), address, strict=True))
            return _question_connector(connection_class, kwargs, self._settings)()

        return self.map.read(connect)

    def _node(self, address: Address) -> Node:
        node = self._nodes.get(address)
        if node is None:
            (connection_class, base), (host, port) = self.map.template, address
            kwargs = _connection_kwargs(base, connection_class, self._settings)
            connect = _connector(connection_class, kwargs | {"host": host, "port": port})
            node = Node(f"{host}:{port}", connect, self._settings, self.map.of_good_version)
            # Of two threads that come here at once, one has its node kept: `on_refreshed` would
            # never end the probes of another one.
            node = self._nodes.setdefault(address, node)
        return node


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


_MAX_QUESTION_S = 1.0
"""The most seconds for each step of a question to a sentinel, or for the map of a cluster: one that
is silent must not keep the others from being asked.
"""

_TLS_CONTEXT_S = 60.0
"""For so many seconds questions over TLS share what was read of certificates, which takes some
20 ms: longer than all else, and with Sentinel once a second. Certificates are renewed at times.
"""


def _question_connector(
    connection_class: Any, kwargs: dict[str, Any], settings: CallSettings
) -> Callable[[], Any]:
    """Return a function that makes a connection for one question. It has half of the timeout, so
    that another server can be asked in the other half.
    """
    seconds = min(settings.timeout / 2, _MAX_QUESTION_S)
    timeouts = {"socket_timeout": seconds, "socket_connect_timeout": seconds}
    own = _connection_kwargs(kwargs, connection_class, settings)
    connect, monotonic = _connector(connection_class, own | timeouts), settings.clock.monotonic
    tls_context, until = None, -math.inf

    def connect_with_shared_context() -> Any:
        nonlocal tls_context, until
        connection = connect()
        if hasattr(connection, "ssl_context"):  # of redis.asyncio, which makes it when it is used
            if (now := monotonic()) >= until:
                tls_context, until = connection.ssl_context, now + _TLS_CONTEXT_S
            connection.ssl_context = tls_context
        return connection

    return connect_with_shared_context


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
    lacks_password = plain.get("ssl_certfile") and plain.get("ssl_password") is None
    if lacks_password and "ssl_password" in inspect.signature(connection_class.__init__).parameters:
        plain["ssl_password"] = ""  # or OpenSSL asks for one at the terminal, and waits for it
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
