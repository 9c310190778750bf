"""Queues of waiting calls: in one process, those of one key are served in the order they came.

Only the head of a queue sends commands, and the others wait for it. So a queue costs the store one
command for each admission and one for each refusal of its head, however long it is.

             the head sends             the others wait for the one before
    store <- [waiter] <- [waiter] <- [waiter] <- new callers

    from     event                                                 to
    -        joins an empty queue                                  head
    -        joins                                                 waiting
    waiting  the one before leaves                                 head
    waiting  the head is refused for longer than its own timeout   left, with RateLimitExceeded
    waiting  its timeout ends, and the head was refused            left, with RateLimitExceeded
    waiting  its timeout ends, and nobody was refused              sends out of turn
    head     is refused                                            head, asleep until its permits
    head     is admitted, or raises                                left; the next is woken
"""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from contextlib import suppress

from ..core.clock import Clock
from ..core.decision import Decision
from ..core.errors import RateLimitExceeded
from ..core.interrupts import WakeUp
from ..protocol.commands import Acquire


class QueueSlot:
    """One waiter's place in the queue of a key. `wait` until it is the head, and `leave` in any
    case.

    `leave` may be called before it has joined, and again: a waiter that is interrupted by a signal
    handler would otherwise stay in the queue, and nobody behind it would ever be served.
    """

    def __init__(
        self,
        queues: WaitQueues,
        command: Acquire,
        timeout: float | None,
        *,
        priority: bool = False,
    ) -> None:
        """`timeout`: seconds that the waiter has in all; None: no end. Waiters with `priority` have
        a queue of their own, so that they do not wait for those without.
        """
        self._queues = queues
        self._clock = queues.clock
        self._charge = command.charges[0]
        ring = self._charge.ring
        self._name = ring + b":priority" if priority else ring
        self._deadline = None if timeout is None else self._clock.monotonic() + timeout
        self._queue: _Queue | None = None
        self._wake_up = WakeUp()

    @property
    def remaining_s(self) -> float | None:
        """Seconds until the waiter gives up; None: never."""
        return (
            None if self._deadline is None else max(0.0, self._deadline - self._clock.monotonic())
        )

    def wait(self) -> None:
        """Join the queue, and wait until those before have been served or the timeout is over.

        Raises `RateLimitExceeded` when the timeout ends too early for that. Its `retry_after` is
        when the head of the queue has its permits: the waiter's own are not there before.
        """
        self._join()
        while not self._is_head() and (left := self._remaining_s_or_raise()) != 0.0:
            self._wake_up.sleep(left)

    def leave(self) -> None:
        """Leave the queue, and wake the next waiter."""
        queue = self._queue
        if queue is not None:
            self._queues.leave(self, queue, self._name)

    def wake(self) -> None:
        """Have the waiter look whether it is the head now."""
        self._wake_up.wake()

    def on_refused(self, decision: Decision) -> None:
        """Note that this waiter, the head, has to wait for `retry_after`: those behind it have to
        wait for at least as long.
        """
        assert self._queue is not None
        self._queue.refusal = (self._clock.monotonic() + decision.retry_after, decision)

    def _join(self) -> None:
        self._queues.join(self, self._name)

    def _is_head(self) -> bool:
        assert self._queue is not None
        return self._queue.waiting[0] is self

    def _remaining_s_or_raise(self) -> float | None:
        """Return the seconds for which the waiter may wait; None: no end. At 0.0 it may send out of
        turn: nobody before it was refused, so it is the store that is slow, and its own call may
        be admitted. Raises `RateLimitExceeded` as `wait` does.
        """
        if self._deadline is None:
            return None
        assert self._queue is not None
        now = self._clock.monotonic()
        if self._queue.refusal is not None:
            until, decision = self._queue.refusal
            if until > self._deadline or now >= self._deadline:
                left, charge = max(0.0, until - now), self._charge
                raise RateLimitExceeded(
                    decision._replace(key=charge.key, cost=charge.cost, retry_after=left)
                )
        return max(0.0, self._deadline - now)


class AsyncQueueSlot(QueueSlot):
    """`QueueSlot` for tasks."""

    def __init__(
        self,
        queues: WaitQueues,
        command: Acquire,
        timeout: float | None,
        *,
        priority: bool = False,
    ) -> None:
        super().__init__(queues, command, timeout, priority=priority)
        self._loop = asyncio.get_running_loop()
        self._event = asyncio.Event()

    async def wait_async(self) -> None:
        """Do as `QueueSlot.wait`."""
        self._join()
        while not self._is_head() and (left := self._remaining_s_or_raise()) != 0.0:
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
        """The head comes first."""
        self.refusal: tuple[float, Decision] | None = None
        """The last refusal of a head, and until when it holds (monotonic seconds)."""


class WaitQueues:
    """The queues of one limiter, by ring and priority. Safe to share between threads."""

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self.after_fork()

    def after_fork(self) -> None:
        """Start without waiters: their threads exist in the parent only."""
        # Re-entrant, as a signal handler may wait for the limiter that it has interrupted.
        self._lock = threading.RLock()
        self._queues: dict[bytes, _Queue] = {}

    def join(self, slot: QueueSlot, name: bytes) -> None:
        """Put `slot` at the end of the queue of this name."""
        with self._lock:
            queue = self._queues.get(name)
            if queue is None:
                queue = self._queues[name] = _Queue()
            slot._queue = queue  # before it is appended, so that it can leave if interrupted here
            queue.waiting.append(slot)

    def leave(self, slot: QueueSlot, queue: _Queue, name: bytes) -> None:
        """Take `slot` out of `queue`, and wake the head."""
        with self._lock:
            if slot in queue.waiting:
                queue.waiting.remove(slot)
            if queue.waiting:
                queue.waiting[0].wake()
            elif self._queues.get(name) is queue:
                del self._queues[name]
