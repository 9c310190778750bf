"""Waiting in line: within a process, waiters for one key are served in the order they came.

Only the head of a line asks the store; those behind wait for it to be served. So a line costs the
store one call per admission and one per refusal of its head, however long it is.

            head asks            the others wait for the one ahead
    store <- [waiter] <- [waiter] <- [waiter] <- new arrivals
"""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from typing import Any

from ..core.clock import Clock
from ..core.decision import Decision
from ..core.errors import RateLimitExceeded
from ..wire.command import Acquire, Charge


class Place:
    """A waiter's place as head of its line."""

    __slots__ = ("_clock", "_line", "patience")

    def __init__(self, line: _Line, clock: Clock, ends: float | None) -> None:
        self._line = line
        self._clock = clock
        self.patience = None if ends is None else max(0.0, ends - clock.monotonic())
        """Seconds from now until the waiter gives up; None: never."""

    def refused(self, decision: Decision) -> None:
        """The head has to wait until then, so those behind it have to wait longer."""
        self._line.refusal = (self._clock.monotonic() + decision.retry_after, decision)


class _Line:
    __slots__ = ("refusal", "waiting")

    def __init__(self) -> None:
        self.waiting: deque[Callable[[], object]] = deque()
        self.refusal: tuple[float, Decision] | None = None


class Lines:
    """The lines of one limiter, one for each thing that is waited for. Safe between threads."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self.after_fork()

    def after_fork(self) -> None:
        """The child begins without waiters: their threads exist in the parent only."""
        self._lock = threading.Lock()
        self._lines: dict[Any, _Line] = {}

    @contextmanager
    def turn(self, command: Acquire, patience: float | None) -> Iterator[Place]:
        """Be head of the line for the key of `command`, after those who came before.

        Raises `RateLimitExceeded` when patience (seconds; None: endless) cannot last that long. Its
        `retry_after` is when the head of the line has its permits: one's own come no earlier.
        """
        served = threading.Event()
        wake = served.set
        charge = command.charges[0]
        line, ends = self._join(charge.ring, wake, patience)
        try:
            while not served.is_set() and (left := self._left(line, ends, charge)) != 0.0:
                served.wait(left)
            yield Place(line, self._clock, ends)
        finally:
            self._leave(charge.ring, line, wake)

    @asynccontextmanager
    async def aturn(self, command: Acquire, patience: float | None) -> AsyncIterator[Place]:
        """`turn` for tasks."""
        served = asyncio.Event()
        loop = asyncio.get_running_loop()

        def wake() -> None:
            if not loop.is_closed():
                loop.call_soon_threadsafe(served.set)

        charge = command.charges[0]
        line, ends = self._join(charge.ring, wake, patience)
        try:
            while not served.is_set() and (left := self._left(line, ends, charge)) != 0.0:
                with suppress(asyncio.TimeoutError):
                    await asyncio.wait_for(served.wait(), left)
            yield Place(line, self._clock, ends)
        finally:
            self._leave(charge.ring, line, wake)

    def _join(
        self, name: Any, wake: Callable[[], object], patience: float | None
    ) -> tuple[_Line, float | None]:
        ends = None if patience is None else self._clock.monotonic() + patience
        with self._lock:
            line = self._lines.setdefault(name, _Line())
            line.waiting.append(wake)
            if len(line.waiting) == 1:
                wake()
        return line, ends

    def _leave(self, name: Any, line: _Line, wake: Callable[[], object]) -> None:
        with self._lock:
            was_head = line.waiting[0] is wake
            line.waiting.remove(wake)
            if was_head and line.waiting:
                line.waiting[0]()
            if not line.waiting and self._lines.get(name) is line:
                del self._lines[name]

    def _left(self, line: _Line, ends: float | None, charge: Charge) -> float | None:
        """Seconds a waiter may still stand in line. When they are over and nobody ahead has been
        refused (so the store is slow), the waiter may ask out of turn rather than go empty-handed.
        """
        if ends is None:
            return None
        now = self._clock.monotonic()
        if line.refusal is not None:
            until, decision = line.refusal
            if until > ends or now >= ends:
                left = max(0.0, until - now)
                raise RateLimitExceeded(
                    decision._replace(key=charge.key, cost=charge.cost, retry_after=left)
                )
        return max(0.0, ends - now)
