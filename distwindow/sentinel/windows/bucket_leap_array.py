"""A LeapArray of metric buckets, and reading it (Sentinel `BucketLeapArray`, `ArrayMetric`)."""

from __future__ import annotations

from typing import NamedTuple

from ...errors import ConfigurationError
from .event import Event
from .leap_array import LeapArray, Window
from .metric_bucket import MetricBucket


class MetricNode(NamedTuple):
    """The counts of one window (Sentinel `MetricNode`); `timestamp` is its start in ms.

    `rt` is the average response time in whole ms, or the sum if nothing succeeded.
    """

    timestamp: int
    passed: int
    blocked: int
    success: int
    exception: int
    rt: int
    occupied_pass: int


class BucketLeapArray(LeapArray[MetricBucket]):
    """Counts of the last `interval_ms`, in `sample_count` buckets.

    Every method that takes `now` (ms) first rotates to the current bucket, then sums all windows
    that are not expired, including the current, incomplete one. So the sum covers at least the
    interval less one bucket before `now`, and less than the interval.

    If time goes back by an interval or more, what is added then is lost, as in Sentinel. Not
    locked. `statistic_max_rt` (ms) is the initial value of the smallest response time.
    """

    __slots__ = ("statistic_max_rt",)

    def __init__(self, sample_count: int, interval_ms: int, statistic_max_rt: int = 5000) -> None:
        super().__init__(sample_count, interval_ms)
        self.statistic_max_rt = statistic_max_rt

    def new_bucket(self, t: int) -> MetricBucket:
        """Return an empty bucket."""
        return MetricBucket(self.statistic_max_rt)

    def reset_bucket(self, bucket: MetricBucket, start: int) -> None:
        """Empty `bucket`."""
        bucket.reset()

    def add(self, now: int, event: Event, n: int = 1) -> None:
        """Count `n` of `event` at `now`; for `Event.RT`, one response time of `n` ms.

        Raises `ConfigurationError` for a negative `now`.
        """
        window = self.current_window(now)
        if window is None:
            raise _no_window(now)
        window.value.add(event, n)

    def total(self, now: int, event: Event) -> int:
        """Return the sum of `event` over the window."""
        return sum([bucket.counts[event] for bucket in self._rotated(now)])

    def average(self, now: int, event: Event) -> float:
        """Return the sum of `event` per second of the interval (Sentinel's QPS)."""
        return self.total(now, event) / self.interval_sec

    def min_rt(self, now: int) -> int:
        """Return the smallest response time in ms, at least 1; `statistic_max_rt` without any."""
        smallest = [bucket.min_rt for bucket in self._rotated(now)]
        return max(1, min(smallest, default=self.statistic_max_rt))

    def max_success(self, now: int) -> int:
        """Return the most successes in one bucket, at least 1."""
        return max([1, *(bucket.counts[Event.SUCCESS] for bucket in self._rotated(now))])

    def previous_pass(self, now: int) -> int:
        """Return the passes of the bucket before the current one; 0 if there is none.

        Raises `ConfigurationError` where `previous_window` does.
        """
        return self._previous(now, Event.PASS)

    def previous_block(self, now: int) -> int:
        """Return the blocks of the bucket before the current one; 0 if there is none.

        Raises `ConfigurationError` where `previous_window` does.
        """
        return self._previous(now, Event.BLOCK)

    def current_pass(self, now: int) -> int:
        """Return the passes of the current bucket; `ConfigurationError` for a negative `now`."""
        window = self.current_window(now)
        if window is None:
            raise _no_window(now)
        return window.value.counts[Event.PASS]

    def window_pass(self, t: int) -> int:
        """Return the passes of the window of `t`; 0 if it is not there. Does not rotate."""
        bucket = self.window_value(t)
        return 0 if bucket is None else bucket.counts[Event.PASS]

    def details(self, now: int) -> list[MetricNode]:
        """Return the counts of each window that is not expired, in slot order."""
        self.current_window(now)
        return [_node(window) for window in self.windows(now)]

    def waiting(self, now: int) -> int:
        """Return 0: this array does not lend passes from later windows."""
        return 0

    def add_waiting(self, t: int, n: int) -> None:
        """Raise `NotImplementedError`: this array does not lend passes from later windows."""
        raise NotImplementedError("only an occupiable array lends passes from later windows")

    def _rotated(self, now: int) -> list[MetricBucket]:
        self.current_window(now)
        return self.values(now)

    def _previous(self, now: int, event: Event) -> int:
        self.current_window(now)
        window = self.previous_window(now, now)
        return 0 if window is None else window.value.counts[event]


def _no_window(t: int) -> ConfigurationError:
    return ConfigurationError(f"there is no window at {t} ms, because that is before time 0")


def _node(window: Window[MetricBucket]) -> MetricNode:
    counts = window.value.counts
    success, rt = counts[Event.SUCCESS], counts[Event.RT]
    if success:
        # Java's integer division rounds toward zero.
        rt = abs(rt) // abs(success) * (1 if (rt < 0) == (success < 0) else -1)
    return MetricNode(
        timestamp=window.start,
        passed=counts[Event.PASS],
        blocked=counts[Event.BLOCK],
        success=success,
        exception=counts[Event.EXCEPTION],
        rt=rt,
        occupied_pass=counts[Event.OCCUPIED_PASS],
    )
