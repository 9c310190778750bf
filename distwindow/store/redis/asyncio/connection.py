"""One awaiting connection that carries many calls at once: made by redis-py, spoken over by us.

Once redis-py has connected (TLS, AUTH, Sentinel), the pipe takes the place of its stream protocol:
frames are written in one piece per turn of the loop, and replies go to their calls in order.
"""

from __future__ import annotations

import asyncio
import os
import socket
from collections import deque
from contextlib import suppress
from typing import Any, Protocol

import hiredis
from redis.exceptions import RedisError, ResponseError
from redis.exceptions import TimeoutError as RedisTimeoutError

from ....core.errors import ConfigurationError
from ..attempts import NoReply, Request
from ..handshake import check_version, configuration_failure, time_ms
from ..outcome import with_token
from ..topology import CallSettings, Node

_WRITE_BYTES = 64
"""Frames that are written at once: the server works on the first while we pack the next."""


_STEPS = 6
"""Round trips that connecting may take: TCP, TLS, AUTH, SELECT, names, our own questions."""


_TRANSPORT_METHODS = ("set_protocol", "write", "abort", "get_extra_info")
"""What is called of a transport here."""


class Caller(Protocol):
    """Who waits for a reply."""

    done: bool
    """It waits no longer."""

    @property
    def deadline(self) -> float:
        """Until when it waits, monotonic seconds."""
        ...

    def on_reply(self, answer: Any) -> None:
        """Takes the raw reply, an error reply, a `Lost`, or the `ConfigurationError` because
        of which there is no connection.
        """
        ...


class Owner(Protocol):
    """Whose pipe it is."""

    def on_connection_ended(self, connection: PipelinedConnection) -> None: ...


class _TransportTaken:
    """Left in redis-py's writer in place of the transport, which is ours now: a writer that is
    dropped, here or in a forked child, closes its transport.
    """

    @staticmethod
    def is_closing() -> bool:
        return True


def _takes_protocol(transport: Any) -> bool:
    """Can the transport's replies be sent to a protocol of ours? Asked of the object, because the
    transports of uvloop do not derive from `asyncio.Transport`.
    """
    return all(callable(getattr(transport, name, None)) for name in _TRANSPORT_METHODS)


class PipelinedConnection(asyncio.Protocol):
    """A connection to one node in one event loop. Once it ends it is done: others follow it."""

    def __init__(self, node: Node, terms: CallSettings, owner: Owner) -> None:
        self.node = node
        self._monotonic = terms.clock.monotonic
        self._round_trip_s = 0.0
        """Seconds of a round trip, as the last question of connecting took it."""
        self.generation = node.generation
        self._owner = owner
        self._reader = hiredis.Reader()
        self._parked: list[tuple[Request, Caller]] = []
        self._pending: deque[Caller | None] = deque()  # None: the reply of an ASKING
        self._frames: list[bytes] = []
        self._connection: Any = None
        self._transport: Any = None
        self._through_client: asyncio.Queue[tuple[bytes, Caller]] | None = None
        self._ended = False
        self._opening = asyncio.ensure_future(self._open(terms.timeout))

    @property
    def opening(self) -> bool:
        """Not connected yet, so nothing has been sent."""
        return self._transport is None and self._through_client is None

    @property
    def transport_open(self) -> bool:
        """Can frames be written to it?"""
        return self._transport is not None and not self._ended

    @property
    def standing(self) -> bool:
        """Is there a connection to the node as it is now, that frames can be written to?"""
        return self._transport is not None and self.generation == self.node.generation

    def send(self, request: Request, caller: Caller) -> None:
        """Have `send` written with the next `flush`, or as soon as the connection stands."""
        if self.opening:
            self._parked.append((request, caller))
        elif self._through_client is not None:
            self._through_client.put_nowait((request.frame(), caller))
        else:
            if request.asking:
                self._pending.append(None)
            self.send_frame(request.frame(), caller)

    def send_frame(self, frame: bytes, caller: Caller) -> None:
        """Have `frame` written with the next `flush`, on a standing connection."""
        self._pending.append(caller)
        self._frames.append(frame)
        if len(self._frames) >= _WRITE_BYTES:
            self.flush()

    def flush(self) -> None:
        """Write what has been put."""
        if self._frames:
            self._transport.write(b"".join(self._frames))
            self._frames.clear()

    def end(self, why: object) -> None:
        """Close, and tell every caller that is still waiting."""
        if self._ended:
            return
        self._ended = True
        self._owner.on_connection_ended(self)
        if self._opening is not asyncio.current_task():
            self._opening.cancel()
        if self._transport is not None:
            self._transport.abort()
        parked, self._parked = self._parked, []
        for _, caller in parked:
            caller.on_reply(
                why if isinstance(why, ConfigurationError) else NoReply(why, sent=False)
            )
        while self._through_client is not None and not self._through_client.empty():
            self._through_client.get_nowait()[1].on_reply(NoReply(why, sent=False))
        while self._pending:
            waiting = self._pending.popleft()
            if waiting is not None:
                waiting.on_reply(NoReply(why, sent=True))

    def data_received(self, data: bytes) -> None:
        reader, pending = self._reader, self._pending
        reader.feed(data)
        raw = None
        try:
            while (reply := reader.gets()) is not False:
                raw = reply
                if not pending:
                    self.end("the server sent a reply that nobody asked for")
                    return
                caller = pending.popleft()
                if caller is not None:
                    caller.on_reply(raw)
        except hiredis.HiredisError as exc:
            self.end(exc)
        if type(raw) is list and len(raw) == 3:  # the usual replies; once for all of them
            self.node.clock.learn(raw[2])

    def abandon(self) -> None:
        """Hang up although the loop was closed without us, so that nothing of it can be called.

        asyncio leaves the socket open when a loop is closed. uvloop has closed it by then, and its
        socket object refuses `shutdown`.
        """
        if self._transport is not None:
            with suppress(Exception):
                self._transport.get_extra_info("socket").shutdown(socket.SHUT_RDWR)

    def leave_to_parent(self) -> None:
        """In a forked child: let go of the connection, so that nothing done here reaches it.

        The child has the parent's selector, and whoever destroys a transport takes its descriptor
        out of that selector: libuv does so without being asked. Once the descriptor names another
        file here, the parent's entry stays.
        """
        transport, self._transport = self._transport, None
        if transport is None or transport.is_closing():
            return
        with suppress(Exception):  # it has no socket any more
            descriptor = transport.get_extra_info("socket").fileno()
            null = os.open(os.devnull, os.O_RDWR)
            os.dup2(null, descriptor, inheritable=False)
            os.close(null)

    def connection_lost(self, exc: Exception | None) -> None:
        self.end(exc or "the server closed the connection")

    async def _open(self, timeout: float) -> None:
        node = self.node
        if (why := node.unavailable_reason()) is not None:
            self.end(why)
            return
        try:
            # Each step has its timeout, and callers give up on their own; but a link of many round
            # trips could never be opened if all steps together had to be done in one.
            now_ms = await asyncio.wait_for(self._connect(), _STEPS * timeout)
        except asyncio.CancelledError:
            self._drop()
            # `asyncio.run` cancels every task when the main one has ended. The next call has to
            # make another connection: the counts that are flushed at the end of the loop need it.
            # Callers that wait for this one end by their deadlines; to have them retry now would
            # start new tasks in a loop whose tasks are being ended.
            if not self._ended:
                self._ended = True
                self._owner.on_connection_ended(self)
            raise
        except asyncio.TimeoutError:
            node.on_connect_failed("connecting takes longer than the timeout", slow=True)
            # redis-py would have come to the next sentinel, had it not been stopped here.
            node.ask_next_sentinel()
            self.end("connecting takes longer than the timeout")
            return
        except Exception as exc:
            error = configuration_failure(exc, node.name)
            if error is None:
                node.on_connect_failed(exc, slow=isinstance(exc, (TimeoutError, RedisTimeoutError)))
            self.end(error or exc)
            return
        if self._ended:  # just now, and a cancellation that comes with the result is swallowed
            self._drop()
            return
        node.on_connected()
        if now_ms is not None:
            node.clock.learn(now_ms)
        writer: Any = getattr(self._connection, "_writer", None)
        transport: Any = getattr(writer, "transport", None)
        if _takes_protocol(transport):
            transport.set_protocol(self)
            self._transport = transport
            writer._transport = _TransportTaken
            self._connection._reader = self._connection._writer = None
        else:
            self._through_client = asyncio.Queue()
        parked, self._parked = self._parked, []
        for request, caller in parked:
            # One that is done was told already that nothing went out; one that cannot be answered
            # in time any more will be: better than an unknown outcome, and a connection lost to it.
            if not caller.done and caller.deadline - self._monotonic() > self._round_trip_s:
                self.send(request, caller)
            else:
                caller.on_reply(NoReply("deadline", sent=False, late=True))
        self.flush()
        if self._through_client is not None:
            try:
                await self._serve_plainly(self._through_client)
            finally:  # cancelled by the end of the loop: without a reader no call may be queued
                self.end("the task that reads the replies has ended")

    def _drop(self) -> None:
        """Close a connection that nobody will use."""
        writer = getattr(self._connection, "_writer", None)
        if writer is not None:
            writer.close()

    async def _connect(self) -> int | None:
        connection = self._connection = self.node.new_connection()
        try:
            await connection.connect()
            if not self.node.checked:
                with suppress(ResponseError):  # INFO may be forbidden; nothing else needs it
                    check_version(await self._request("INFO", "server"), self.node.name)
                self.node.checked = True
            began = self._monotonic()
            now_ms = time_ms(await self._request("TIME")) if self.node.clock.used else None
            self._round_trip_s = self._monotonic() - began
            return now_ms
        except BaseException:  # a cancellation too: nobody else knows of this connection
            with suppress(Exception):
                await connection.disconnect(nowait=True)
            raise

    async def _request(self, *words: str) -> Any:
        await self._connection.send_command(*words, check_health=False)
        return await self._connection.read_response(disable_decoding=True)

    async def _serve_plainly(self, queue: asyncio.Queue[tuple[bytes, Caller]]) -> None:
        """One call after the other through redis-py, for connections without a transport."""
        while True:
            frame, caller = await queue.get()
            raw: Any
            try:
                await self._connection.send_packed_command([frame], check_health=False)
                raw = await self._connection.read_response(disable_decoding=True)
            except ResponseError as exc:
                raw = with_token(exc)
            except (RedisError, OSError) as exc:
                raw = NoReply(exc, sent=True)
            except asyncio.CancelledError as exc:
                caller.on_reply(NoReply(exc, sent=True))
                raise
            caller.on_reply(raw)
