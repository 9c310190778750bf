"""When the worker has to flush one limiter.

next_due_at      NEVER ------ flush_by(t) ------> t ------ recompute() ------> NEVER or later
the worker       sleeps        wake()             flushes                      sleeps
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from .key_state import NEVER


class FlushSchedule:
    """The next time, and the function that wakes the worker for it."""

    def __init__(self, interval_s: float) -> None:
        self.interval_s = interval_s
        """Seconds from the first count to the flush that sends it."""
        self.next_due_at = NEVER
        """Monotonic seconds."""
        self.wake: Callable[[], object] = lambda: None
        """Wakes the worker, as `next_due_at` is earlier than it was."""

    def flush_by(self, at: float) -> None:
        """Have the worker flush at `at` (monotonic seconds) or earlier."""
        # A time that is more than an interval and a second before `at` is replaced, too: what was
        # to flush then (the task of an event loop, for example) has ended, or was not woken.
        if at < self.next_due_at or self.next_due_at < at - self.interval_s - 1:
            self.next_due_at = at
            self.wake()

    def recompute(self, now: float, sources: Iterable[Callable[[float], float]]) -> None:
        """Set the next time after a flush: the earliest that one of `sources` returns."""
        self.next_due_at = NEVER  # first, as `flush_by` may be called meanwhile
        for due in sources:
            at = due(now)
            self.next_due_at = min(self.next_due_at, at)
        if self.next_due_at < NEVER:
            self.wake()  # the worker may have read NEVER in between
