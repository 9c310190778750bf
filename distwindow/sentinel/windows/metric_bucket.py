"""The counters of one bucket. Not locked: code that shares a bucket has to lock it."""

from __future__ import annotations

from .event import Event

# A plain int, because looking up an enum member costs more than the addition.
_RT = int(Event.RT)
_EMPTY = (0,) * len(Event)


class MetricBucket:
    """A sum for each `Event`, and the smallest response time (Sentinel `MetricBucket`).

    `min_rt` starts at `statistic_max_rt` (ms), and only a smaller response time changes it. A
    larger one is only added to the sum. Not locked.
    """

    __slots__ = ("counts", "min_rt", "statistic_max_rt")

    def __init__(self, statistic_max_rt: int) -> None:
        self.statistic_max_rt = statistic_max_rt
        self.min_rt = statistic_max_rt
        self.counts = [0] * len(Event)

    def add(self, event: Event, n: int = 1) -> None:
        """Count `n` of `event`; for `RT`, count one response time of `n` ms."""
        self.counts[event] += n
        if event == _RT and n < self.min_rt:
            self.min_rt = n

    def get(self, event: Event) -> int:
        """Return the sum of `event` since the bucket was made or reset; for `RT` in ms."""
        return self.counts[event]

    def reset(self) -> None:
        """Set all counters to their initial values."""
        # In place, so that reusing a bucket allocates nothing.
        self.counts[:] = _EMPTY
        self.min_rt = self.statistic_max_rt


class ConcurrencyBucket(MetricBucket):
    """A bucket that also has the largest number of concurrent calls (sentinel-golang
    `MetricBucket`).

    Not locked.
    """

    __slots__ = ("max_concurrency",)

    def __init__(self, statistic_max_rt: int) -> None:
        super().__init__(statistic_max_rt)
        self.max_concurrency = 0

    def update_concurrency(self, n: int) -> None:
        """Record that `n` calls are running."""
        if n > self.max_concurrency:
            self.max_concurrency = n

    def reset(self) -> None:
        """Set all counters to their initial values."""
        super().reset()
        self.max_concurrency = 0
