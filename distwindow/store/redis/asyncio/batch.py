"""Equal calls of one turn of the event loop, that go as one."""

from __future__ import annotations

import asyncio
import copy
from collections.abc import Callable, Generator
from typing import Any, Protocol

from ....protocol.commands import Acquire, Command
from ....protocol.decisions import admitted_decision, decision_of
from ....protocol.replies import EXPIRED, split_reply
from ..attempts import Request
from ..outcome import is_unknown
from .connection import PipelinedConnection


class ReplyHandler(Protocol):
    """Who takes a batch on when its reply is not the usual one."""

    def on_reply(self, batch: Batch, answer: Any) -> None: ...

    def unknown(self, calls: int) -> None:
        """So many callers will never know whether they were charged."""
        ...


class LoopTick:
    """The batches that were sent in one turn of the loop, which have one deadline."""

    __slots__ = ("batches", "deadline", "dispatcher", "shared")

    def __init__(self, dispatcher: ReplyHandler, deadline: float) -> None:
        self.dispatcher = dispatcher
        self.deadline = deadline
        self.batches: list[Batch] = []
        self.shared: dict[Acquire, Batch] = {}
        """The batches that equal commands join."""


class Batch:
    """A command and who waits for it: for decisions (`attempt`), or for the plain reply."""

    __slots__ = (
        "command",
        "connection",
        "dialogue",
        "done",
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
        *,
        decides: bool,
        on_late_reply: Callable[[Any], object] | None = None,
    ) -> None:
        self.tick = tick
        self.command = command
        self.wants_decision = decides
        self.futures: list[asyncio.Future[Any]] = []
        self.guard: bytes | None = None
        """Of a frame that was sent without a dialogue."""
        self.dialogue: Generator[Request, Any, Any] | None = None
        self.connection: PipelinedConnection | None = None
        self.request: Request | None = None
        """What was sent last, by the dialogue."""
        self.on_late_reply = on_late_reply
        """Told of a reply that nobody waits for any more."""
        self.done = False

    @property
    def deadline(self) -> float:
        return self.tick.deadline

    def drop_cancelled(self) -> bool:
        """Leave out who was cancelled before anything was sent; is anyone left?"""
        futures = self.futures
        if len(futures) > 1 or futures[0].done():
            self.futures = futures = [future for future in futures if not future.done()]
        return bool(futures)

    def shared(self) -> Command[Any]:
        """The one command that stands for all."""
        command = self.command
        return command.combined(len(self.futures)) if isinstance(command, Acquire) else command

    def on_reply(self, answer: Any) -> None:
        """A reply. The usual one (one ring, all admitted) is dealt out here; the rest is judged."""
        if self.done:
            self._on_late_reply(answer)
            return
        if type(answer) is not list or len(answer) != 3 or answer[0] != self.guard or answer[1] < 0:
            self.tick.dispatcher.on_reply(self, answer)
            return
        self.done = True
        command, futures = self.command, self.futures
        _, left, now = answer
        _, limit, cost, _, _ = command.charges[0]
        width = limit.bucket_ms
        reset_ms = limit.span * width - now % width
        left += cost * (len(futures) - 1)
        for future in futures:
            if not future.done():
                future.set_result(admitted_decision(command, 0, left, reset_ms, now, "store"))
            else:
                self.tick.dispatcher.unknown(1)
            left -= cost

    def resolve(self, reply: Any) -> None:
        """Deal out a judged reply."""
        self.done = True
        command, futures = self.command, self.futures
        replies = [reply]
        if len(futures) > 1:
            replies = split_reply(reply, len(futures), [charge.cost for charge in command.charges])
        for future, part in zip(futures, replies, strict=True):
            if not future.done():
                future.set_result(
                    decision_of(command, part, "store") if self.wants_decision else part
                )
            else:
                self.tick.dispatcher.unknown(1)
                if self.on_late_reply is not None:
                    self.on_late_reply(part)

    def _on_late_reply(self, answer: Any) -> None:
        """The callers were told that the outcome is unknown; here it is."""
        request = self.request
        if (
            self.on_late_reply is not None
            and request is not None
            and type(answer) is list
            and len(answer) >= 3
            and answer[0] == request.guard
            and answer[1] != EXPIRED
        ):
            self.on_late_reply(self.command.reply(answer))

    def fail(self, exc: Exception) -> None:
        """Tell everyone; each gets an error of its own."""
        self.done = True
        if is_unknown(exc):
            self.tick.dispatcher.unknown(len(self.futures))
        for future in self.futures:
            if not future.done():
                future.set_exception(copy.copy(exc))


PING = b"*1\r\n$4\r\nPING\r\n"


class Ping:
    """Waits for the reply to a PING, which comes when all that was sent before is answered."""

    deadline = float("inf")

    def __init__(self, answered: asyncio.Future[None]) -> None:
        self.answered = answered
        self.done = False

    def on_reply(self, answer: Any) -> None:
        """The reply, or that there will be none."""
        self.done = True
        if not self.answered.done():
            self.answered.set_result(None)
