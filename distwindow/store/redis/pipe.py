"""One awaiting connection that carries many calls at once: made by redis-py, spoken over by us.

Once redis-py has connected (TLS, AUTH, Sentinel), the pipe takes the place of its stream protocol:
frames are written in one piece per turn of the loop, and replies go to their calls in order.
"""

from __future__ import annotations

import asyncio
import socket
from collections import deque
from contextlib import suppress
from typing import Any, Protocol

import hiredis
from redis.exceptions import RedisError, ResponseError
from redis.exceptions import TimeoutError as RedisTimeoutError

from ...core.errors import ConfigurationError
from .call import Lost, Send
from .handshake import check_version, misconfigured, time_ms
from .outcome import with_token
from .place import Node, Terms

_PIECE = 64
"""Frames that are written at once: the server works on the first while we pack the next."""


_STEPS = 6
"""Round trips that connecting may take: TCP, TLS, AUTH, SELECT, names, our own questions."""


class Caller(Protocol):
    """Who waits for a reply."""

    done: bool
    """It waits no longer."""

    @property
    def deadline(self) -> float:
        """Until when it waits, monotonic seconds."""
        ...

    def heard(self, answer: Any) -> None:
        """Takes the raw reply, an error reply, a `Lost`, or the `ConfigurationError` because
        of which there is no connection.
        """
        ...


class Owner(Protocol):
    """Whose pipe it is."""

    def ended(self, pipe: Pipe) -> None: ...


class _Taken:
    """Left in redis-py's writer in place of the transport, which is ours now: a writer that is
    dropped, here or in a forked child, closes its transport.
    """

    @staticmethod
    def is_closing() -> bool:
        return True


class Pipe(asyncio.Protocol):
    """A connection to one node in one event loop. Once it ends it is done: others follow it."""

    def __init__(self, node: Node, terms: Terms, owner: Owner) -> None:
        self.node = node
        self._monotonic = terms.clock.monotonic
        self._trip = 0.0
        """Seconds of a round trip, as the last question of connecting took it."""
        self.generation = node.generation
        self._owner = owner
        self._reader = hiredis.Reader()
        self._parked: list[tuple[Send, Caller]] = []
        self._pending: deque[Caller | None] = deque()  # None: the reply of an ASKING
        self._frames: list[bytes] = []
        self._connection: Any = None
        self._transport: Any = None
        self._plain: asyncio.Queue[tuple[bytes, Caller]] | None = None
        self._ended = False
        self._opening = asyncio.ensure_future(self._open(terms.timeout))

    @property
    def opening(self) -> bool:
        """Not connected yet, so nothing has been sent."""
        return self._transport is None and self._plain is None

    @property
    def transport_open(self) -> bool:
        """Can frames be written to it?"""
        return self._transport is not None and not self._ended

    @property
    def standing(self) -> bool:
        """Is there a connection to the node as it is now, that frames can be written to?"""
        return self._transport is not None and self.generation == self.node.generation

    def put(self, send: Send, caller: Caller) -> None:
        """Have `send` written with the next `flush`, or as soon as the connection stands."""
        if self.opening:
            self._parked.append((send, caller))
        elif self._plain is not None:
            self._plain.put_nowait((send.frame(), caller))
        else:
            if send.asking:
                self._pending.append(None)
            self.put_frame(send.frame(), caller)

    def put_frame(self, frame: bytes, caller: Caller) -> None:
        """Have `frame` written with the next `flush`, on a standing connection."""
        self._pending.append(caller)
        self._frames.append(frame)
        if len(self._frames) >= _PIECE:
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
        self._owner.ended(self)
        if self._opening is not asyncio.current_task():
            self._opening.cancel()
        if self._transport is not None:
            self._transport.abort()
        parked, self._parked = self._parked, []
        for _, caller in parked:
            caller.heard(why if isinstance(why, ConfigurationError) else Lost(why, sent=False))
        while self._pending:
            waiting = self._pending.popleft()
            if waiting is not None:
                waiting.heard(Lost(why, sent=True))

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
                    caller.heard(raw)
        except hiredis.HiredisError as exc:
            self.end(exc)
        if type(raw) is list and len(raw) == 3:  # the usual replies; once for all of them
            self.node.clock.learn(raw[2])

    def abandon(self) -> None:
        """Hang up although the loop was closed without us, so that nothing of it can be called."""
        if self._transport is not None:
            with suppress(Exception):
                self._transport.get_extra_info("socket").shutdown(socket.SHUT_RDWR)

    def connection_lost(self, exc: Exception | None) -> None:
        self.end(exc or "the server closed the connection")

    async def _open(self, timeout: float) -> None:
        node = self.node
        if (why := node.down()) is not None:
            self.end(why)
            return
        try:
            # Each step has its timeout, and callers give up on their own; but a link of many round
            # trips could never be opened if all steps together had to be done in one.
            now_ms = await asyncio.wait_for(self._connect(), _STEPS * timeout)
        except asyncio.CancelledError:
            self._drop()
            raise
        except asyncio.TimeoutError:
            node.failed("connecting takes longer than the timeout", slow=True)
            # redis-py would have come to the next sentinel, had it not been stopped here.
            node.ask_another()
            self.end("connecting takes longer than the timeout")
            return
        except Exception as exc:
            error = misconfigured(exc, node.name)
            if error is None:
                node.failed(exc, slow=isinstance(exc, (TimeoutError, RedisTimeoutError)))
            self.end(error or exc)
            return
        if self._ended:  # just now, and a cancellation that comes with the result is swallowed
            self._drop()
            return
        node.reached()
        if now_ms is not None:
            node.clock.learn(now_ms)
        writer: Any = getattr(self._connection, "_writer", None)
        transport = getattr(writer, "transport", None)
        if isinstance(transport, asyncio.Transport):
            transport.set_protocol(self)
            self._transport = transport
            writer._transport = _Taken
            self._connection._reader = self._connection._writer = None
        else:
            self._plain = asyncio.Queue()
        parked, self._parked = self._parked, []
        for send, caller in parked:
            # One that is done was told already that nothing went out; one that cannot be answered
            # in time any more will be: better than an unknown outcome, and a connection lost to it.
            if not caller.done and caller.deadline - self._monotonic() > self._trip:
                self.put(send, caller)
            else:
                caller.heard(Lost("deadline", sent=False, late=True))
        self.flush()
        if self._plain is not None:
            await self._serve_plainly(self._plain)

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
                    check_version(await self._ask("INFO", "server"), self.node.name)
                self.node.checked = True
            began = self._monotonic()
            now_ms = time_ms(await self._ask("TIME")) if self.node.clock.used else None
            self._trip = self._monotonic() - began
            return now_ms
        except BaseException:  # a cancellation too: nobody else knows of this connection
            with suppress(Exception):
                await connection.disconnect(nowait=True)
            raise

    async def _ask(self, *words: str) -> Any:
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
                raw = Lost(exc, sent=True)
            caller.heard(raw)
