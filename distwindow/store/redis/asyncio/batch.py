"""Equal calls of one turn of the event loop, that go as one."""

from __future__ import annotations

import asyncio
import copy
from collections.abc import Callable, Generator
from typing import Any, Protocol

from ....operations.acquire import admitted, decide
from ....protocol.commands import EXPIRED, Acquire, Command, each_of
from ..attempts import Send
from ..outcome import is_unknown
from .connection import Pipe


class Judge(Protocol):
    """Who takes a batch on when its reply is not the usual one."""

    def judge(self, batch: Batch, answer: Any) -> None: ...

    def unknown(self, calls: int) -> None:
        """So many callers will never know whether they were charged."""
        ...


class Turn:
    """The batches that were sent in one turn of the loop, which have one deadline."""

    __slots__ = ("batches", "deadline", "desk", "shared")

    def __init__(self, desk: Judge, deadline: float) -> None:
        self.desk = desk
        self.deadline = deadline
        self.batches: list[Batch] = []
        self.shared: dict[Acquire, Batch] = {}
        """The batches that equal commands join."""


class Batch:
    """A command and who waits for it: for decisions (`attempt`), or for the plain reply."""

    __slots__ = (
        "command", "decides", "dialogue", "done", "futures", "guard", "pipe", "send", "turn",
        "unclaimed",
    )  # fmt: skip

    def __init__(
        self,
        turn: Turn,
        command: Command[Any],
        *,
        decides: bool,
        unclaimed: Callable[[Any], object] | None = None,
    ) -> None:
        self.turn = turn
        self.command = command
        self.decides = decides
        self.futures: list[asyncio.Future[Any]] = []
        self.guard: bytes | None = None
        """Of a frame that was sent without a dialogue."""
        self.dialogue: Generator[Send, Any, Any] | None = None
        self.pipe: Pipe | None = None
        self.send: Send | None = None
        """What was sent last, by the dialogue."""
        self.unclaimed = unclaimed
        """Told of a reply that nobody waits for any more."""
        self.done = False

    @property
    def deadline(self) -> float:
        return self.turn.deadline

    def drop_cancelled(self) -> bool:
        """Leave out who was cancelled before anything was sent; is anyone left?"""
        futures = self.futures
        if len(futures) > 1 or futures[0].done():
            self.futures = futures = [future for future in futures if not future.done()]
        return bool(futures)

    def shared(self) -> Command[Any]:
        """The one command that stands for all."""
        command = self.command
        return command.shared(len(self.futures)) if isinstance(command, Acquire) else command

    def heard(self, answer: Any) -> None:
        """A reply. The usual one (one ring, all admitted) is dealt out here; the rest is judged."""
        if self.done:
            self._heard_late(answer)
            return
        if type(answer) is not list or len(answer) != 3 or answer[0] != self.guard or answer[1] < 0:
            self.turn.desk.judge(self, answer)
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
                future.set_result(admitted(command, 0, left, reset_ms, now, "store"))
            else:
                self.turn.desk.unknown(1)
            left -= cost

    def resolve(self, reply: Any) -> None:
        """Deal out a judged reply."""
        self.done = True
        command, futures = self.command, self.futures
        replies = [reply]
        if len(futures) > 1:
            replies = each_of(reply, len(futures), [charge.cost for charge in command.charges])
        for future, part in zip(futures, replies, strict=True):
            if not future.done():
                future.set_result(decide(command, part, "store") if self.decides else part)
            else:
                self.turn.desk.unknown(1)
                if self.unclaimed is not None:
                    self.unclaimed(part)

    def _heard_late(self, answer: Any) -> None:
        """The callers were told that the outcome is unknown; here it is."""
        send = self.send
        if (
            self.unclaimed is not None
            and send is not None
            and type(answer) is list
            and len(answer) >= 3
            and answer[0] == send.guard
            and answer[1] != EXPIRED
        ):
            self.unclaimed(self.command.reply(answer))

    def fail(self, exc: Exception) -> None:
        """Tell everyone; each gets an error of its own."""
        self.done = True
        if is_unknown(exc):
            self.turn.desk.unknown(len(self.futures))
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

    def heard(self, answer: Any) -> None:
        """The reply, or that there will be none."""
        self.done = True
        if not self.answered.done():
            self.answered.set_result(None)
