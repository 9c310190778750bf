"""How an open connection sends a frame and receives the replies, by the kind of connection.

    PollTransport     a socket (TCP or unix), and a hiredis reader for the replies
    SelectTransport  the same where `select.poll` or `MSG_DONTWAIT` is missing (Windows, eventlet)
    TlsTransport     TLS, whose socket needs a timeout of its own
    ClientTransport  redis-py's own methods, for connection classes without a socket (fakeredis)

Most of the time of a redis-py call goes into pool checkout, retry bookkeeping and wrappers. Here a
call is one send, one poll and one recv.
"""

from __future__ import annotations

import os
import select
import socket
import ssl
from collections.abc import Callable
from typing import Any, Literal, Protocol

import hiredis
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import ResponseError
from redis.exceptions import TimeoutError as RedisTimeoutError

from ....core.clock import Clock
from ....core.interrupts import is_interruption
from ..attempts import NoReply, RawReply
from ..outcome import restore_code

_RECV_BYTES = 65536


class Transport(Protocol):
    """Makes one exchange at a time. After a `NoReply` it must not be used again."""

    def is_unusable(self) -> bool:
        """True if the server has closed the connection, or has sent something without a request.
        Checked before a call, because a call that is sent into a closed connection has an unknown
        outcome, although it was surely not executed.
        """
        ...

    def round_trip(self, frame: bytes, deadline: float) -> RawReply:
        """Send `frame`, and return the first reply to it."""
        ...

    def receive(self, deadline: float) -> RawReply:
        """Return the next reply."""
        ...

    def close(self) -> None:
        """Close the connection."""
        ...


def detach_socket(connection: Any) -> Any:
    """Take the socket out of an open redis-py connection; return the connection if it has none.

    The destructors of redis-py are Python code, and Python drops what a signal handler raises in a
    destructor. The destructor of a socket is C code.
    """
    sock = getattr(connection, "_sock", None)
    if not isinstance(sock, socket.socket):
        return connection
    connection._sock = None
    # Both are in reference cycles through bound methods: without this, the garbage collector would
    # run their destructors later, in any thread.
    vars(connection._parser).clear()
    vars(connection).clear()
    return sock


def make_transport(opened: Any, clock: Clock) -> Transport:
    """Return the transport over what `detach_socket` has returned. To be called in the thread that
    will use it, because gevent's polls belong to the thread in which they were made.
    """
    if not isinstance(opened, socket.socket):
        return ClientTransport(opened)
    if isinstance(opened, ssl.SSLSocket):
        return TlsTransport(opened, clock)
    # Checked for each connection, because eventlet removes `select.poll` when it patches.
    if hasattr(select, "poll") and hasattr(socket, "MSG_DONTWAIT"):
        return PollTransport(opened, clock)
    return SelectTransport(opened, clock)


def close_detached(opened: Any, opened_by: int) -> None:
    """Close what `detach_socket` has returned in process `opened_by`. No transport is made of it:
    that would change the mode of a socket which a forked child shares with its parent.
    """
    if isinstance(opened, socket.socket):
        _close(opened, opened_by)
    else:
        ClientTransport(opened).close()


def _readable_within(sock: socket.socket) -> Callable[[float], object]:
    """A function that waits up to so many milliseconds for `sock` to be readable, and returns a
    true value if it is. `poll` costs less than `select`, and takes descriptors of any number.
    """
    if hasattr(select, "poll"):
        poll = select.poll()
        poll.register(sock, select.POLLIN)
        return poll.poll

    def readable(ms: float) -> bool:
        try:
            return bool(select.select((sock,), (), (), ms / 1000)[0])
        except ValueError as exc:  # "filedescriptor out of range"
            raise OSError(
                f"this platform has no select.poll, and select takes no descriptor as high as "
                f"{sock.fileno()}: close some files or connections of this process"
            ) from exc

    return readable


def _close(sock: socket.socket, opened_by: int) -> None:
    """Close `sock`, which process `opened_by` has opened."""
    if os.getpid() == opened_by:  # a forked child must not end the connection of its parent
        try:
            sock.shutdown(socket.SHUT_RDWR)
        except OSError as exc:  # the other side may have closed it already
            if is_interruption(exc):
                raise
    sock.close()


class PollTransport:
    """A blocking socket, and a poll with the time that is left. A socket timeout would cost one
    more system call.
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

    def is_unusable(self) -> bool:
        return bool(self._poll(0))

    def round_trip(self, frame: bytes, deadline: float) -> RawReply:
        sent = False  # it stays False if the first write fails, which then has sent nothing
        try:
            try:
                count = self._socket.send(frame, self._flags)
            except BlockingIOError:
                count = 0
            sent = True
            if count < len(frame):
                self._send_rest(frame[count:], deadline)
            return self._receive_reply(deadline)
        except (OSError, hiredis.HiredisError) as exc:
            if is_interruption(exc):
                raise
            return NoReply(exc, sent=sent, late=isinstance(exc, TimeoutError))

    def receive(self, deadline: float) -> RawReply:
        raw: RawReply | Literal[False] = self._reader.gets()
        return self._receive_reply(deadline) if raw is False else raw

    def close(self) -> None:
        _close(self._socket, self._process)

    def _receive_reply(self, deadline: float) -> RawReply:
        reader = self._reader
        while True:
            left = deadline - self._monotonic()
            if not self._poll(left * 1000 if left > 0 else 0):
                return NoReply("timeout", sent=True, late=True)
            data = self._socket.recv(_RECV_BYTES)
            if not data:
                raise ConnectionResetError("the server closed the connection")
            reader.feed(data)
            raw: RawReply | Literal[False] = reader.gets()
            if raw is not False:
                return raw

    def _send_rest(self, rest: bytes, deadline: float) -> None:
        self._socket.settimeout(max(0.001, deadline - self._monotonic()))
        self._socket.sendall(rest)
        self._socket.settimeout(self._socket_timeout_s)


class SelectTransport(PollTransport):
    """A non-blocking socket, for platforms without a flag that makes a single call non-blocking."""

    _flags = 0
    _socket_timeout_s = 0.0

    def _receive_reply(self, deadline: float) -> RawReply:
        while True:
            try:
                return super()._receive_reply(deadline)
            except BlockingIOError:  # `select` may report a socket that has nothing to read
                continue


class TlsTransport:
    """TLS. One reply may need several reads, or none, so the socket itself has a timeout."""

    def __init__(self, sock: ssl.SSLSocket, clock: Clock) -> None:
        self._socket = sock
        self._process = os.getpid()
        self._monotonic = clock.monotonic
        self._reader = hiredis.Reader()
        self._poll = _readable_within(sock)

    def is_unusable(self) -> bool:
        return bool(self._poll(0))

    def round_trip(self, frame: bytes, deadline: float) -> RawReply:
        try:  # a failing write may have sent a part of its record
            self._socket.settimeout(max(0.001, deadline - self._monotonic()))
            self._socket.sendall(frame)
            return self.receive(deadline)
        except (OSError, hiredis.HiredisError) as exc:
            if is_interruption(exc):
                raise
            return NoReply(exc, sent=True, late=isinstance(exc, TimeoutError))

    def receive(self, deadline: float) -> RawReply:
        reader = self._reader
        raw: RawReply | Literal[False] = reader.gets()
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
    """A connection over which redis-py itself sends and parses."""

    def __init__(self, connection: Any) -> None:
        self._connection = connection

    def is_unusable(self) -> bool:
        return False

    def close(self) -> None:
        self._connection.disconnect()

    def round_trip(self, frame: bytes, deadline: float) -> RawReply:
        try:
            self._connection.send_packed_command([frame], check_health=False)
        except (RedisConnectionError, RedisTimeoutError) as exc:
            return _no_reply(exc)
        return self.receive(deadline)

    def receive(self, deadline: float) -> RawReply:
        try:
            reply: RawReply = self._connection.read_response(disable_decoding=True)
            return reply
        except ResponseError as exc:
            return restore_code(exc)
        except (RedisConnectionError, RedisTimeoutError) as exc:
            return _no_reply(exc)


def _no_reply(exc: Exception) -> NoReply:
    """The `NoReply` for an error of redis-py. redis-py replaces every OSError by an error of its
    own, also one that a signal handler has raised; that one is raised again here.
    """
    cause = exc.__cause__ or exc.__context__
    if isinstance(cause, OSError) and is_interruption(cause):
        raise cause
    return NoReply(exc, sent=True)
