"""One blocking connection. redis-py opens it (TLS, AUTH, RESP, Sentinel), and we exchange requests
and replies over its socket.

    closed     no transport; `_open` starts a background job that connects
    opening    `_opening` is that job; a call whose time is over leaves it to the next call
    open       `_transport` is set; it is replaced if the node has a new generation, or if the
               server has closed it
    failed     after an exchange without a reply, or interrupted by a signal handler: closed by
               another thread, and then as `closed`

A signal handler may raise anywhere in the main thread, so each step leaves one of these states.
"""

from __future__ import annotations

# Python imports these when it first looks a host up, and redis-py when it makes its first client,
# in the thread that connects. A child that is forked during such an import could never connect: it
# would wait for the import's lock, or find half of a module.
import email.parser  # noqa: F401 - imported before a fork, see above
import encodings.idna  # noqa: F401 - imported before a fork, see above
import os
from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import hiredis
from redis.exceptions import ResponseError
from redis.exceptions import TimeoutError as RedisTimeoutError

from ....core.clock import Clock
from ....core.interrupts import is_interruption, start_thread
from ..attempts import NoReply, RawReply, Request
from ..handshake import HandshakeResult, configuration_failure, handshake
from ..timeouts import BackgroundJob, JobAbandoned
from ..topology import Node
from .transport import Transport, close_detached, detach_socket, make_transport

_FRESH_S = 0.005
"""Seconds after the start of a call in which a connection is taken to be open, because a check
costs a system call. The time is this short because servers and load balancers close idle
connections.
"""


class BlockingConnection:
    """A connection to one node, used by one thread at a time. It reopens after it was closed."""

    __slots__ = (
        "__weakref__",
        "_clock",
        "_generation",
        "_last_used_at",
        "_opening",
        "_round_trip_s",
        "_transport",
        "_transport_to_close",
        "node",
    )  # fmt: skip

    def __init__(self, node: Node, clock: Clock) -> None:
        self.node = node
        self._clock = clock
        self._transport: Transport | None = None
        self._opening: BackgroundJob[_Opened] | None = None
        """Connects in the background. If it is not done in time, the next call waits for it."""
        self._transport_to_close: Transport | None = None
        """A transport that has failed and that another thread is to close."""
        self._generation = 0
        self._round_trip_s = 0.0
        """Seconds that a round trip took while connecting; 0 once a call was made."""
        self._last_used_at = 0.0
        """When the last call began, monotonic seconds."""

    def execute_request(self, request: Request, deadline: float) -> RawReply:
        """Send a request and return the raw reply to it."""
        if (
            not self.validate(self._clock.monotonic())
            and (no_reply := self._open(deadline)) is not None
        ):
            return no_reply
        # A request that cannot be answered in time would only cost the connection.
        if self._clock.monotonic() + self._round_trip_s >= deadline:
            self._round_trip_s = 0.0
            return NoReply("deadline", sent=False, late=True)
        self._round_trip_s = 0.0
        return self.round_trip(request.frame(), deadline, replies=2 if request.asking else 1)

    def validate(self, now: float) -> bool:
        """True if there is a connection that seems to be open. One that does not is closed. It is
        not checked if a call began on it in the last few milliseconds.
        """
        if self._transport is None:
            return False
        idle, self._last_used_at = now - self._last_used_at, now
        if self._generation != self.node.generation or (
            idle > _FRESH_S and self._transport.is_unusable()
        ):
            self.close()
            return False
        return True

    def round_trip(self, frame: bytes | None, deadline: float, replies: int = 1) -> RawReply:
        """Send `frame` over the open connection and return the last of its replies; without a
        frame, return the next reply to what was sent before.
        """
        transport = self._transport
        if transport is None:  # another thread has just closed the limiter
            return NoReply("the connection was closed", sent=frame is None)
        try:
            raw = (
                transport.round_trip(frame, deadline)
                if frame is not None
                else transport.receive(deadline)
            )
            if replies > 1 and type(raw) is not NoReply:
                raw = transport.receive(deadline)
        except BaseException as exc:
            # First, and without a call in which a signal handler could raise again: later calls
            # must not use this transport. See `_discard_transport`.
            self._transport_to_close, self._transport = transport, None
            self._close_in_background()
            failed = isinstance(exc, (OSError, hiredis.HiredisError))
            if not failed or is_interruption(exc):
                raise
            raw = NoReply(exc, sent=True, late=isinstance(exc, TimeoutError))
        if type(raw) is NoReply:
            self._discard_transport()
        return raw

    def pipeline(self, requests: Sequence[Request], deadline: float) -> list[RawReply]:
        """Send all requests in one write, and return the raw replies in order. From the first one
        on that did not come, there is a `NoReply` for each request.
        """
        if (
            not self.validate(self._clock.monotonic())
            and (no_reply := self._open(deadline)) is not None
        ):
            return [no_reply] * len(requests)
        frames = b"".join([request.frame() for request in requests])
        try:
            raws = [self.round_trip(frames, deadline)]
            while len(raws) < len(requests) and type(raws[-1]) is not NoReply:
                raws.append(self.round_trip(None, deadline))
        except BaseException:  # a signal handler may also raise between two replies
            self._discard_transport()
            raise
        return raws + [raws[-1]] * (len(requests) - len(raws))

    def close(self) -> None:
        """Close the connection; the next exchange opens another. The references are deleted last,
        so that a caller that was interrupted by a signal handler can close it again.
        """
        transport, opening = self._transport, self._opening
        self._close_in_background()
        if transport is not None:
            transport.close()
        if opening is not None:
            opening.abandon()
        if self._transport is transport:
            self._transport = None
        if self._opening is opening:
            self._opening = None

    def _discard_transport(self) -> None:
        """Close a transport that has failed, or in whose exchange a signal handler has raised
        (Celery's soft time limit): replies that are still to come must not be taken for those of
        other calls. Another thread closes it, because a signal handler may raise here again.
        """
        if self._transport is not None:
            self._transport_to_close, self._transport = self._transport, None
            self._close_in_background()

    def _close_in_background(self) -> None:
        if self._transport_to_close is not None:
            if not start_thread(self._transport_to_close.close):
                self._transport_to_close.close()
            self._transport_to_close = None

    def _open(self, deadline: float) -> NoReply | None:
        """Connect by `deadline`, including name look-up, TLS and AUTH: redis-py has a timeout for
        each step, and none for all of them. If that takes longer, it goes on for the next call;
        otherwise a link of many round trips could never be opened. Return why there is no
        connection, or None. Raises `ConfigurationError`.

        If it has failed since the call that began it, this call tries again: an outage of that time
        may be over.
        """
        node = self.node
        self._close_in_background()  # an interruption may have left it undone
        opening = self._opening
        if opening is not None and _may_try_again(opening, node):
            opening = self._opening = None
        if opening is None:
            if (why := node.unavailable_reason()) is not None:
                return NoReply(why, sent=False)
            opening = self._opening = BackgroundJob(
                partial(_connect, node, self._clock), _close_opened
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
            return NoReply(exc, sent=False)
        opened = opening.result
        opened.handshake.apply(node)
        try:
            transport = make_transport(opened.socket, self._clock)
        except (OSError, ValueError) as failure:  # another thread has just closed the limiter
            if is_interruption(failure):
                raise
            self._opening = None
            return NoReply(failure, sent=False)
        # In one step: a caller that is interrupted before it leaves the job to the next call.
        self._generation, self._round_trip_s, self._transport = (
            opened.generation,
            opened.handshake.round_trip_s,
            transport,
        )
        self._opening = None
        return None


class _Opened(NamedTuple):
    """A new connection."""

    socket: Any
    """See `detach_socket`."""
    opened_by: int
    """The process that has opened it. A child that is forked meanwhile has this object, too."""
    generation: int
    handshake: HandshakeResult


def _close_opened(opened: _Opened) -> None:
    close_detached(opened.socket, opened.opened_by)


def _may_try_again(opening: BackgroundJob[_Opened], node: Node) -> bool:
    """True if connecting has failed, and not because of a mistake, which callers have to know."""
    exc = opening.failure
    return exc is not None and configuration_failure(exc, node.name) is None


def _connect(node: Node, clock: Clock) -> _Opened:
    """Open a new connection to `node`."""
    generation = node.generation
    connection = node.new_connection()
    try:
        connection.connect()
        result = _run_handshake(connection, node, clock)
        return _Opened(detach_socket(connection), os.getpid(), generation, result)
    except BaseException as exc:  # whatever it is: nobody else could close this connection
        connection.disconnect()
        if isinstance(exc, Exception) and configuration_failure(exc, node.name) is None:
            node.on_connect_failed(exc, slow=isinstance(exc, (TimeoutError, RedisTimeoutError)))
        raise


def _run_handshake(connection: Any, node: Node, clock: Clock) -> HandshakeResult:
    steps = handshake(node, clock)
    try:
        words = next(steps)
        while True:
            words = steps.send(_ask(connection, words))
    except StopIteration as end:
        result: HandshakeResult = end.value
        return result


def _ask(connection: Any, words: tuple[str, ...]) -> RawReply:
    connection.send_command(*words, check_health=False)
    try:
        reply: RawReply = connection.read_response(disable_decoding=True)
    except ResponseError as exc:
        return exc
    return reply
