"""The rolling window of go-zero (`core/collection/rollingwindow.go`).

Buckets are aligned to the time when the window was made, not to the epoch. The current bucket is
that of the last addition, and reading does not change it. Times are arguments, in ms. Not locked.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Generic, Protocol, TypeVar, overload

from ...errors import ConfigurationError
from .leap_array import check_positive


class RollingBucket(Protocol):
    """The methods that a rolling window calls on a bucket (go-zero `BucketInterface`)."""

    def add(self, v: float) -> None:
        """Add one value."""

    def reset(self) -> None:
        """Remove all values."""


class SumBucket:
    """The sum and the count of the values added (go-zero `Bucket`). Not locked."""

    __slots__ = ("count", "sum")

    def __init__(self) -> None:
        self.sum = 0.0
        self.count = 0

    def add(self, v: float) -> None:
        """Add one value."""
        self.sum += v
        self.count += 1

    def reset(self) -> None:
        """Remove all values."""
        self.sum = 0.0
        self.count = 0


RB = TypeVar("RB", bound=RollingBucket)


class RollingWindow(Generic[RB]):
    """The last `size` buckets of `bucket_ms` each. At `now` (ms), when it is made, all are empty.

    With `ignore_current` the current, incomplete bucket is left out of `buckets`, but only while
    the last addition (or the start) is in it: later the current bucket is empty, and the newest
    bucket with values is complete.

    If time goes back by less than a bucket, it is treated as unchanged. If it goes back by a bucket
    or more, everything is treated as expired: `buckets` returns none and `add` clears all.

    `offset` is the slot of the newest bucket, `last_time` its start in ms. Not locked. Raises
    `ConfigurationError` unless `size` and `bucket_ms` are positive ints.
    """

    __slots__ = ("_buckets", "bucket_ms", "ignore_current", "last_time", "offset", "size")

    @overload
    def __init__(
        self: RollingWindow[SumBucket],
        size: int,
        bucket_ms: int,
        now: int,
        *,
        ignore_current: bool = False,
    ) -> None: ...

    @overload
    def __init__(
        self,
        size: int,
        bucket_ms: int,
        now: int,
        *,
        ignore_current: bool = False,
        new_bucket: Callable[[], RB],
    ) -> None: ...

    def __init__(
        self,
        size: int,
        bucket_ms: int,
        now: int,
        *,
        ignore_current: bool = False,
        new_bucket: Callable[[], Any] = SumBucket,
    ) -> None:
        check_positive(size=size, bucket_ms=bucket_ms)
        self.size = size
        self.bucket_ms = bucket_ms
        self.ignore_current = ignore_current
        self.offset = 0
        self.last_time = now
        self._buckets: list[RB] = [new_bucket() for _ in range(size)]

    def add(self, now: int, v: float = 1.0) -> None:
        """Add `v` to the bucket of `now`, after clearing the buckets since the last addition."""
        span = self._span(now)
        if span:
            self._advance(now, span)
        self._buckets[self.offset].add(v)

    def buckets(self, now: int) -> list[RB]:
        """Return the buckets that are not expired, oldest first (go-zero `Reduce`)."""
        span = self._span(now)
        left_out = 1 if span == 0 and self.ignore_current else span
        first = self.offset + span + 1
        # Behind the newest bucket are `span` expired ones, then the others, oldest first.
        return [
            self._buckets[slot % self.size] for slot in range(first, first + self.size - left_out)
        ]

    def _span(self, now: int) -> int:
        """Return how many buckets ago the last addition was; `size` if all buckets are expired."""
        elapsed = now - self.last_time
        if elapsed < 0:
            # Go's division rounds toward zero: less than a bucket back is 0 buckets.
            return 0 if -elapsed < self.bucket_ms else self.size
        return min(elapsed // self.bucket_ms, self.size)

    def _advance(self, now: int, span: int) -> None:
        for slot in range(self.offset + 1, self.offset + 1 + span):
            self._buckets[slot % self.size].reset()
        self.offset = (self.offset + span) % self.size
        elapsed = now - self.last_time
        # Go's remainder has the sign of its dividend: a time that went back is rounded up.
        rest = elapsed % self.bucket_ms if elapsed >= 0 else -(-elapsed % self.bucket_ms)
        self.last_time = now - rest


class FixedWindow:
    """At most `threshold` calls from the start of a window until it is over.

    A window begins at `start_time` (ms; the first at `now`) and is over when strictly more than
    `interval_ms` have passed; the next call then begins the next window at its own time. `counter`
    counts refused calls, too. Twice the threshold can pass within an instant, at the end of one
    window and the start of the next. This is the textbook algorithm (the introduction to
    sentinel-golang's statistics); do not limit with it.

    Not locked. Raises `ConfigurationError` unless `threshold` is an int of at least 0 and
    `interval_ms` a positive int.
    """

    __slots__ = ("counter", "interval_ms", "start_time", "threshold")

    def __init__(self, threshold: int, interval_ms: int, now: int) -> None:
        # Not isinstance: True is not a number of calls.
        if type(threshold) is not int or threshold < 0:
            raise ConfigurationError(f"threshold must be an int of at least 0, not {threshold!r}")
        check_positive(interval_ms=interval_ms)
        self.threshold = threshold
        self.interval_ms = interval_ms
        self.start_time = now
        self.counter = 0

    def try_acquire(self, now: int) -> bool:
        """Count one call at `now` (ms). True if it is admitted."""
        if now - self.start_time > self.interval_ms:
            self.start_time = now
            self.counter = 0
        self.counter += 1
        return self.counter <= self.threshold
