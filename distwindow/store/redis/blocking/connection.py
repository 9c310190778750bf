"""One blocking connection: made by redis-py (TLS, AUTH, RESP, Sentinel), spoken over by us."""

from __future__ import annotations

# Python imports these when it first looks a host up, and redis-py when it makes its first client,
# in the thread that connects. A child that is forked in the midst of that could never connect: it
# would wait for the import's lock, or find half of a module.
import email.parser  # noqa: F401
import encodings.idna  # noqa: F401
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from typing import Any, NamedTuple

import hiredis
from redis.exceptions import ResponseError
from redis.exceptions import TimeoutError as RedisTimeoutError

from ....core.clock import Clock
from ....core.interrupts import is_interruption, start_thread
from ..attempts import NoReply, Request
from ..handshake import check_version, configuration_failure, time_ms
from ..timeouts import BackgroundJob, JobAbandoned
from ..topology import Node
from .transport import Transport, socket_of, transport_of

_FRESH_S = 0.005
"""Seconds for which a connection that has answered is taken to be alive: a look costs a system
call. Not for longer: servers and balancers close what is idle, and other connections do not tell.
"""


class BlockingConnection:
    """A connection to one node, used by one thread at a time. Broken or closed, it reopens."""

    __slots__ = (
        "__weakref__",
        "_clock",
        "_closed_elsewhere",
        "_generation",
        "_last_used_at",
        "_opening",
        "_round_trip_s",
        "_transport",
        "node",
    )  # fmt: skip

    def __init__(self, node: Node, clock: Clock) -> None:
        self.node = node
        self._clock = clock
        self._transport: Transport | None = None
        self._opening: BackgroundJob[_Opened] | None = None
        """A connection that was not there in time; the next call takes it over."""
        self._closed_elsewhere: Transport | None = None
        """A connection that failed, and is still to be closed."""
        self._generation = 0
        self._round_trip_s = 0.0
        """Seconds of a round trip, on a connection that has just been opened."""
        self._last_used_at = 0.0
        """When the last call began."""

    def exchange(self, request: Request, deadline: float) -> Any:
        """The raw reply, an error reply as an exception object, or `NoReply`."""
        if not self.ready(self._clock.monotonic()) and (lost := self._open(deadline)) is not None:
            return lost
        # What cannot be answered in time any more would only cost the connection.
        if self._clock.monotonic() + self._round_trip_s >= deadline:
            self._round_trip_s = 0.0
            return NoReply("deadline", sent=False, late=True)
        self._round_trip_s = 0.0
        return self.request(request.frame(), deadline, replies=2 if request.asking else 1)

    def ready(self, now: float) -> bool:
        """Is there a connection that looks alive? A doubtful one is closed. It is not looked at
        where a call began on it in the last few milliseconds.
        """
        if self._transport is None:
            return False
        idle, self._last_used_at = now - self._last_used_at, now
        if self._generation != self.node.generation or (
            idle > _FRESH_S and self._transport.is_closed()
        ):
            self.close()
            return False
        return True

    def request(self, frame: bytes | None, deadline: float, replies: int = 1) -> Any:
        """Send `frame` over the ready connection and take the last of its replies; without a frame,
        take the next reply to what was sent before.
        """
        transport = self._transport
        if transport is None:  # another thread has just closed the limiter
            return NoReply("the connection was closed", sent=frame is None)
        try:
            raw = (
                transport.request(frame, deadline)
                if frame is not None
                else transport.receive(deadline)
            )
            if replies > 1 and type(raw) is not NoReply:
                raw = transport.receive(deadline)
        except BaseException as exc:
            self._closed_elsewhere, self._transport = transport, None  # at once: see `_hang_up`
            self._close_elsewhere()
            failed = isinstance(exc, (OSError, hiredis.HiredisError))
            if not failed or is_interruption(exc):
                raise
            raw = NoReply(exc, sent=True, late=isinstance(exc, TimeoutError))
        if type(raw) is NoReply:
            self._hang_up()
        return raw

    def pipeline(self, requests: Sequence[Request], deadline: float) -> list[Any]:
        """The raw replies to `sends`, in order, all sent in one piece; a `Lost` for each from the
        one on that did not come.
        """
        if not self.ready(self._clock.monotonic()) and (lost := self._open(deadline)) is not None:
            return [lost] * len(requests)
        frames = b"".join([request.frame() for request in requests])
        try:
            raws = [self.request(frames, deadline)]
            while len(raws) < len(requests) and type(raws[-1]) is not NoReply:
                raws.append(self.request(None, deadline))
        except BaseException:  # between two replies, too
            self._hang_up()
            raise
        return raws + [raws[-1]] * (len(requests) - len(raws))

    def close(self) -> None:
        """Drop the connection; the next exchange opens another. Forgotten last, so that who is
        interrupted by a signal handler can close it again.
        """
        transport, opening = self._transport, self._opening
        self._close_elsewhere()
        if transport is not None:
            transport.close()
        if opening is not None:
            opening.abandon()
        if self._transport is transport:
            self._transport = None
        if self._opening is opening:
            self._opening = None

    def _hang_up(self) -> None:
        """Drop a connection that failed, or in whose exchange a signal handler has raised (Celery's
        soft time limit): the replies that are still to come must not be taken for other calls'.
        Another thread closes it, as a signal handler may raise here again.
        """
        if self._transport is not None:
            self._closed_elsewhere, self._transport = self._transport, None
            self._close_elsewhere()

    def _close_elsewhere(self) -> None:
        if self._closed_elsewhere is not None:
            if not start_thread(self._closed_elsewhere.close):
                self._closed_elsewhere.close()
            self._closed_elsewhere = None

    def _open(self, deadline: float) -> NoReply | None:
        """Connect by `deadline`, name look-up, TLS and AUTH included: redis-py has a timeout for
        each step, none for all together. Where it takes longer it goes on for the next call, or a
        link of many round trips could never be opened.
        """
        node = self.node
        self._close_elsewhere()  # who hung up may have been interrupted before
        opening = self._opening
        if opening is None:
            if (why := node.unavailable_reason()) is not None:
                return NoReply(why, sent=False)
            opening = self._opening = BackgroundJob(
                partial(_opened, node, self._clock), partial(_close_opened, clock=self._clock)
            )
        opening.start()
        if not opening.wait(deadline - self._clock.monotonic()):
            return NoReply("connecting", sent=False, late=True)
        exc = opening.failure
        if exc is not None:
            self._opening = None
            if isinstance(exc, JobAbandoned):
                return NoReply(exc, sent=False)
            if (error := configuration_failure(exc, node.name)) is not None:
                raise error from exc
            node.on_connect_failed(exc, slow=isinstance(exc, (TimeoutError, RedisTimeoutError)))
            return NoReply(exc, sent=False)
        opened = opening.result
        node.on_connected()
        if opened.now_ms is not None:
            node.clock.learn(opened.now_ms, opened.at)
        try:
            transport = transport_of(opened.socket, self._clock)
        except (OSError, ValueError) as failure:  # another thread has just closed the limiter
            if is_interruption(failure):
                raise
            self._opening = None
            return NoReply(failure, sent=False)
        # In one step: who is interrupted before leaves it to the next call.
        self._generation, self._round_trip_s, self._transport = (
            opened.generation,
            opened.trip,
            transport,
        )
        self._opening = None
        return None


class _Opened(NamedTuple):
    socket: Any
    """See `socket_of`."""
    generation: int
    now_ms: int | None
    """The server's time where it matters, and our time (monotonic seconds) when it said so."""
    at: float
    trip: float
    """Seconds that connecting's last question took."""


def _close_opened(opened: _Opened, clock: Clock) -> None:
    transport_of(opened.socket, clock).close()


def _opened(node: Node, clock: Clock) -> _Opened:
    """A new connection to `node`."""
    generation = node.generation
    connection = node.new_connection()
    try:
        connection.connect()
        if not node.checked:
            with suppress(ResponseError):  # INFO may be forbidden; nothing else needs it
                check_version(_request(connection, "INFO", "server"), node.name)
            node.checked = True
        began = clock.monotonic()
        now_ms = time_ms(_request(connection, "TIME")) if node.clock.used else None
        at = clock.monotonic()
        return _Opened(socket_of(connection), generation, now_ms, at, at - began)
    except BaseException:  # whatever it is: nobody else knows of this connection
        connection.disconnect()
        raise


def _request(connection: Any, *words: str) -> Any:
    connection.send_command(*words, check_health=False)
    return connection.read_response(disable_decoding=True)
