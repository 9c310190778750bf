"""Verifies that a limit held, from the admissions that the workers recorded. The store's own counts
are not used, because they would hide its errors.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import NamedTuple

from distwindow import Limit


class WindowCount(NamedTuple):
    """The admissions in one window."""

    admitted: int
    start_ms: int


class AdmissionLog:
    """The times of all admissions, on the store's clock, for one limit."""

    def __init__(self, limit: Limit) -> None:
        self.limit = limit
        self._buckets: Counter[int] = Counter()
        self._times_ms: list[int] = []

    def add(self, admitted_ms: Iterable[int]) -> None:
        """Record admissions, in any order."""
        times_ms = list(admitted_ms)
        self._times_ms += times_ms
        self._buckets.update(time_ms // self.limit.bucket_ms for time_ms in times_ms)

    def last_complete_interval(self) -> int:
        """Return the number of the last whole interval that is over, counted from the epoch; before
        there is one, the number of the first interval.
        """
        buckets = self.limit.buckets
        newest = max(self._buckets, default=0) // buckets
        return max(newest - 1, min(self._buckets, default=0) // buckets)

    def in_interval(self, number: int) -> int:
        """Return the admissions in the interval of that number."""
        first = number * self.limit.buckets
        return sum(self._buckets[first + i] for i in range(self.limit.buckets))

    def in_bucket(self, start_ms: int) -> int:
        """Return the admissions in the bucket that began at `start_ms`."""
        return self._buckets[start_ms // self.limit.bucket_ms]

    def fullest_aligned(self) -> WindowCount:
        """Return the fullest of the windows that begin with a bucket."""
        counts, bucket_ms = self._buckets, self.limit.bucket_ms
        return max(
            (
                WindowCount(
                    sum(counts[first + i] for i in range(self.limit.buckets)), first * bucket_ms
                )
                for first in list(counts)
            ),
            default=WindowCount(0, 0),
        )

    def fullest_unaligned(self) -> WindowCount:
        """Return the fullest of all windows as long as the interval, wherever they begin."""
        times_ms, fullest, first = sorted(self._times_ms), WindowCount(0, 0), 0
        for last, time_ms in enumerate(times_ms):
            while time_ms - times_ms[first] >= self.limit.interval_ms:
                first += 1
            fullest = max(fullest, WindowCount(last - first + 1, times_ms[first]))
        return fullest

    def fullest(self) -> WindowCount:
        """Return the fullest of the windows for which the limit's bound holds."""
        return self.fullest_unaligned() if self.limit.bound == "strict" else self.fullest_aligned()
