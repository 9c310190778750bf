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

    @property
    def newest(self) -> int:
        """The number of the newest bucket that holds an admission."""
        return max(self._buckets, default=0)

    def in_window(self, newest: int) -> int:
        """Admissions in the window, as the store sums it, that ends with the bucket of a number."""
        return sum(self._buckets[newest - i] for i in range(self.limit.span))

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
