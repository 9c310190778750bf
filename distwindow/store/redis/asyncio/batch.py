"""Calls of one tick of the event loop: equal ones are sent as one script call."""

from __future__ import annotations

import asyncio
import copy
from collections.abc import Callable, Generator
from typing import Any, Protocol

from ....protocol.commands import Acquire
from ....protocol.frames import Command
from ....protocol.replies import PAST_DEADLINE
from ..attempts import RawReply, Request
from ..call_share import CallShare, decision_of_share, decisions_of_reply, short_reply
from ..outcome import is_unknown
from .connection import PipelinedConnection


class ReplyHandler(Protocol):
    """Handles every reply to a batch but the short one."""

    def on_reply(self, batch: Batch, raw: RawReply) -> None: ...

    def count_unknown(self, calls: int) -> None:
        """Count calls of which nobody will know whether they were charged."""
        ...


class LoopTick:
    """The batches that are sent in one tick of the loop, and have one deadline."""

    __slots__ = ("batches", "deadline", "handler", "shared")

    def __init__(self, handler: ReplyHandler, deadline: float) -> None:
        self.handler = handler
        self.deadline = deadline
        self.batches: list[Batch] = []
        self.shared: dict[Acquire, Batch] = {}
        """The batches that further calls of equal commands join."""

    def is_answered(self) -> bool:
        """True if no call waits for a reply."""
        return self.batches[-1].done and all([batch.done for batch in self.batches])

    def clear(self) -> None:
        """Drop the batches."""
        self.batches.clear()
        self.shared.clear()


class Batch:
    """A command and the futures of its callers, which get a decision, or the plain reply."""

    __slots__ = (
        "command",
        "connection",
        "done",
        "execution",
        "futures",
        "guard",
        "on_late_reply",
        "request",
        "tick",
        "wants_decision",
    )  # fmt: skip

    def __init__(
        self,
        tick: LoopTick,
        command: Command[Any],
        wants_decision: bool,
        on_late_reply: Callable[[Any], object] | None = None,
    ) -> None:
        self.tick = tick
        self.command = command
        self.wants_decision = wants_decision
        """True for an `Acquire` whose callers get decisions. Other batches have one caller."""
        self.futures: list[asyncio.Future[Any]] = []
        self.guard: bytes | None = None
        """The guard of a frame that was sent without an execution."""
        self.execution: Generator[Request, RawReply, Any] | None = None
        """`execute_once`, from the first reply on that is not the short one."""
        self.connection: PipelinedConnection | None = None
        self.request: Request | None = None
        """The last request of the execution."""
        self.on_late_reply = on_late_reply
        """Called with a reply that comes after the caller was cancelled or has timed out."""
        self.done = False

    @property
    def deadline(self) -> float:
        return self.tick.deadline

    def drop_cancelled(self) -> bool:
        """Remove the callers that were cancelled before anything was sent; True if any is left."""
        futures = self.futures
        if len(futures) > 1 or futures[0].done():
            self.futures = futures = [future for future in futures if not future.done()]
        return bool(futures)

    def combined(self) -> Command[Any]:
        """The one command that stands for all callers."""
        command = self.command
        return command.combined(len(self.futures)) if isinstance(command, Acquire) else command

    def on_reply(self, raw: RawReply) -> None:
        """Take a raw reply. The short one is distributed here, the handler takes all others."""
        if self.done:
            self._pass_late_reply(raw)
            return
        reply = short_reply(raw, self.guard)
        if reply is None:
            self.tick.handler.on_reply(self, raw)
            return
        futures = self.futures
        if len(futures) == 1 and not futures[0].done():  # most keys are called once in a tick
            self.done = True
            futures[0].set_result(decision_of_share(self.command, reply))
        else:
            self._distribute(reply)

    def resolve(self, reply: Any) -> None:
        """Give the callers what the execution has returned."""
        if self.wants_decision:
            self._distribute(reply)
            return
        self.done = True
        (future,) = self.futures
        if not future.done():
            future.set_result(reply)
        else:
            self.tick.handler.count_unknown(1)
            if self.on_late_reply is not None:
                self.on_late_reply(reply)

    def _distribute(self, reply: CallShare) -> None:
        """Give each caller its decision."""
        self.done = True
        futures = self.futures
        decisions = decisions_of_reply(self.command, reply, len(futures))
        for future, decision in zip(futures, decisions, strict=True):
            self._set_result(future, decision)

    def _set_result(self, future: asyncio.Future[Any], result: Any) -> None:
        if not future.done():
            future.set_result(result)
        else:
            self.tick.handler.count_unknown(1)

    def _pass_late_reply(self, raw: RawReply) -> None:
        """Pass on a reply after the caller's call has ended with an unknown outcome."""
        request = self.request
        if (
            self.on_late_reply is not None
            and request is not None
            and type(raw) is list
            and len(raw) >= 3
            and raw[0] == request.guard
            and raw[1] != PAST_DEADLINE
        ):
            self.on_late_reply(self.command.reply(raw))

    def fail(self, exc: Exception) -> None:
        """End the call with an exception; each caller gets a copy of it."""
        self.done = True
        if is_unknown(exc):
            self.tick.handler.count_unknown(len(self.futures))
        for future in self.futures:
            if not future.done():
                future.set_exception(copy.copy(exc))


PING = b"*1\r\n$4\r\nPING\r\n"


class Ping:
    """The caller of a PING, whose reply comes after those to all that was sent before."""

    deadline = float("inf")

    def __init__(self, answered: asyncio.Future[None]) -> None:
        self.answered = answered
        self.done = False

    def on_reply(self, raw: RawReply) -> None:
        """Take the reply, or that there will be none."""
        self.done = True
        if not self.answered.done():
            self.answered.set_result(None)
