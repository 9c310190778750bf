"""What the buckets of a ring in memory count besides the permits that passed."""

from __future__ import annotations

from .stats import Bucket


class RingCounters(dict[int, list[int]]):
    """[blocked, success, error, rt_sum_ms, rt_min_ms] by bucket number, of the buckets in which any
    of them was counted. A dictionary, so that it takes no more memory than one.
    """

    __slots__ = ()

    def count_blocked(self, number: int, permits: int) -> None:
        """Count refused permits in the bucket of this number."""
        self.setdefault(number, [0, 0, 0, 0, 0])[0] += permits

    def add(self, number: int, added: Bucket) -> None:
        """Add what `added` counts to the bucket of this number."""
        if not (added.blocked or added.success or added.error):
            return
        counters = self.setdefault(number, [0, 0, 0, 0, 0])
        counters[0] += added.blocked
        if added.success or added.error:
            rt_min_ms = added.rt_min_ms or 0
            if counters[1] or counters[2]:
                rt_min_ms = min(counters[4], rt_min_ms)
            counters[4] = rt_min_ms
            counters[1] += added.success
            counters[2] += added.error
            counters[3] += added.rt_sum_ms

    def since(self, oldest: int) -> RingCounters:
        """Return the counters of the buckets from number `oldest` on."""
        return RingCounters({number: each for number, each in self.items() if number >= oldest})

    def twin(self) -> RingCounters:
        """Return a copy that can be counted in without changing this one."""
        return RingCounters({number: list(each) for number, each in self.items()})

    def bucket(self, number: int, start_ms: int, passed: int, borrowed: int) -> Bucket:
        """Return the bucket of this number as a whole."""
        blocked, success, error, rt_sum, rt_min = self.get(number, (0, 0, 0, 0, 0))
        rt_min_ms = rt_min if success or error else None
        return Bucket(start_ms, passed, blocked, success, error, rt_sum, rt_min_ms, borrowed)
