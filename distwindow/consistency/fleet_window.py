"""One limit as all processes have counted it, by what this process has received.

      fleet               | 10 | 20 |  5 |  0 |      all processes, by the store's last reply
      unacknowledged                |  2 |  4 |      counted here, sent or not, not in that reply
      own                 |  4 |  9 |  3 |  4 |      all that was counted here, if a share caps it

Counts are kept by bucket, so that they leave the window in time.
"""

from __future__ import annotations

from collections.abc import Iterable

from ..core.limit import Limit
from ..core.stats import Bucket


class FleetWindow:
    """One limit of one key. Its owner holds a lock. Bucket starts are ms of the store's clock."""

    __slots__ = ("_fleet", "_known_counts", "_own", "limit", "process_limit")

    def __init__(self, limit: Limit, share: float) -> None:
        self.limit = limit
        self.process_limit = max(1, int(limit.amount * share))
        """The most permits that this process admits in a window."""
        self._fleet: dict[int, int] = {}
        self._own: dict[int, int] = {}
        self._known_counts: dict[int, int] = {}
        """The sums of fleet and unacknowledged, as `permits_left` has last computed them."""

    def count_own(self, start: int, permits: int) -> None:
        """Add permits that this process has admitted in the bucket of `start`."""
        if self.process_limit < self.limit.amount:
            start -= start % self.limit.bucket_ms
            self._own[start] = self._own.get(start, 0) + permits

    def shift_own(self, ms: int) -> None:
        """Move what `count_own` has counted by `ms`, as the clock offset was wrong by that. Each
        count goes into the later of the two buckets that it may belong to, so that it does not
        leave the window too early.
        """
        own, self._own = self._own, {}
        for start, permits in own.items():
            self.count_own(start + ms + self.limit.bucket_ms - 1, permits)

    def set_fleet_counts(self, fleet: dict[int, int]) -> None:
        """Replace what all processes have admitted, by bucket start."""
        self._fleet = fleet

    def permits_left(self, now_ms: int, unacknowledged: Iterable[Bucket]) -> int:
        """Return the permits left at `now_ms`. `unacknowledged` is what this process has counted
        and the fleet's counts do not include.
        """
        bucket_ms, span = self.limit.bucket_ms, self.limit.span
        newest = now_ms - now_ms % bucket_ms
        oldest = newest - (span - 1) * bucket_ms
        self._fleet = {start: n for start, n in self._fleet.items() if start >= oldest}
        self._own = {start: n for start, n in self._own.items() if start >= oldest}
        sums = dict(self._fleet)
        for counted in unacknowledged:
            start = counted.start - counted.start % bucket_ms
            if counted.passed and start >= oldest:
                sums[start] = sums.get(start, 0) + counted.passed
        self._known_counts = sums
        return min(
            self.limit.amount - sum(sums.values()), self.process_limit - sum(self._own.values())
        )

    def retry_ms(self, now_ms: int, cost: int, spent: int) -> int:
        """Return the ms until `cost` would be admitted if nobody else called. `spent` permits have
        been admitted here since `permits_left` was called, in the present bucket.
        """
        return max(
            self._ms_until_room(now_ms, self._known_counts, cost + spent - self.limit.amount),
            self._ms_until_room(now_ms, self._own, cost + spent - self.process_limit),
        )

    def reset_ms(self, now_ms: int, spent: int) -> int:
        """Return the ms until the window is empty if nobody calls; `spent` as in `retry_ms`."""
        newest = max((start for start, n in self._known_counts.items() if n), default=None)
        if spent:
            newest = now_ms - now_ms % self.limit.bucket_ms
        return 0 if newest is None else max(0, self._expires_at_ms(newest) - now_ms)

    def _ms_until_room(self, now_ms: int, counts: dict[int, int], excess: int) -> int:
        """Return the ms until so many of `counts` have left the window that `excess` plus the rest
        is at most 0.
        """
        need = sum(counts.values()) + excess
        if need <= 0:
            return 0
        for start in sorted(counts):
            need -= counts[start]
            if need <= 0:
                return max(1, self._expires_at_ms(start) - now_ms)
        return max(1, self._expires_at_ms(now_ms - now_ms % self.limit.bucket_ms) - now_ms)

    def _expires_at_ms(self, start: int) -> int:
        """Return when the bucket of `start` leaves the window."""
        return start + self.limit.span * self.limit.bucket_ms
