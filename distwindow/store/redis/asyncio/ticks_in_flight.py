"""The ticks of one event loop that were sent, until they are answered or their deadline has passed.

add(tick)          first drops the earliest ticks, as far as they are answered
the timer          is set for the earliest deadline, and fails the batches without a reply
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable

from .batch import Batch, LoopTick


class TicksInFlight:
    """Ticks by deadline, and the timer for the earliest one."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        monotonic: Callable[[], float],
        time_out: Callable[[Batch], None],
    ) -> None:
        """`time_out` is called with each batch that has no reply by its deadline."""
        self._loop = loop
        self._monotonic = monotonic
        self._time_out = time_out
        self._ticks: deque[LoopTick] = deque()
        self._timer: asyncio.TimerHandle | None = None
        self._timer_deadline = 0.0
        """The deadline that the timer was set for. Its tick may have been answered since."""

    def add(self, tick: LoopTick) -> None:
        """Add a tick that is being sent."""
        ticks = self._ticks
        # A tick and its batches refer to each other, so without this they would be kept until
        # their deadline, and then until a garbage collection.
        while ticks and ticks[0].is_answered():
            ticks.popleft().clear()
        at = len(ticks)
        while at and ticks[at - 1].deadline > tick.deadline:
            at -= 1
        ticks.insert(at, tick)

    def ensure_timer(self, deadline: float) -> None:
        """Have the timer run by `deadline`, which is that of a tick that was added."""
        if self._timer is not None and deadline < self._timer_deadline:
            self.cancel_timer()
        if self._timer is None:
            self._end_overdue()

    def cancel_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _end_overdue(self) -> None:
        """Fail the calls whose deadline has passed, and set the timer for the next deadline."""
        self._timer = None
        now, ticks = self._monotonic(), self._ticks
        while ticks and ticks[0].deadline <= now:
            for batch in ticks.popleft().batches:
                if not batch.done:
                    self._time_out(batch)
        if ticks:
            self._timer_deadline = ticks[0].deadline
            self._timer = self._loop.call_later(self._timer_deadline - now, self._end_overdue)
