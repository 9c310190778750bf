"""An adaptive breaker as stores keep it: the specification of `lua/breaker_adaptive.lua`.

It has no state: only the calls of the window, and when a call last passed although some are
dropped.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from .breaker_record import MAX_TOTAL


class AdaptiveCounts(NamedTuple):
    """The calls of the bucket that begins at `start` (ms)."""

    start: int
    success: int
    failure: int
    drop: int

    @property
    def calls(self) -> int:
        """All calls, those that were dropped included."""
        return self.success + self.failure + self.drop


class AdaptiveRecord:
    """One adaptive breaker. Not locked. Times are ms of the store's clock."""

    __slots__ = ("buckets", "passed_ms")

    def __init__(self) -> None:
        self.buckets: dict[int, tuple[int, int, int, int]] = {}
        """By slot: the bucket's number, successes, failures and drops."""
        self.passed_ms = 0

    def live_counts(
        self, counts: Iterable[AdaptiveCounts], bucket_ms: int, span: int, now: int
    ) -> list[tuple[int, int, int, int]]:
        """Return the counts whose bucket is in the window, by its number. What ended after now is
        counted in the newest bucket.
        """
        newest = now // bucket_ms
        placed = ((min(newest, c.start // bucket_ms), c) for c in counts)
        return [(n, c.success, c.failure, c.drop) for n, c in placed if n > newest - span]

    def add(self, live: Iterable[tuple[int, int, int, int]], span: int) -> None:
        """Add what `live_counts` returned."""
        for number, *counted in live:
            known = self.buckets.get(number % span, (-1, 0, 0, 0))
            if known[0] == number:
                counted = [min(a + b, MAX_TOTAL) for a, b in zip(known[1:], counted, strict=True)]
            success, failure, drop = counted
            self.buckets[number % span] = (number, success, failure, drop)

    def note_pass(self, passed_ms: int, force_ms: int, now: int) -> tuple[bool, int]:
        """Take in when a call last passed. With `force_ms` above 0, claim a pass: it is granted if
        there was one, and the last is longer than that ago. Return whether, and the last pass.
        """
        # A time ahead of now is from before the clock was set back.
        known = min(self.passed_ms, now)
        last = max(known, min(passed_ms, now))
        forced = 0 < force_ms < now - last and last > 0
        if forced:
            last = now
        if last > known:
            self.passed_ms = last
        return forced, last

    def window(self, bucket_ms: int, span: int, now: int) -> list[AdaptiveCounts]:
        """Return the buckets of the window, oldest first."""
        newest = now // bucket_ms
        live = sorted(b for b in self.buckets.values() if newest - span < b[0] <= newest)
        return [AdaptiveCounts(number * bucket_ms, *counted) for number, *counted in live]
