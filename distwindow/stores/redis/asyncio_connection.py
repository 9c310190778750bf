"""One asyncio connection for many calls at once. redis-py opens it (TLS, AUTH, Sentinel), and then
`PipelinedConnection` takes the place of redis-py's stream protocol.

The frames of one tick of the loop are written in one piece, or a few where they are many, and
replies go to their callers in the order of the requests. A test plays every row of this table:

    | state   | event                       | next state | what happens                           |
    |---------|-----------------------------|------------|----------------------------------------|
    | opening | a request is sent           | opening    | it waits until the connection is open  |
    | opening | connected                   | open       | waiting requests are written           |
    | opening | connected too late          | open       | callers get NoReply, not sent          |
    | opening | connecting fails            | ended      | callers get NoReply, not sent          |
    | opening | a configuration error       | ended      | callers get the error                  |
    | opening | the loop cancels its tasks  | ended      | callers end by their own deadlines     |
    | open    | a request is sent           | open       | its caller is pending                  |
    | open    | a reply                     | open       | the first pending caller gets it       |
    | open    | a reply without a request   | ended      | later replies cannot be matched        |
    | open    | the connection is lost      | ended      | pending callers get NoReply, sent      |

A caller that has timed out or was cancelled stays pending: its reply still comes, and must not go
to the next caller. Connections without a transport (fakeredis) have the state `through client` in
place of `open`: one call after the other goes through redis-py's methods.
"""

from __future__ import annotations

import asyncio
import os
import socket
import ssl
from collections import deque
from collections.abc import Callable, Coroutine, Sequence
from contextlib import suppress
from typing import Any, Protocol, TypeVar

import hiredis
from redis.asyncio.connection import SSLConnection
from redis.exceptions import RedisError, ResponseError
from redis.exceptions import TimeoutError as RedisTimeoutError

from ...errors import ConfigurationError
from ...ring.replies import PAST_DEADLINE
from ...support.fork import FORK_WAIT
from ...support.locks import start_thread
from .handshake import (
    HandshakeResult,
    address_of,
    configuration_failure,
    handshake,
    may_be_wrong_server,
    mistake_of,
    was_reset,
)
from .outcome import NoReply, RawReply, Request, restore_code
from .topology import CallSettings, Node
from .urls import hide_secrets
from .wrong_server import (
    Endpoint,
    WrongServerCheck,
    check_seconds,
    endpoints_of,
    wait_seconds,
)

T = TypeVar("T")


async def result_within(coroutine: Coroutine[Any, Any, T], seconds: float) -> T:
    """Return the result of `coroutine`, or cancel it and raise `asyncio.TimeoutError`.

    If this is cancelled, it ends at once. `asyncio.wait_for` would wait for `coroutine`, and
    redis-py may drop a cancellation and go on.
    """
    task = asyncio.ensure_future(coroutine)
    task.add_done_callback(retrieve_exception)
    try:
        await asyncio.wait([task], timeout=seconds)
        if not task.done():
            raise asyncio.TimeoutError
        return task.result()
    finally:
        task.cancel()


def retrieve_exception(task: asyncio.Future[Any]) -> None:
    """Mark the exception of `task` as retrieved: asyncio logs an error for one that is not."""
    if not task.cancelled():
        task.exception()


async def find_wrong_server(
    check: WrongServerCheck, endpoints: Sequence[Endpoint] | None, timeout: float
) -> ConfigurationError | None:
    """Do as `check.find`, or `check.again` without endpoints, in a thread."""
    loop = asyncio.get_running_loop()
    found: asyncio.Future[ConfigurationError | None] = loop.create_future()

    def end(error: ConfigurationError | None) -> None:
        if not found.done():  # it is, if who waits was cancelled
            found.set_result(error)

    def run() -> None:
        error = None
        try:
            error = check.again(timeout) if endpoints is None else check.find(endpoints, timeout)
        finally:
            with suppress(RuntimeError):  # the loop was closed meanwhile
                loop.call_soon_threadsafe(end, error)

    return await found if start_thread(run) else None


async def connect_or_explain(
    connect: Callable[[], Coroutine[Any, Any, T]],
    check: WrongServerCheck,
    endpoints: Callable[[], Sequence[Endpoint]],
    timeout: float,
    *,
    beside: bool,
) -> T:
    """Return the result of `connect`. Raises `ConfigurationError` at once where another server was
    found to answer, and still does; with `beside`, where one is found while `connect` takes long.
    """
    if check.has_found and (error := await find_wrong_server(check, None, timeout)):
        raise error
    connecting = asyncio.ensure_future(connect())
    connecting.add_done_callback(retrieve_exception)
    tasks: list[asyncio.Future[Any]] = [connecting]
    try:
        if beside and check.is_due:
            await asyncio.wait(tasks, timeout=wait_seconds(timeout))
            if not connecting.done():
                checking = asyncio.ensure_future(find_wrong_server(check, endpoints(), timeout))
                tasks.append(checking)
                await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
                if not connecting.done() and (error := checking.result()):
                    raise error
        return await connecting
    finally:
        for task in tasks:
            task.cancel()


_MAX_WRITE_FRAMES = 64
"""Frames that are written at once: the server executes them while the next ones are packed."""
_CONNECT_TIMEOUTS = 6
"""Timeouts that connecting may take in all: for TCP, TLS, AUTH, SELECT, names and the handshake."""


class ReplyReceiver(Protocol):
    """Waits for one reply on a connection."""

    done: bool
    """True once its call has ended: it was cancelled, or has timed out."""

    @property
    def deadline(self) -> float:
        """When it times out, monotonic seconds."""

    def on_reply(self, raw: RawReply) -> None:
        """Take the raw reply, or the `ConfigurationError` that connecting has failed with."""


class _TransportTaken:
    """Stands for the transport in redis-py's writer, which would close it when it is destroyed."""

    @staticmethod
    def is_closing() -> bool:
        return True


class PipelinedConnection(asyncio.Protocol):
    """A connection to one node in one event loop. It is opened once, never again after its end."""

    def __init__(
        self,
        node: Node,
        settings: CallSettings,
        on_ended: Callable[[PipelinedConnection], object],
        connect_timeout: float | None = None,
    ) -> None:
        """`on_ended`: told when it takes no more calls. `connect_timeout`: seconds for each step of
        connecting; None: as for calls.
        """
        self.node = node
        self._timeout = settings.timeout
        self._clock = settings.clock
        self.generation = node.generation
        self._on_ended = on_ended
        self._reader = hiredis.Reader()
        self._unsent: list[tuple[Request, ReplyReceiver]] = []
        """Requests that wait until the connection is open."""
        self._awaiting_reply: deque[ReplyReceiver | None] = deque()
        """The callers that wait, by order of request; None: for the reply to an ASKING."""
        self._frames: list[bytes] = []
        """Frames for the next `flush`."""
        self._connection: Any = None
        self._transport: Any = None
        self._through_client: asyncio.Queue[tuple[bytes, ReplyReceiver]] | None = None
        self._ended = False
        self.opened = asyncio.Event()
        """Set when it is open, or has ended."""
        self._opening = asyncio.ensure_future(self._open(connect_timeout or settings.timeout))
        self._opening.add_done_callback(self._on_opened)

    @property
    def opening(self) -> bool:
        """True until it is connected: nothing has been sent."""
        return self._transport is None and self._through_client is None

    @property
    def transport_open(self) -> bool:
        """True if frames can be written to it."""
        return self._transport is not None and not self._ended

    @property
    def is_usable(self) -> bool:
        """True if it was opened, and not to an earlier generation of the node."""
        return self._transport is not None and self.generation == self.node.generation

    def send(self, request: Request, caller: ReplyReceiver) -> None:
        """Write `request` with the next `flush`, or as soon as the connection is open."""
        if self.opening:
            self._unsent.append((request, caller))
        elif self._through_client is not None:
            self._through_client.put_nowait((request.frame(), caller))
        else:
            if request.asking:
                self._awaiting_reply.append(None)
            self.send_frame(request.frame(), caller)

    def send_frame(self, frame: bytes, caller: ReplyReceiver) -> None:
        """Write `frame` with the next `flush`, over an open connection."""
        self._awaiting_reply.append(caller)
        self._frames.append(frame)
        if len(self._frames) >= _MAX_WRITE_FRAMES:
            self.flush()

    def flush(self) -> None:
        """Write the frames that have gathered."""
        if self._frames:
            self._transport.write(b"".join(self._frames))
            self._frames.clear()

    def end(self, why: object) -> None:
        """Close the connection, and end the calls of all callers that wait for a reply."""
        if self._ended:
            return
        self._ended = True
        self.opened.set()
        self._on_ended(self)
        if self._opening is not asyncio.current_task():
            self._opening.cancel()
        if self._transport is not None:
            self._transport.abort()
        unsent, self._unsent = self._unsent, []
        for _, caller in unsent:
            caller.on_reply(
                why if isinstance(why, ConfigurationError) else NoReply(why, sent=False)
            )
        while self._through_client is not None and not self._through_client.empty():
            self._through_client.get_nowait()[1].on_reply(NoReply(why, sent=False))
        while self._awaiting_reply:
            pending = self._awaiting_reply.popleft()
            if pending is not None:
                pending.on_reply(NoReply(why, sent=True))

    def data_received(self, data: bytes) -> None:
        reader, pending = self._reader, self._awaiting_reply
        reader.feed(data)
        raw = caller = None
        try:
            while (reply := reader.gets()) is not False:
                raw = reply
                if not pending:
                    self.end("the server sent a reply without a request")
                    return
                caller = pending.popleft()
                if caller is not None:
                    caller.on_reply(raw)
        except hiredis.HiredisError as exc:
            self.end(exc)
        # `execute_once` learns the time from all other replies. This one is read once for all
        # callers, because looking at our clock for each would cost more.
        if type(raw) is list and len(raw) == 3:  # a short reply
            command = None if raw[1] == PAST_DEADLINE else getattr(caller, "command", None)
            self.node.clock.on_reply(command, raw[2], self._clock.monotonic())

    def close_socket(self) -> None:
        """Close the socket, which asyncio leaves open when its loop is closed, and would warn of.
        uvloop has closed it by then, and its socket object raises in `shutdown`.
        """
        transport: Any = self._transport
        if transport is not None:
            with suppress(Exception):
                transport.get_extra_info("socket").shutdown(socket.SHUT_RDWR)
            with suppress(Exception):  # TLS is a transport above that of the socket
                transport._closed, transport = True, transport._ssl_protocol._transport
            with suppress(Exception):  # what the loop would have called
                transport._call_connection_lost(None)

    def leave_to_parent(self) -> None:
        """In a forked child: detach the connection, so that nothing done here affects it.

        The child shares the parent's selector, and destroying a transport removes its descriptor
        from that selector; libuv does so by itself. If the descriptor refers to another file in the
        child, the parent's entry stays.
        """
        transport, self._transport = self._transport, None
        if transport is None or transport.is_closing():
            return
        with suppress(Exception):  # the transport may have no socket any more
            descriptor = transport.get_extra_info("socket").fileno()
            null = os.open(os.devnull, os.O_RDWR)
            os.dup2(null, descriptor, inheritable=False)
            os.close(null)

    def connection_lost(self, exc: Exception | None) -> None:
        self.end(exc or "the server closed the connection")

    async def _open(self, timeout: float) -> None:
        node, began_at = self.node, self._clock.monotonic()
        try:
            # Each step has a timeout, and callers have their deadlines. If all steps together had
            # to be done within one timeout, a link of many round trips could never be opened.
            connecting = connect_or_explain(
                lambda: self._connect(timeout),
                node.wrong_server,
                lambda: endpoints_of(self._connection),
                timeout,
                beside=not node.has_connected,
            )
            result = await result_within(connecting, _CONNECT_TIMEOUTS * timeout)
        except asyncio.CancelledError:
            self._close_writer()
            # `asyncio.run` cancels every task when the main one has ended. The next call has to
            # open another connection: the flush at the end of the loop needs it. Callers that wait
            # for this one end by their deadlines, because their retries would start new tasks in a
            # loop whose tasks are being ended.
            self._on_cancelled()
            raise
        except asyncio.TimeoutError:
            node.on_connect_failed("connecting takes longer than the timeout", began_at, slow=True)
            # redis-py would have asked the next sentinel, if it had not been stopped here.
            node.rotate_sentinels()
            self.end("connecting takes longer than the timeout")
            return
        except Exception as failure:
            exc = await tls_alert(self._connection, failure, self._timeout) or failure
            hide_secrets(exc, node.secrets)
            error = configuration_failure(exc, node.name)
            if node.wrong_server.is_due and may_be_wrong_server(exc, error):
                endpoints = endpoints_of(self._connection)
                error = await find_wrong_server(node.wrong_server, endpoints, timeout) or error
            if error is None:
                slow = isinstance(exc, (TimeoutError, RedisTimeoutError))
                node.on_connect_failed(exc, began_at, slow=slow)
            else:
                node.on_refused_client(error)  # the next call raises it
            self.end(error or exc)
            return
        if self._ended:
            self._close_writer()
            return
        result.apply(node)
        writer: Any = getattr(self._connection, "_writer", None)
        transport: Any = getattr(writer, "transport", None)
        # By this method, because the transports of uvloop do not derive from `asyncio.Transport`.
        if callable(getattr(transport, "set_protocol", None)):
            transport.set_protocol(self)
            self._transport = transport
            writer._transport = _TransportTaken
            self._connection._reader = self._connection._writer = None
        else:
            self._through_client = asyncio.Queue()
        self.opened.set()
        unsent, self._unsent = self._unsent, []
        for request, caller in unsent:
            # A call that has ended is not sent. Neither is one that cannot be answered in time any
            # more: its outcome would be unknown, and the connection would be retired for it.
            left_s = caller.deadline - self._clock.monotonic()
            if not caller.done and left_s > result.round_trip_s:
                self.send(request, caller)
            else:
                caller.on_reply(NoReply("deadline", sent=False, late=True))
        self.flush()
        if self._through_client is not None:
            try:
                await self._serve_through_client(self._through_client)
            finally:  # cancelled at the end of the loop: nobody would read the replies
                self.end("the task that reads the replies has ended")

    def _on_opened(self, opening: asyncio.Task[None]) -> None:
        """Note the end of `_open`: a task that is cancelled before its first step never runs."""
        if opening.cancelled():
            self._on_cancelled()

    def _on_cancelled(self) -> None:
        """Forget the connection: the next call opens another."""
        if not self._ended:
            self._ended = True
            self.opened.set()
            self._on_ended(self)

    def _close_writer(self) -> None:
        """Close a connection that nobody will use."""
        writer = getattr(self._connection, "_writer", None)
        if writer is not None:
            writer.close()

    async def _connect(self, timeout: float) -> HandshakeResult:
        connection = self._connection = self.node.new_connection()
        connection.socket_timeout = connection.socket_connect_timeout = timeout
        try:
            with FORK_WAIT.connecting():
                await connection.connect()
            self.node.connected_to = address_of(connection)
            steps = handshake(self.node, self._clock)
            try:
                words = next(steps)
                while True:
                    words = steps.send(await _ask(connection, words))
            except StopIteration as end:
                result: HandshakeResult = end.value
                connection.socket_timeout = self._timeout
                return result
        except BaseException:  # a cancellation too: nobody else could close this connection
            with suppress(Exception):
                await connection.disconnect(nowait=True)
            raise

    async def _serve_through_client(
        self, queue: asyncio.Queue[tuple[bytes, ReplyReceiver]]
    ) -> None:
        """Send one frame after the other through redis-py, on a connection without a transport."""
        while True:
            frame, caller = await queue.get()
            raw: RawReply
            try:
                await self._connection.send_packed_command([frame], check_health=False)
                raw = await self._connection.read_response(disable_decoding=True)
            except ResponseError as exc:
                raw = restore_code(exc)
            except (RedisError, OSError) as exc:
                raw = NoReply(exc, sent=True)
            except asyncio.CancelledError as exc:
                caller.on_reply(NoReply(exc, sent=True))
                raise
            caller.on_reply(raw)


async def ask_once(connection: Any, words: tuple[str, ...], timeout: float) -> RawReply:
    """See `connections.ask_once`."""
    reply: RawReply
    try:
        await connection.connect()
        reply = await _ask(connection, words)
    except Exception as failure:  # whatever redis-py raises
        reply = await tls_alert(connection, failure, timeout) or failure
    finally:
        with suppress(Exception):
            await connection.disconnect(nowait=True)
    return mistake_of(connection, reply)


async def _ask(connection: Any, words: tuple[str, ...]) -> RawReply:
    await connection.send_command(*words, check_health=False)
    try:
        reply: RawReply = await connection.read_response(disable_decoding=True)
    except ResponseError as exc:
        return exc
    return reply


async def tls_alert(connection: Any, failure: Exception, timeout: float) -> Exception | None:
    """Return why a TLS server has ended the new connection: see `connections.tls_alert`."""
    if not was_reset(failure) or not isinstance(connection, SSLConnection):
        return None
    internals: Any = connection
    with suppress(OSError, asyncio.TimeoutError):
        try:
            await internals._connect()
            await result_within(internals._reader.read(1), check_seconds(timeout))
        except ssl.SSLError as alert:
            return alert
        finally:
            await connection.disconnect(nowait=True)
    return None
