"""A window of the whole fleet as one process sees it: what all had passed when it last asked, and
what it has passed itself since.

      buckets        | 10 | 20 |  5 |  0 |      told by the store, by bucket, so that they age
      own, untold              |  2 |  4 |      of this process
"""

from __future__ import annotations

from collections.abc import Iterable

from ..core.limit import Limit
from ..core.stats import Bucket


class FleetWindow:
    """One limit of one key. Not locked: its owner is. Starts are the store's ms."""

    __slots__ = ("_fleet", "_own", "_sum", "cap", "limit")

    def __init__(self, limit: Limit, share: float) -> None:
        self.limit = limit
        self.cap = max(1, int(limit.amount * share))
        """The most that this process admits in a window."""
        self._fleet: dict[int, int] = {}
        self._own: dict[int, int] = {}
        self._sum: dict[int, int] = {}

    def count_own(self, start: int, permits: int) -> None:
        """This process has passed so many in the bucket of `start`."""
        if self.cap < self.limit.amount:
            start -= start % self.limit.bucket_ms
            self._own[start] = self._own.get(start, 0) + permits

    def shift(self, ms: int) -> None:
        """The store's clock is so much ahead of what was thought when `passed` was told."""
        own, self._own = self._own, {}
        for start, permits in own.items():
            self.count_own(start + ms + self.limit.bucket_ms - 1, permits)  # rather late than early

    def set_fleet_counts(self, fleet: dict[int, int]) -> None:
        """What all have passed, by bucket."""
        self._fleet = fleet

    def permits_left(self, now_ms: int, untold: Iterable[Bucket]) -> int:
        """Permits left at `now_ms`; `untold` is what this process has counted beyond what it was
        told of.
        """
        width, span = self.limit.bucket_ms, self.limit.span
        newest = now_ms - now_ms % width
        oldest = newest - (span - 1) * width
        self._fleet = {start: n for start, n in self._fleet.items() if start >= oldest}
        self._own = {start: n for start, n in self._own.items() if start >= oldest}
        sums = dict(self._fleet)
        for seen in untold:
            start = seen.start - seen.start % width
            if seen.passed and start >= oldest:
                sums[start] = sums.get(start, 0) + seen.passed
        self._sum = sums
        return min(self.limit.amount - sum(sums.values()), self.cap - sum(self._own.values()))

    def retry_ms(self, now_ms: int, cost: int, spent: int) -> int:
        """Until there would be room for `cost`, if nobody else called. `spent` were passed here
        since `room` was asked, in the present bucket.
        """
        return max(
            self._room_in_ms(now_ms, self._sum, cost + spent - self.limit.amount),
            self._room_in_ms(now_ms, self._own, cost + spent - self.cap),
        )

    def reset_ms(self, now_ms: int, spent: int) -> int:
        """Until the window is empty, if nobody calls."""
        width, span = self.limit.bucket_ms, self.limit.span
        newest = max((start for start, n in self._sum.items() if n), default=None)
        if spent:
            newest = now_ms - now_ms % width
        return 0 if newest is None else max(0, newest + span * width - now_ms)

    def _room_in_ms(self, now_ms: int, counts: dict[int, int], beyond: int) -> int:
        """Until `beyond` of the sum of `counts` and more have left the window; 0 for none."""
        width, span = self.limit.bucket_ms, self.limit.span
        need = sum(counts.values()) + beyond
        if need <= 0:
            return 0
        for start in sorted(counts):
            need -= counts[start]
            if need <= 0:
                return max(1, start + span * width - now_ms)
        return max(1, now_ms - now_ms % width + span * width - now_ms)
