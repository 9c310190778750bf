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
    head     permits of the key are given back in this process     head, and asks at once
    head     is admitted, or raises                                left; the next is woken
"""

from __future__ import annotations

import asyncio
import math
import threading
from collections import deque
from collections.abc import Iterable
from contextlib import suppress
from itertools import islice
from typing import Any, NamedTuple

from ..core.charge import Charge
from ..core.clock import Clock
from ..core.decision import Decision
from ..core.errors import RateLimitExceeded
from ..core.interrupts import WakeUp
from ..protocol.commands import Acquire

PRIORITY = b":priority"
"""Ends the names of the queues of those who wait with priority."""


class Waiter:
    """One waiter's place in the queue of this name. `wait` until it is the head, and `leave` in any
    case.

    `leave` may be called before it has joined, and again: a waiter that is interrupted by a signal
    handler would otherwise stay in the queue, and nobody behind it would ever be served.
    """

    def __init__(self, queues: WaitQueues, name: bytes, timeout: float | None) -> None:
        """`timeout`: seconds that the waiter has in all; None: no end."""
        self._queues = queues
        self._clock = queues.clock
        self._name = name
        self._began_at = self._clock.monotonic()
        self._deadline = None if timeout is None else self._began_at + timeout
        self._queue: _Queue | None = None
        self._wake_up = WakeUp()

    @property
    def may_wait(self) -> bool:
        """False with `timeout=0`."""
        return self._deadline != self._began_at

    @property
    def remaining_s(self) -> float | None:
        """Seconds until the waiter gives up; None: never."""
        return (
            None if self._deadline is None else max(0.0, self._deadline - self._clock.monotonic())
        )

    def wait(self) -> bool:
        """Join the queue, and wait until those before have been served or the timeout is over.
        Return False if there were none.
        """
        self._join()
        waited = False
        while not self._is_head() and (left := self._remaining_s_or_raise()) != 0.0:
            waited = True
            self._wake_up.sleep(left)
        return waited

    def leave(self) -> None:
        """Leave the queue, and wake the next waiter."""
        queue = self._queue
        if queue is not None:
            self._queues.leave(self, queue, self._name)

    def first_waited_ms(self, count: int) -> tuple[int, ...]:
        """Return how long each of the first `count` waiters of the queue has waited, ms."""
        return tuple(waiter.waited_ms for waiter in self._queues.first(self._name, count))

    @property
    def waited_ms(self) -> int:
        """How long it has waited, ms."""
        return round((self._clock.monotonic() - self._began_at) * 1000)

    def wake(self) -> None:
        """Have the waiter look whether it is the head now."""
        self._wake_up.wake()

    def sleep(self, seconds: float) -> None:
        """As the head, sleep until woken or `seconds` have passed."""
        self._wake_up.sleep(seconds)

    def _join(self) -> None:
        self._queues.join(self, self._name)

    def _is_head(self) -> bool:
        assert self._queue is not None
        return self._queue.waiting[0] is self

    def _remaining_s_or_raise(self) -> float | None:
        """Return the seconds for which the waiter may wait; None: no end."""
        return self.remaining_s


class HeldTurn(NamedTuple):
    """A turn in the virtual line of a ring (`core/line.py`)."""

    turn_ms: int
    """By the clock of the store, ms since the epoch."""
    due_at: float
    """By the monotonic clock of the store, seconds."""


class QueueTurns:
    """What the heads of one queue hand on: see `operations/turns.py`."""

    __slots__ = ("free_calls", "turn")

    def __init__(self) -> None:
        self.turn: HeldTurn | None = None
        """The place of this queue in the line. A head that leaves it to the next one, because it
        was cancelled or its timeout has ended, so leaves no gap.
        """
        self.free_calls = 0
        """How many waiters may ask without waiting for a turn, as there is room for them."""


class QueueSlot(Waiter):
    """A waiter for permits. `wait` raises `RateLimitExceeded` when the timeout ends too early for
    them. Its `retry_after` is when the head of the queue has its permits, or its turn: the waiter's
    own are not there before.
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
        self._charge = command.charges[0]
        ring = self._charge.ring
        super().__init__(queues, ring + PRIORITY if priority else ring, timeout)

    def on_refused(self, decision: Decision, asks_in_s: float = 0.0) -> None:
        """Note that this waiter, the head, has to wait for `retry_after`: those behind it have to
        wait for at least as long. `asks_in_s`: seconds to its turn, if that comes later.
        """
        assert self._queue is not None
        if self._queue.freed:
            return  # the store may have refused before the permits were given back
        now, retry_after = self._clock.monotonic(), decision.retry_after
        asks_at = now + max(retry_after, asks_in_s)
        self._queue.refusal = (now + retry_after, asks_at, decision)
        self._queues.wake_too_late(self, self._queue, now + retry_after)

    def take_freed(self) -> bool:
        """True, once, if this is the head and permits have been given back. A waiter that has left
        has been admitted, and sleeps until it may proceed.
        """
        queue = self._queue
        if queue is None or not queue.freed or list(queue.waiting)[:1] != [self]:
            return False
        queue.freed = False
        return True

    @property
    def is_head(self) -> bool:
        """False for a waiter that sends out of turn."""
        return self._is_head()

    @property
    def has_followers(self) -> bool:
        """True if others wait behind this waiter, the head."""
        assert self._queue is not None
        return len(self._queue.waiting) > 1

    @property
    def turns(self) -> QueueTurns:
        """What the head has from those before it, and leaves to those behind."""
        assert self._queue is not None
        return self._queue.turns

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
            until, asks_at, decision = self._queue.refusal
            if until > self._deadline or now >= self._deadline:
                left, charge = max(0.0, asks_at - now), self._charge
                raise RateLimitExceeded(
                    decision._replace(key=charge.key, cost=charge.cost, retry_after=left)
                )
        return max(0.0, self._deadline - now)


class AsyncWaiter(Waiter):
    """`Waiter` for tasks."""

    def __init__(
        self, queues: WaitQueues, waits_for: Any, timeout: float | None, **options: bool
    ) -> None:
        super().__init__(queues, waits_for, timeout, **options)
        self._loop = asyncio.get_running_loop()
        self._event = asyncio.Event()

    async def wait_async(self) -> bool:
        """Do as `Waiter.wait`."""
        self._join()
        waited = False
        while not self._is_head() and (left := self._remaining_s_or_raise()) != 0.0:
            waited = True
            await self.sleep_async(left)
        return waited

    async def sleep_async(self, seconds: float | None) -> None:
        """Sleep until woken or `seconds` have passed; None: no end."""
        with suppress(asyncio.TimeoutError):
            await asyncio.wait_for(self._event.wait(), seconds)
        self._event.clear()

    def wake(self) -> None:
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._event.set)


class AsyncQueueSlot(AsyncWaiter, QueueSlot):
    """`QueueSlot` for tasks."""


class _Queue:
    __slots__ = ("earliest_deadline", "freed", "refusal", "turns", "waiting")

    def __init__(self) -> None:
        self.waiting: deque[Waiter] = deque()
        """The head comes first."""
        self.refusal: tuple[float, float, Decision] | None = None
        """The last refusal of a head: until when it holds, and when the head asks again (monotonic
        seconds), and the decision.
        """
        self.earliest_deadline = math.inf
        """No waiter gives up before this moment (monotonic seconds)."""
        self.freed = False
        """True once permits have been given back in this process, until the head asks again."""
        self.turns = QueueTurns()


class WaitQueues:
    """The queues of one limiter, by ring and priority, or by slots. Safe to share between
    threads.
    """

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self.after_fork()

    def after_fork(self) -> None:
        """Start without waiters: their threads exist in the parent only."""
        # Re-entrant, as a signal handler may wait for the limiter that it has interrupted.
        self._lock = threading.RLock()
        self._queues: dict[bytes, _Queue] = {}

    def join(self, slot: Waiter, name: bytes) -> None:
        """Put `slot` at the end of the queue of this name."""
        with self._lock:
            queue = self._queues.get(name)
            if queue is None:
                queue = self._queues[name] = _Queue()
            slot._queue = queue  # before it is appended, so that it can leave if interrupted here
            if slot._deadline is not None:
                queue.earliest_deadline = min(queue.earliest_deadline, slot._deadline)
            queue.waiting.append(slot)

    def wake_too_late(self, head: Waiter, queue: _Queue, until: float) -> None:
        """Wake those behind `head` whose timeouts end before `until` (monotonic seconds), when the
        refusal of the head ends. They raise at once; nobody else is woken.
        """
        if until <= queue.earliest_deadline:
            return
        with self._lock:
            earliest = math.inf
            for slot in list(queue.waiting):
                if slot is not head and slot._deadline is not None:
                    earliest = min(earliest, slot._deadline)
                    if slot._deadline < until:
                        slot.wake()
            queue.earliest_deadline = earliest

    def on_freed(self, charges: Iterable[Charge]) -> None:
        """Have the heads of the queues of these rings ask at once: permits have been given back."""
        for charge in charges:
            for name in (charge.ring, charge.ring + PRIORITY):
                if name in self._queues:
                    self._free(name)

    def _free(self, name: bytes) -> None:
        with self._lock:
            queue = self._queues.get(name)
            if queue is not None and queue.waiting:
                queue.freed, queue.refusal = True, None
                queue.waiting[0].wake()

    def wake_head(self, name: bytes) -> None:
        """Wake the head of the queue of this name, if there is one."""
        with self._lock:
            queue = self._queues.get(name)
            if queue is not None and queue.waiting:
                queue.waiting[0].wake()

    def first(self, name: bytes, count: int) -> list[Waiter]:
        """Return the first waiters in the queue of this name."""
        with self._lock:
            queue = self._queues.get(name)
            return [] if queue is None else list(islice(queue.waiting, count))

    def count(self, name: bytes) -> int:
        """Return how many wait in the queue of this name."""
        queue = self._queues.get(name)
        return 0 if queue is None else len(queue.waiting)

    def leave(self, slot: Waiter, queue: _Queue, name: bytes) -> None:
        """Take `slot` out of `queue`, and wake the head."""
        with self._lock:
            if slot in queue.waiting:
                queue.waiting.remove(slot)
            if queue.waiting:
                queue.waiting[0].wake()
            elif self._queues.get(name) is queue:
                del self._queues[name]
