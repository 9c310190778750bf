"""What answers at an endpoint where no connection to Redis can be opened.

An HTTP server on the port, TLS where the URL has none, or none where it has: redis-py reports them
as protocol errors, resets and timeouts, which an outage has, too. So what answers there is asked
once more, on a connection of its own and without a password:

    asked                            it answers               so the mistake is
    PING, not encrypted              as another server does   the port
                                     as Redis does            `rediss://`, where the URL says that
                                     with a record of TLS     `redis://`, where the URL says that
    the first message of TLS         with a record of TLS     the same
    PING over TLS                    as another server does   the port

Only such an answer is a mistake. A server that closes the connection, or says nothing, is away.
"""

from __future__ import annotations

import copy
import math
import re
import socket
import ssl
import threading
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

import redis
import redis.asyncio

from ...errors import ConfigurationError
from ...ring.clock import Clock

_PING = b"PING\r\n\r\n"
"""The empty line is nothing to Redis, and the end of the head of a request to HTTP servers."""
_OTHER_SERVERS = (
    # Python's server writes no status line where it cannot read the request.
    (rb"HTTP/\d|<!DOCTYPE|<html", "an HTTP server"),
    (rb"\0\0.\x04\0\0\0\0\0", "an HTTP/2 or gRPC server"),
    (rb"220[ -]", "a mail or FTP server"),
    (rb"\+OK |\* OK ", "a mail server"),
    (rb"SSH-", "an SSH server"),
    (rb".{3}\0[\x0a\xff]", "MySQL"),
    (rb"ERROR\r\n", "memcached"),
    (rb"AMQP", "RabbitMQ"),
)
"""The beginning of an answer, and who answers so."""
_REDIS = re.compile(
    rb"\+PONG|-(NOAUTH|NOPERM|DENIED|LOADING|BUSY|MASTERDOWN|ERR max number of clients)\b"
)
_TLS_RECORD = re.compile(rb"[\x15\x16]\x03[\0-\x04]")
"""The beginning of an alert, or of a message of the handshake."""
_ENOUGH_BYTES = 16
_SHARE_OF_FIRST = 0.6
"""How much of the time of a check the first question may take."""
_CHECK_EVERY_S = 5.0
"""Seconds between two checks that find nothing: each costs a server up to three connections."""
_MAX_CHECK_S = 1.0
_MAX_WAIT_S = 0.25


def check_seconds(timeout: float) -> float:
    """Return the seconds that a check may take, where connecting may take `timeout` seconds."""
    return min(timeout / 2, _MAX_CHECK_S)


def wait_seconds(timeout: float) -> float:
    """Return the seconds after which connecting takes long, and what answers is looked at beside
    it. Both are over within `timeout`.
    """
    return min(timeout / 2, _MAX_WAIT_S)


class Endpoint(NamedTuple):
    """Where a connection is opened."""

    host: str
    port: int
    tls: bool


_OPEN_SOCKETS = (
    redis.Connection._connect,
    redis.SSLConnection._connect,
    redis.asyncio.Connection._connect,
    redis.asyncio.SSLConnection._connect,
)
"""How connections reach their endpoint: others may go through a proxy, or nowhere."""
_TLS_CLASSES = (redis.SSLConnection, redis.asyncio.SSLConnection)


def endpoints_of(connection: Any) -> list[Endpoint]:
    """Return where this redis-py connection, which could not be opened, has tried to. Empty for a
    Unix socket, and for classes of others. Of a Sentinel set whose primary is not known yet it is
    the sentinels.
    """
    if getattr(type(connection), "_connect", None) not in _OPEN_SOCKETS:
        return []
    host, port = getattr(connection, "host", None), getattr(connection, "port", None)
    pool = getattr(connection, "connection_pool", None)
    manager = getattr(pool, "sentinel_manager", None)
    if manager is not None and (host, port) == ("localhost", 6379):  # what redis-py begins with
        return [
            each
            for client in manager.sentinels
            for each in _endpoints_of_pool(client.connection_pool)
        ]
    if host is None or port is None:
        return []
    return [Endpoint(host, int(port), isinstance(connection, _TLS_CLASSES))]


def _endpoints_of_pool(pool: Any) -> list[Endpoint]:
    kwargs, kind = pool.connection_kwargs, pool.connection_class
    if "host" not in kwargs or getattr(kind, "_connect", None) not in _OPEN_SOCKETS:
        return []
    return [Endpoint(kwargs["host"], int(kwargs.get("port", 6379)), issubclass(kind, _TLS_CLASSES))]


class WrongServerCheck:
    """The checks of one node, or of the map of a cluster."""

    def __init__(self, clock: Clock) -> None:
        self._monotonic = clock.monotonic
        self._checked_at = self._found_at = -math.inf
        self._wrong: Sequence[Endpoint] = ()
        """Where a check has found another server, a moment ago."""
        self._lock = threading.Lock()
        """Held by the thread that checks."""
        self._last: tuple[Sequence[Endpoint], float] = (), -math.inf
        """What the last check has looked at, and when it has ended (monotonic seconds)."""
        self._last_found: ConfigurationError | None = None

    @property
    def is_due(self) -> bool:
        """True if the last check was some time ago, goes on, or has found another server."""
        is_old = self._monotonic() >= self._checked_at + _CHECK_EVERY_S
        return is_old or bool(self._wrong) or self._lock.locked()

    @property
    def has_found(self) -> bool:
        """True if a check has found another server a moment ago."""
        return bool(self._wrong)

    def again(self, timeout: float) -> ConfigurationError | None:
        """Check again what was found to be another server, before anything is connected to: it is
        told at once then, and not after a timeout.
        """
        return self.find(self._wrong, timeout) if self._wrong else None

    def find(self, endpoints: Iterable[Endpoint], timeout: float) -> ConfigurationError | None:
        """Return the mistake, if at each of `endpoints` another server answers, or in another way
        than the URL says. To be called in a thread that may wait: `check_seconds(timeout)` in all.
        """
        wrong, asked_at = list(endpoints), self._monotonic()
        with self._lock:
            looked_at, ended_at = self._last
            if looked_at != wrong or ended_at < asked_at:  # else another thread has just checked
                self._last_found = self._check(wrong, check_seconds(timeout))
                self._last = wrong, self._monotonic()
            # A copy: one exception raised in several threads would mix their tracebacks.
            return copy.copy(self._last_found)

    def _check(self, wrong: list[Endpoint], seconds: float) -> ConfigurationError | None:
        self._checked_at = self._monotonic()
        until = self._checked_at + seconds
        mistakes = [_mistake_at(endpoint, until, self._monotonic) for endpoint in wrong]
        if mistakes and None not in mistakes:
            self._wrong, self._found_at = wrong, self._checked_at
            return ConfigurationError(mistakes[0])
        if self._checked_at >= self._found_at + _CHECK_EVERY_S:  # one answer may have come late
            self._wrong = ()
        return None


def was_reached(failure: BaseException) -> bool:
    """True if connecting has failed at a server, and not before."""
    link: BaseException | None = failure
    seen: set[int] = set()
    while link is not None and id(link) not in seen:
        if isinstance(link, (ConnectionRefusedError, socket.gaierror)):
            return False
        seen.add(id(link))
        link = link.__cause__ or link.__context__
    return True


def _mistake_at(endpoint: Endpoint, until: float, monotonic: Callable[[], float]) -> str | None:
    """Return which mistake the answer at `endpoint` shows, if it comes `until` then."""

    def ask(frame: bytes, until: float = until, context: ssl.SSLContext | None = None) -> bytes:
        return _answer(endpoint, frame, lambda: max(0.001, until - monotonic()), context)

    name = f"{endpoint.host}:{endpoint.port}"
    now = monotonic()
    answer = ask(_PING, now + (until - now) * _SHARE_OF_FIRST)
    server = _server_of(answer)
    if server is None and endpoint.tls:
        if _REDIS.match(answer):
            return (
                f"{name} answers in plain, without TLS; write redis:// in place of rediss:// in "
                "the URL"
            )
        server = _server_of(ask(_PING, context=_context()))
    elif server is None and not _REDIS.match(answer):
        wants_tls = _TLS_RECORD.match(answer) or (
            not answer and _TLS_RECORD.match(ask(_client_hello(endpoint.host)))
        )
        if wants_tls:
            return f"{name} wants TLS; write rediss:// in place of redis:// in the URL"
    if server is None:
        return None
    return f"{name} answers as {server} does, and not as Redis; the port of the URL is wrong"


def _server_of(answer: bytes) -> str | None:
    flags = re.IGNORECASE | re.DOTALL
    return next((server for sign, server in _OTHER_SERVERS if re.match(sign, answer, flags)), None)


def _answer(
    endpoint: Endpoint,
    frame: bytes,
    seconds_left: Callable[[], float],
    context: ssl.SSLContext | None,
) -> bytes:
    """Return the first bytes that come after `frame`, on a new connection; empty if none do."""
    received = b""
    try:
        with socket.create_connection(endpoint[:2], seconds_left()) as plain:
            sock = plain
            if context is not None:
                plain.getpeername()  # after a reset, `wrap_socket` would fail and leave it open
                sock = context.wrap_socket(plain, server_hostname=endpoint.host)
            with sock:
                sock.sendall(frame)
                # Until more bytes would change nothing of what is found.
                while not (
                    len(received) >= _ENOUGH_BYTES
                    or b"\n" in received
                    or _TLS_RECORD.match(received)
                    or _server_of(received)
                ):
                    sock.settimeout(seconds_left())
                    if not (part := sock.recv(_ENOUGH_BYTES)):
                        break
                    received += part
    except (OSError, ValueError):  # `ssl` raises a ValueError for a host name that is none
        pass
    return received


def _context() -> ssl.SSLContext:
    """Return one that accepts all certificates: nothing is sent that has to be kept secret."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    return context


def _client_hello(host: str) -> bytes:
    """Return the first message that a client of TLS sends."""
    sent = ssl.MemoryBIO()
    with suppress(ssl.SSLWantReadError, ValueError):
        _context().wrap_bio(ssl.MemoryBIO(), sent, server_hostname=host).do_handshake()
    return sent.read()
