"""A LeapArray of metric buckets and its reads (Sentinel `BucketLeapArray` and `ArrayMetric`)."""

from __future__ import annotations

from typing import NamedTuple

from ..core.errors import ConfigurationError
from .event import Event
from .leap_array import LeapArray, Window
from .metric_bucket import MetricBucket


class MetricNode(NamedTuple):
    """One window as a report shows it (Sentinel `MetricNode`); `timestamp` is its start in ms.

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

    Every call that takes `now` (ms) first brings the current bucket up to date, then sums all
    windows that are not expired, the current, partial one included. So what is counted reaches
    back from `now` by at least the interval less one bucket, and by less than the interval.

    If time goes back by an interval or more, what is added there is lost, as in Sentinel. Not
    locked. `statistic_max_rt` (ms) is where the smallest response time starts.
    """

    __slots__ = ("statistic_max_rt",)

    def __init__(self, sample_count: int, interval_ms: int, statistic_max_rt: int = 5000) -> None:
        super().__init__(sample_count, interval_ms)
        self.statistic_max_rt = statistic_max_rt

    def new_bucket(self, t: int) -> MetricBucket:
        """An empty bucket."""
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
        """The sum of `event` over the window."""
        return sum([bucket.counts[event] for bucket in self._rotated(now)])

    def average(self, now: int, event: Event) -> float:
        """The sum of `event` per second of the interval (Sentinel's QPS)."""
        return self.total(now, event) / self.interval_sec

    def min_rt(self, now: int) -> int:
        """The smallest response time in ms, never below 1; `statistic_max_rt` without any."""
        least = [bucket.min_rt for bucket in self._rotated(now)]
        return max(1, min(least, default=self.statistic_max_rt))

    def max_success(self, now: int) -> int:
        """The most successes in one bucket, never below 1."""
        return max([1, *(bucket.counts[Event.SUCCESS] for bucket in self._rotated(now))])

    def previous_pass(self, now: int) -> int:
        """The passes of the bucket before the current one; 0 without one.

        Raises `ConfigurationError` where `previous_window` does.
        """
        return self._previous(now, Event.PASS)

    def previous_block(self, now: int) -> int:
        """The blocks of the bucket before the current one; 0 without one.

        Raises `ConfigurationError` where `previous_window` does.
        """
        return self._previous(now, Event.BLOCK)

    def current_pass(self, now: int) -> int:
        """The passes of the current bucket. Raises `ConfigurationError` for a negative `now`."""
        window = self.current_window(now)
        if window is None:
            raise _no_window(now)
        return window.value.counts[Event.PASS]

    def window_pass(self, t: int) -> int:
        """The passes of the window that `t` lies in; 0 if it is not there. Does not rotate."""
        bucket = self.window_value(t)
        return 0 if bucket is None else bucket.counts[Event.PASS]

    def details(self, now: int) -> list[MetricNode]:
        """Each window that is not expired, in slot order."""
        self.current_window(now)
        return [_node(window) for window in self.windows(now)]

    def waiting(self, now: int) -> int:
        """Passes borrowed from windows to come: always 0, this array lends none."""
        return 0

    def add_waiting(self, t: int, n: int) -> None:
        """Borrow from the window of `t`: this array lends none, so `NotImplementedError`."""
        raise NotImplementedError("only an occupiable array lends from windows to come")

    def _rotated(self, now: int) -> list[MetricBucket]:
        self.current_window(now)
        return self.values(now)

    def _previous(self, now: int, event: Event) -> int:
        self.current_window(now)
        window = self.previous_window(now, now)
        return 0 if window is None else window.value.counts[event]


def _no_window(t: int) -> ConfigurationError:
    return ConfigurationError(f"there is no window at {t} ms, before time 0")


def _node(window: Window[MetricBucket]) -> MetricNode:
    counts = window.value.counts
    success, rt = counts[Event.SUCCESS], counts[Event.RT]
    if success:
        # Integer division as Java does it, toward zero.
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
