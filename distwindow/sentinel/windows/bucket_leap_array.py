"""A LeapArray of metric buckets, and reading it (Sentinel `BucketLeapArray`, `ArrayMetric`)."""

from __future__ import annotations

from enum import IntEnum
from typing import NamedTuple

from ...errors import ConfigurationError
from .leap_array import LeapArray, Window


class Event(IntEnum):
    """A type of event: Sentinel's `MetricEvent`, with sentinel-golang's names as aliases.

    `RT` is a response time in ms: a bucket has the sum and the smallest.
    `OCCUPIED_PASS` is a pass borrowed from a later bucket; sentinel-golang has no such event.
    """

    PASS = 0
    BLOCK = 1
    EXCEPTION = 2
    SUCCESS = 3
    RT = 4
    OCCUPIED_PASS = 5

    ERROR = 2
    COMPLETE = 3


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
        super().reset()
        self.max_concurrency = 0


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
        return MetricBucket(self.statistic_max_rt)

    def reset_bucket(self, bucket: MetricBucket, start: int) -> None:
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


class FutureBucketLeapArray(BucketLeapArray):
    """Counts of windows that have not begun: a window is expired as soon as `t >= start`.

    This is the borrow array of an `OccupiableLeapArray`. Not locked.
    """

    __slots__ = ()

    def horizon(self, t: int) -> int:
        """Return the earliest start that is not expired at `t`: the ms after it."""
        return t + 1


class OccupiableLeapArray(BucketLeapArray):
    """A `BucketLeapArray` whose windows begin with the passes that were lent from them before.

    `borrow_array` has what is lent from windows to come. It is read without rotating when a window
    of this array is made or reset, and is never cleared, as in Sentinel: a window outside the array
    (`overtaken`) gets the same passes once more. Not locked.

    Passes that were promised lie in an array of their own, the borrow array, until its time:

        t = 1100, n = 2, L = 500        1000      1500      2000
                                          |---------|---------|
        main array                        |  7      |
        borrow array                                |  3      |

    The first rotating operation at or after 1500 makes the main array's window of 1500, and copies
    the 3 into it. If none comes before 2000, the 3 are never counted: Sentinel loses them, and so
    does this class. The fleet's borrowing does not (`docs/sentinel.md`).
    """

    __slots__ = ("borrow_array",)

    def __init__(self, sample_count: int, interval_ms: int, statistic_max_rt: int = 5000) -> None:
        super().__init__(sample_count, interval_ms, statistic_max_rt)
        self.borrow_array = FutureBucketLeapArray(sample_count, interval_ms, statistic_max_rt)

    def new_bucket(self, t: int) -> MetricBucket:
        """Return a bucket with the counts that were lent from the window of `t`."""
        bucket = super().new_bucket(t)
        lent = self.borrow_array.window_value(t)
        if lent is not None:
            bucket.counts[:] = lent.counts
        return bucket

    def reset_bucket(self, bucket: MetricBucket, start: int) -> None:
        """Empty `bucket`, and count the passes that were lent from the window at `start`."""
        super().reset_bucket(bucket, start)
        lent = self.borrow_array.window_value(start)
        if lent is not None:
            bucket.add(Event.PASS, lent.get(Event.PASS))

    def waiting(self, now: int) -> int:
        """Return the passes lent from windows after `now`. Rotates the borrow array only."""
        return self.borrow_array.total(now, Event.PASS)

    def add_waiting(self, t: int, n: int) -> None:
        """Lend `n` passes from the window of `t`.

        They count as waiting until that window begins, and as passes from the first rotating
        operation in it. If the window of `t` exists already, they are counted nowhere. It replaces
        what was lent one interval before. Raises `ConfigurationError` for a negative `t`.
        """
        self.borrow_array.add(t, Event.PASS, n)
