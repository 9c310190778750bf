"""Did the limit hold? Judged from the admissions alone, not from what the store says of itself."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import NamedTuple

from distwindow import Limit


class Fullest(NamedTuple):
    """The window that holds the most."""

    amount: int
    start_ms: int


class Book:
    """Admissions by the time the store gave them, for one limit."""

    def __init__(self, limit: Limit) -> None:
        self.limit = limit
        self._buckets: Counter[int] = Counter()
        self._stamps: list[int] = []

    def add(self, admitted_ms: Iterable[int]) -> None:
        """Write down admissions, in any order."""
        stamps = list(admitted_ms)
        self._stamps += stamps
        self._buckets.update(stamp // self.limit.bucket_ms for stamp in stamps)

    def latest(self) -> int:
        """The latest whole interval, counted in intervals since the epoch, that is over; before
        there is one, the first.
        """
        buckets = self.limit.buckets
        newest = max(self._buckets, default=0) // buckets
        return max(newest - 1, min(self._buckets, default=0) // buckets)

    def in_interval(self, number: int) -> int:
        """Admissions in the interval of that number."""
        first = number * self.limit.buckets
        return sum(self._buckets[first + i] for i in range(self.limit.buckets))

    def in_bucket(self, start_ms: int) -> int:
        """Admissions in the bucket that began then."""
        return self._buckets[start_ms // self.limit.bucket_ms]

    def fullest_aligned(self) -> Fullest:
        """Of the windows that begin with a bucket."""
        buckets, width = self._buckets, self.limit.bucket_ms
        return max(
            (
                Fullest(sum(buckets[first + i] for i in range(self.limit.buckets)), first * width)
                for first in list(buckets)
            ),
            default=Fullest(0, 0),
        )

    def fullest_of_any(self) -> Fullest:
        """Of all windows as long as the interval, wherever they begin."""
        stamps, most, first = sorted(self._stamps), Fullest(0, 0), 0
        for last, stamp in enumerate(stamps):
            while stamp - stamps[first] >= self.limit.interval_ms:
                first += 1
            most = max(most, Fullest(last - first + 1, stamps[first]))
        return most

    def fullest(self) -> Fullest:
        """Of those that the bound speaks of."""
        return self.fullest_of_any() if self.limit.bound == "strict" else self.fullest_aligned()
