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
from contextlib import suppress
from typing import Any

from ..core.clock import Clock
from ..core.decision import Decision
from ..core.errors import RateLimitExceeded
from ..core.interrupts import WakeUp
from ..protocol.commands import Acquire


class QueueSlot:
    """A waiter's place in the line for a key: `wait` to be its head, and `leave` in any case.

    `leave` may be called before it has joined, and again: who is interrupted by a signal handler
    would else stay in the line, and nobody behind would ever be served.
    """

    def __init__(self, queues: WaitQueues, command: Acquire, timeout: float | None) -> None:
        """`patience`: seconds that the waiter has in all; None: endless."""
        self._queues = queues
        self._clock = queues.clock
        self._charge = command.charges[0]
        self._ends_at = None if timeout is None else self._clock.monotonic() + timeout
        self._queue: _Queue | None = None
        self._woken = WakeUp()

    @property
    def remaining_s(self) -> float | None:
        """Seconds from now until the waiter gives up; None: never."""
        return None if self._ends_at is None else max(0.0, self._ends_at - self._clock.monotonic())

    def wait(self) -> None:
        """Until those who came before have been served, or the time is over.

        Raises `RateLimitExceeded` when patience cannot last that long. Its `retry_after` is when
        the head of the line has its permits: one's own come no earlier.
        """
        self._join()
        while not self._is_head() and (left := self._check_remaining_s()) != 0.0:
            self._woken.sleep(left)

    def leave(self) -> None:
        """Make way for the next."""
        queue = self._queue
        if queue is not None:
            self._queues.leave(self, queue, self._charge.ring)

    def wake(self) -> None:
        """It may be the head now."""
        self._woken.wake()

    def refused(self, decision: Decision) -> None:
        """The head has to wait until then, so those behind it have to wait longer."""
        assert self._queue is not None
        self._queue.refusal = (self._clock.monotonic() + decision.retry_after, decision)

    def _join(self) -> None:
        self._queues.join(self, self._charge.ring)

    def _is_head(self) -> bool:
        assert self._queue is not None
        return self._queue.waiting[0] is self

    def _check_remaining_s(self) -> float | None:
        """Seconds a waiter may still stand in line. When they are over and nobody ahead has been
        refused (so the store is slow), the waiter may ask out of turn rather than go empty-handed.
        """
        if self._ends_at is None:
            return None
        assert self._queue is not None
        now = self._clock.monotonic()
        if self._queue.refusal is not None:
            until, decision = self._queue.refusal
            if until > self._ends_at or now >= self._ends_at:
                left, charge = max(0.0, until - now), self._charge
                raise RateLimitExceeded(
                    decision._replace(key=charge.key, cost=charge.cost, retry_after=left)
                )
        return max(0.0, self._ends_at - now)


class AsyncQueueSlot(QueueSlot):
    """`QueueSlot` for tasks."""

    def __init__(self, queues: WaitQueues, command: Acquire, timeout: float | None) -> None:
        super().__init__(queues, command, timeout)
        self._loop = asyncio.get_running_loop()
        self._event = asyncio.Event()

    async def wait_async(self) -> None:
        """See `QueueSlot.wait`."""
        self._join()
        while not self._is_head() and (left := self._check_remaining_s()) != 0.0:
            with suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self._event.wait(), left)
            self._event.clear()

    def wake(self) -> None:
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._event.set)


class _Queue:
    __slots__ = ("refusal", "waiting")

    def __init__(self) -> None:
        self.waiting: deque[QueueSlot] = deque()
        self.refusal: tuple[float, Decision] | None = None


class WaitQueues:
    """The lines of one limiter, one for each thing that is waited for. Safe between threads."""

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self.after_fork()

    def after_fork(self) -> None:
        """The child begins without waiters: their threads exist in the parent only."""
        # Re-entrant, because a signal handler may wait for the limiter it has interrupted.
        self._lock = threading.RLock()
        self._queues: dict[Any, _Queue] = {}

    def join(self, slot: QueueSlot, name: Any) -> None:
        """Have `place` stand at the end of the line of that name."""
        with self._lock:
            queue = self._queues.get(name)
            if queue is None:
                queue = self._queues[name] = _Queue()
            slot._queue = queue  # first, so that a place that is interrupted here can leave
            queue.waiting.append(slot)

    def leave(self, slot: QueueSlot, queue: _Queue, name: Any) -> None:
        """Take `place` out of its line. Whoever is the head then is woken."""
        with self._lock:
            if slot in queue.waiting:
                queue.waiting.remove(slot)
            if queue.waiting:
                queue.waiting[0].wake()
            elif self._queues.get(name) is queue:
                del self._queues[name]
