"""One blocking connection: made by redis-py, spoken over by us.

redis-py opens it (TLS, AUTH, RESP, Sentinel); then packed bytes go straight to its socket and
replies come through a hiredis reader, because most of a redis-py call's time is pool checkout,
retry bookkeeping and wrappers. A connection class without a real socket (fakeredis) is spoken to
through its own methods.
"""

from __future__ import annotations

import select
import socket
import ssl
from contextlib import suppress
from functools import partial
from typing import Any

import hiredis
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import ResponseError
from redis.exceptions import TimeoutError as RedisTimeoutError

from ...core.clock import Clock
from .call import Lost, Send
from .handshake import check_version, misconfigured, time_ms
from .patience import OutOfTime, within
from .place import Node


class Link:
    """A connection to one node, used by one thread at a time. Broken or closed, it reopens."""

    def __init__(self, node: Node, clock: Clock) -> None:
        self.node = node
        self._clock = clock
        self._connection: Any = None
        self._socket: Any = None
        self._reader: Any = None
        self._poll: Any = None
        self._tls = False
        self._generation = 0

    def exchange(self, send: Send, deadline: float) -> Any:
        """The raw reply, an error reply as an exception object, or `Lost`."""
        if self._connection is not None and (
            self._generation != self.node.generation or self._dead()
        ):
            self.close()
        if self._connection is None and (lost := self._open(deadline)) is not None:
            return lost
        sent = self._tls  # a failing TLS write may have sent a part; a failing plain one has not
        try:
            left = deadline - self._clock.monotonic()
            if left <= 0:
                return Lost("deadline", sent=False, late=True)
            frame = send.frame()
            if self._reader is None:
                return self._exchange_plainly(frame)
            sock = self._socket
            sock.settimeout(left)
            count = sock.send(frame)
            sent = True
            if count < len(frame):
                sock.sendall(frame[count:])
            raw = self._read(deadline)
            return self._read(deadline) if send.asking else raw
        except TimeoutError:
            self.close()
            return Lost("timeout", sent=sent, late=True)
        except OSError as exc:
            self.close()
            return Lost(exc, sent=sent)
        except BaseException:
            # A signal handler raised in mid-read (Celery's soft time limit): the reply that is
            # still to come must not be taken for another call's.
            self.close()
            raise

    def close(self) -> None:
        """Drop the connection; the next exchange opens another."""
        connection, self._connection, self._socket = self._connection, None, None
        if connection is not None:
            connection.disconnect()

    def _read(self, deadline: float) -> Any:
        reader, sock = self._reader, self._socket
        raw = reader.gets()
        while raw is False:
            data = sock.recv(65536)
            if not data:
                raise ConnectionResetError("the server closed the connection")
            reader.feed(data)
            raw = reader.gets()
            if raw is False:  # a reply that trickles in must not stretch the deadline
                sock.settimeout(max(0.001, deadline - self._clock.monotonic()))
        return raw

    def _exchange_plainly(self, frame: bytes) -> Any:
        connection = self._connection
        try:
            connection.send_packed_command([frame], check_health=False)
            return connection.read_response(disable_decoding=True)
        except ResponseError as exc:
            return exc
        except (RedisConnectionError, RedisTimeoutError) as exc:
            self.close()
            return Lost(exc, sent=True)

    def _open(self, deadline: float) -> Lost | None:
        """Connect by `deadline`, name look-up, TLS and AUTH included: redis-py has a timeout for
        each step, none for all together.
        """
        node = self.node
        if (why := node.down()) is not None:
            return Lost(why, sent=False)
        left = deadline - self._clock.monotonic()
        try:
            connection, now_ms = within(left, partial(_opened, node), lambda it: it[0].disconnect())
        except OutOfTime:
            node.failed("connecting takes longer than the timeout")
            return Lost("connecting", sent=False, late=True)
        except Exception as exc:
            if (error := misconfigured(exc, node.name)) is not None:
                raise error from exc
            node.failed(exc)
            return Lost(exc, sent=False)
        node.reached()
        if now_ms is not None:
            node.clock.learn(now_ms)
        self._connection = connection
        self._generation = node.generation
        self._socket = getattr(connection, "_sock", None)
        self._tls = isinstance(self._socket, ssl.SSLSocket)
        self._reader = self._poll = None
        if isinstance(self._socket, socket.socket):
            self._reader = hiredis.Reader()
            self._poll = select.poll()
            self._poll.register(self._socket, select.POLLIN)
        return None

    def _dead(self) -> bool:
        """Has the server closed this connection, or said something unasked? Looked at before each
        call: what is sent into a closed connection has an unknown outcome, for nothing.
        """
        return self._poll is not None and bool(self._poll.poll(0))


def _opened(node: Node) -> tuple[Any, int | None]:
    """A new connection to `node`, and the server's time where it matters."""
    connection = node.new_connection()
    try:
        connection.connect()
        if not node.checked:
            with suppress(ResponseError):  # INFO may be forbidden; nothing else needs it
                check_version(_ask(connection, "INFO", "server"), node.name)
            node.checked = True
        return connection, time_ms(_ask(connection, "TIME")) if node.clock.used else None
    except BaseException:
        connection.disconnect()
        raise


def _ask(connection: Any, *words: str) -> Any:
    connection.send_command(*words, check_health=False)
    return connection.read_response(disable_decoding=True)
