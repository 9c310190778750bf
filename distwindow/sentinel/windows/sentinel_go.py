"""The array of sentinel-golang and the views over it (`core/stat/base`).

There is one array per resource. Each rule reads it through a `SlidingWindowMetric` with an interval
of its own, which stores nothing. Times are arguments, in ms. Nothing here is locked.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from ...errors import ConfigurationError
from .bucket_leap_array import ConcurrencyBucket, Event
from .leap_array import LeapArray, Window, bucket_length_ms

# Upstream's times are unsigned: a negative age or start is a huge number.
_UINT64 = 2**64 - 1


class NotReusableError(ConfigurationError):
    """A view cannot be built over this array (sentinel-golang `GlobalStatisticNonReusableError`).

    The view's interval must divide the array's, and the array's bucket the view's bucket.
    """


class SecondMetric(NamedTuple):
    """The counts of one whole second (sentinel-golang `MetricItem`); `timestamp` in ms.

    `avg_rt` is in whole ms, or the sum if no call completed; `concurrency` is the largest recorded.
    """

    timestamp: int
    passed: int
    blocked: int
    completed: int
    errors: int
    avg_rt: int
    concurrency: int


class EagerBucketLeapArray(LeapArray[ConcurrencyBucket]):
    """A LeapArray that is full from the start (sentinel-golang `LeapArray`, `BucketLeapArray`).

    It differs from Sentinel's, and from `BucketLeapArray`:

    - when it is made at `now`, it has the current window and the next `sample_count - 1`;
    - a window that starts in the future is expired, because its age is unsigned and thus huge;
    - at a time whose slot holds a later window there is no window, and what is added is dropped;
      with one bucket it is added to the later window;
    - at time 0 there is no window.

    Not locked. Raises `ConfigurationError` as `bucket_length_ms` does, and for a negative `now`.
    """

    __slots__ = ("statistic_max_rt",)

    def __init__(
        self, sample_count: int, interval_ms: int, now: int, statistic_max_rt: int = 60000
    ) -> None:
        super().__init__(sample_count, interval_ms)
        if now < 0:
            raise ConfigurationError(f"time must not be negative: {now} ms")
        self.statistic_max_rt = statistic_max_rt
        length = self.window_length_ms
        first = now // length
        for number in range(first, first + sample_count):
            start = number * length
            self._slots[number % sample_count] = Window(start, length, self.new_bucket(start))

    def new_bucket(self, t: int) -> ConcurrencyBucket:
        return ConcurrencyBucket(self.statistic_max_rt)

    def reset_bucket(self, bucket: ConcurrencyBucket, start: int) -> None:
        bucket.reset()

    def overtaken(
        self, t: int, later: Window[ConcurrencyBucket]
    ) -> Window[ConcurrencyBucket] | None:
        """Return None, or with a single bucket `later`."""
        return later if self.sample_count == 1 else None

    def current_window(self, t: int) -> Window[ConcurrencyBucket] | None:
        """Return the window of `t`, reset if it was expired; None if `t` has none. Rotates."""
        return super().current_window(t) if t > 0 else None

    def is_deprecated(self, t: int, window: Window[ConcurrencyBucket]) -> bool:
        """True if `window` is expired at `t`, or begins after `t`."""
        return window.start > t or super().is_deprecated(t, window)

    def windows(self, t: int) -> list[Window[ConcurrencyBucket]]:
        """Return the windows that are not expired and not after `t`; none at 0. Does not rotate."""
        return [w for w in super().windows(t) if w.start <= t] if t > 0 else []

    def add(self, now: int, event: Event, n: int = 1) -> bool:
        """Count `n` of `event` at `now` (for `Event.RT` one time of `n` ms). False if dropped."""
        window = self.current_window(now)
        if window is None:
            return False
        window.value.add(event, n)
        return True

    def update_concurrency(self, now: int, n: int) -> bool:
        """Record that `n` calls are running at `now`. False if dropped."""
        window = self.current_window(now)
        if window is None:
            return False
        window.value.update_concurrency(n)
        return True

    def total(self, now: int, event: Event) -> int:
        """Return the sum of `event` over the window. Rotates."""
        return sum([bucket.counts[event] for bucket in self._rotated(now)])

    def min_rt(self, now: int) -> int:
        """Return the smallest response time in ms; `statistic_max_rt` if there is none. Rotates."""
        smallest = [bucket.min_rt for bucket in self._rotated(now)]
        return min([self.statistic_max_rt, *smallest])

    def max_concurrency(self, now: int) -> int:
        """Return the largest number of concurrent calls. Rotates."""
        return max([bucket.max_concurrency for bucket in self._rotated(now)], default=0)

    def _rotated(self, now: int) -> list[ConcurrencyBucket]:
        self.current_window(now)
        return self.values(now)


class SlidingWindowMetric:
    """A view of the last `interval_ms` of an array (sentinel-golang `SlidingWindowMetric`).

    It stores nothing and never rotates the array. It reads the windows whose start is in
    `start_range(now)`, so never one as old as the whole interval. `sample_count` only determines
    how far back `previous_qps` reads: one of the view's own buckets.

    Raises `ConfigurationError` as `bucket_length_ms` does, and `NotReusableError` for an interval
    or a bucket that does not fit the array. Not locked.
    """

    __slots__ = ("array", "bucket_length_ms", "interval_ms", "sample_count")

    def __init__(self, array: EagerBucketLeapArray, sample_count: int, interval_ms: int) -> None:
        length = bucket_length_ms(sample_count, interval_ms)
        if array.interval_ms % interval_ms:
            raise NotReusableError(
                f"a view of {interval_ms} ms does not divide the array's interval of "
                f"{array.interval_ms} ms"
            )
        if length % array.window_length_ms:
            raise NotReusableError(
                f"a view's bucket of {length} ms is not a multiple of the array's buckets of "
                f"{array.window_length_ms} ms"
            )
        self.array = array
        self.sample_count = sample_count
        self.interval_ms = interval_ms
        self.bucket_length_ms = length

    def start_range(self, now: int) -> tuple[int, int]:
        """Return the first and the last start (ms) of the windows that the view reads at `now`.

        As upstream, the first wraps around to a huge number, and nothing is read, as long as the
        interval would begin before time 0.
        """
        length = self.array.window_length_ms
        end = now - now % length
        return (end - self.interval_ms + length) & _UINT64, end

    def windows(self, now: int) -> list[Window[ConcurrencyBucket]]:
        """Return the windows that the view reads at `now`, in slot order."""
        first, last = self.start_range(now)
        return [w for w in self.array.windows(now) if first <= w.start <= last]

    def total(self, now: int, event: Event) -> int:
        """Return the sum of `event` over the view."""
        return sum([w.value.counts[event] for w in self.windows(now)])

    def qps(self, now: int, event: Event) -> float:
        """Return the sum of `event` per second of the view's interval."""
        return self.total(now, event) / (self.interval_ms / 1000.0)

    def previous_qps(self, now: int, event: Event) -> float:
        """Return `qps` for one of the view's buckets earlier, from the array as it is now."""
        return self.qps(now - self.bucket_length_ms, event)

    def max_of_single_bucket(self, now: int, event: Event) -> int:
        """Return the largest count of `event` in one bucket of the array, at least 0."""
        return max([0, *(w.value.counts[event] for w in self.windows(now))])

    def min_rt(self, now: int) -> int:
        """Return the smallest response time in ms, at least 1; the array's maximum without any."""
        smallest = [w.value.min_rt for w in self.windows(now)]
        return max(1, min([self.array.statistic_max_rt, *smallest]))

    def avg_rt(self, now: int) -> float:
        """Return the ms per completed call; without calls infinite, or NaN if the sum is 0."""
        rt, completed = self.total(now, Event.RT), self.total(now, Event.COMPLETE)
        if completed == 0:
            return math.copysign(math.inf, rt) if rt else math.nan
        return rt / completed

    def max_concurrency(self, now: int) -> int:
        """Return the largest number of concurrent calls."""
        return max([w.value.max_concurrency for w in self.windows(now)], default=0)

    def second_metrics(self, now: int, since: int, until: int) -> list[SecondMetric]:
        """Return the counts per second of the windows with `since <= start < until` (ms), by time.

        The windows must not be expired at `now`, but may be outside the view: like upstream's
        `SecondMetricsOnCondition`, this reads the whole array.
        """
        seconds: dict[int, list[ConcurrencyBucket]] = {}
        for window in self.array.windows(now):
            if since <= window.start < until:
                second = window.start - window.start % 1000
                seconds.setdefault(second, []).append(window.value)
        return [_second(timestamp, seconds[timestamp]) for timestamp in sorted(seconds)]


def _second(timestamp: int, buckets: list[ConcurrencyBucket]) -> SecondMetric:
    def total(event: Event) -> int:
        return sum([bucket.counts[event] for bucket in buckets]) & _UINT64

    completed = total(Event.COMPLETE)
    return SecondMetric(
        timestamp=timestamp,
        passed=total(Event.PASS),
        blocked=total(Event.BLOCK),
        completed=completed,
        errors=total(Event.ERROR),
        avg_rt=total(Event.RT) // (completed or 1),
        concurrency=max([bucket.max_concurrency for bucket in buckets]),
    )
