"""How bytes go out and a reply comes back on an open connection: four kinds of connection.

    TcpTalk     straight to the socket (TCP or unix), replies through a hiredis reader
    SelectTalk  the same where `select.poll` or `MSG_DONTWAIT` is missing (Windows, eventlet)
    TlsTalk     the same through TLS, whose socket has to watch its own time
    ClientTalk  redis-py's own methods, for connection classes without a socket (fakeredis)

Most of a redis-py call's time is pool checkout, retry bookkeeping and wrappers; here a call is one
send, one poll and one recv.
"""

from __future__ import annotations

import os
import select
import socket
import ssl
from collections.abc import Callable
from typing import Any, Protocol

import hiredis
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import ResponseError
from redis.exceptions import TimeoutError as RedisTimeoutError

from ....core.clock import Clock
from ....core.interrupts import is_interruption
from ..attempts import NoReply
from ..outcome import with_token

_RECV_BYTES = 65536


class Transport(Protocol):
    """One exchange at a time; after a `NoReply` the connection is not to be used again."""

    def is_closed(self) -> bool:
        """Has the server closed this connection, or said something unasked? Looked at before each
        call: what is sent into a closed connection has an unknown outcome, for nothing.
        """
        ...

    def request(self, frame: bytes, deadline: float) -> Any:
        """Send `frame` and get the reply, an error reply as an exception object, or `NoReply`."""
        ...

    def receive(self, deadline: float) -> Any:
        """One more reply."""
        ...

    def close(self) -> None:
        """Close the connection."""
        ...


def socket_of(connection: Any) -> Any:
    """The socket of an open redis-py connection, taken from it; the connection, if it has none.

    Destructors of redis-py are Python code, and what a signal handler raises in one is dropped by
    Python. That of a socket is C.
    """
    sock = getattr(connection, "_sock", None)
    if not isinstance(sock, socket.socket):
        return connection
    connection._sock = None
    # They hold themselves by bound methods: without this, the garbage collector would run their
    # destructors later, in any thread.
    vars(connection._parser).clear()
    vars(connection).clear()
    return sock


def transport_of(opened: Any, clock: Clock) -> Transport:
    """The way to talk over what `socket_of` has returned; made in the thread that will use it, as
    gevent's polls belong to the thread in which they were made.
    """
    if not isinstance(opened, socket.socket):
        return ClientTransport(opened)
    if isinstance(opened, ssl.SSLSocket):
        return TlsTransport(opened, clock)
    # Asked for each connection, because eventlet takes `select.poll` away when it patches.
    if hasattr(select, "poll") and hasattr(socket, "MSG_DONTWAIT"):
        return TcpTransport(opened, clock)
    return SelectTransport(opened, clock)


def _readable_within(sock: socket.socket) -> Callable[[float], object]:
    """A function of milliseconds: is there something to be read from `sock`, or comes within them?
    What it returns is true or false. `poll` costs less than `select` and takes every descriptor.
    """
    if hasattr(select, "poll"):
        poll = select.poll()
        poll.register(sock, select.POLLIN)
        return poll.poll

    def readable(ms: float) -> bool:
        return bool(select.select((sock,), (), (), ms / 1000)[0])

    return readable


def _close(sock: socket.socket, opened_by: int) -> None:
    if os.getpid() == opened_by:  # a forked child must not end the connection of its parent
        try:
            sock.shutdown(socket.SHUT_RDWR)
        except OSError as exc:  # the other side may have closed it already
            if is_interruption(exc):
                raise
    sock.close()


class TcpTransport:
    """A blocking socket and a poll with the time that is left: one system call less than a socket
    timeout costs.
    """

    _flags = getattr(socket, "MSG_DONTWAIT", 0)
    _socket_timeout_s: float | None = None
    """The timeout of the socket, except while the rest of a frame is written."""

    def __init__(self, sock: socket.socket, clock: Clock) -> None:
        sock.settimeout(self._socket_timeout_s)
        self._socket = sock
        self._process = os.getpid()
        self._monotonic = clock.monotonic
        self._reader = hiredis.Reader()
        self._poll = _readable_within(sock)

    def is_closed(self) -> bool:
        return bool(self._poll(0))

    def request(self, frame: bytes, deadline: float) -> Any:
        sent = False  # a write that fails at once has sent nothing
        try:
            try:
                count = self._socket.send(frame, self._flags)
            except BlockingIOError as exc:
                if is_interruption(exc):
                    raise
                count = 0
            sent = True
            if count < len(frame):
                self._send_rest(frame[count:], deadline)
            return self._receive_reply(deadline)
        except (OSError, hiredis.HiredisError) as exc:
            if is_interruption(exc):
                raise
            return NoReply(exc, sent=sent, late=isinstance(exc, TimeoutError))

    def receive(self, deadline: float) -> Any:
        raw = self._reader.gets()
        return self._receive_reply(deadline) if raw is False else raw

    def close(self) -> None:
        _close(self._socket, self._process)

    def _receive_reply(self, deadline: float) -> Any:
        reader = self._reader
        while True:
            left = deadline - self._monotonic()
            if not self._poll(left * 1000 if left > 0 else 0):
                return NoReply("timeout", sent=True, late=True)
            data = self._socket.recv(_RECV_BYTES)
            if not data:
                raise ConnectionResetError("the server closed the connection")
            reader.feed(data)
            raw = reader.gets()
            if raw is not False:
                return raw

    def _send_rest(self, rest: bytes, deadline: float) -> None:
        self._socket.settimeout(max(0.001, deadline - self._monotonic()))
        self._socket.sendall(rest)
        self._socket.settimeout(self._socket_timeout_s)


class SelectTransport(TcpTransport):
    """A socket that never blocks, for platforms that cannot say so with each call."""

    _flags = 0
    _socket_timeout_s = 0.0

    def _receive_reply(self, deadline: float) -> Any:
        while True:
            try:
                return super()._receive_reply(deadline)
            except BlockingIOError:  # `select` may report a socket on which nothing is to be read
                continue


class TlsTransport:
    """TLS may need several reads for one reply, or none: its socket counts the time itself."""

    def __init__(self, sock: ssl.SSLSocket, clock: Clock) -> None:
        self._socket = sock
        self._process = os.getpid()
        self._monotonic = clock.monotonic
        self._reader = hiredis.Reader()
        self._poll = _readable_within(sock)

    def is_closed(self) -> bool:
        return bool(self._poll(0))

    def request(self, frame: bytes, deadline: float) -> Any:
        try:  # a failing write may have sent a part of its record
            self._socket.settimeout(max(0.001, deadline - self._monotonic()))
            self._socket.sendall(frame)
            return self.receive(deadline)
        except (OSError, hiredis.HiredisError) as exc:
            if is_interruption(exc):
                raise
            return NoReply(exc, sent=True, late=isinstance(exc, TimeoutError))

    def receive(self, deadline: float) -> Any:
        reader = self._reader
        raw = reader.gets()
        while raw is False:
            self._socket.settimeout(max(0.001, deadline - self._monotonic()))
            data = self._socket.recv(_RECV_BYTES)
            if not data:
                raise ConnectionResetError("the server closed the connection")
            reader.feed(data)
            raw = reader.gets()
        return raw

    def close(self) -> None:
        _close(self._socket, self._process)


class ClientTransport:
    """redis-py sends and parses."""

    def __init__(self, connection: Any) -> None:
        self._connection = connection

    def is_closed(self) -> bool:
        return False

    def close(self) -> None:
        self._connection.disconnect()

    def request(self, frame: bytes, deadline: float) -> Any:
        try:
            self._connection.send_packed_command([frame], check_health=False)
        except (RedisConnectionError, RedisTimeoutError) as exc:
            return _no_reply(exc)
        return self.receive(deadline)

    def receive(self, deadline: float) -> Any:
        try:
            return self._connection.read_response(disable_decoding=True)
        except ResponseError as exc:
            return with_token(exc)
        except (RedisConnectionError, RedisTimeoutError) as exc:
            return _no_reply(exc)


def _no_reply(exc: Exception) -> NoReply:
    """redis-py turns whatever OSError comes up in it into an error of its own, a signal handler's
    too; that one is raised again.
    """
    cause = exc.__cause__ or exc.__context__
    if isinstance(cause, OSError) and is_interruption(cause):
        raise cause
    return NoReply(exc, sent=True)
