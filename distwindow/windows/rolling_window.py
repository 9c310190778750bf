"""The rolling window of go-zero (`core/collection/rollingwindow.go`).

Buckets are aligned to the time the window was made, not to the epoch, and the current one is
where the last add was: reading moves nothing. Times are ms, as arguments. Not locked.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Generic, Protocol, TypeVar, overload

from ..core.errors import ConfigurationError


class RollingBucket(Protocol):
    """What a rolling window needs of a bucket (go-zero `BucketInterface`)."""

    def add(self, v: float) -> None:
        """Take in one value."""

    def reset(self) -> None:
        """Make the bucket as new."""


class SumBucket:
    """The sum and the count of the values added (go-zero `Bucket`). Not locked."""

    __slots__ = ("count", "sum")

    def __init__(self) -> None:
        self.sum = 0.0
        self.count = 0

    def add(self, v: float) -> None:
        """Take in one value."""
        self.sum += v
        self.count += 1

    def reset(self) -> None:
        """Make the bucket as new."""
        self.sum = 0.0
        self.count = 0


RB = TypeVar("RB", bound=RollingBucket)


class RollingWindow(Generic[RB]):
    """The last `size` buckets of `bucket_ms` each, made at `now` with all of them empty.

    With `ignore_current` the current bucket, which is not complete, is left out of `buckets`, but
    only while the last add (or the start) lies in it: once time has moved on there is nothing in
    the current one, and the newest bucket is a complete one.

    Time that goes back by less than a bucket counts as the present. By a bucket or more it counts
    as everything expired: `buckets` has none and `add` clears all.

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
        for name, value in (("size", size), ("bucket_ms", bucket_ms)):
            # Exactly int: True is no size, and a float would make every index one.
            if type(value) is not int or value <= 0:
                raise ConfigurationError(f"{name} must be a positive int, not {value!r}")
        self.size = size
        self.bucket_ms = bucket_ms
        self.ignore_current = ignore_current
        self.offset = 0
        self.last_time = now
        self._buckets: list[RB] = [new_bucket() for _ in range(size)]

    def add(self, now: int, v: float = 1.0) -> None:
        """Add `v` to the bucket of `now`, after clearing those that time has passed over."""
        span = self._span(now)
        if span:
            self._advance(now, span)
        self._buckets[self.offset].add(v)

    def buckets(self, now: int) -> list[RB]:
        """The live buckets, oldest first (go-zero `Reduce`). Moves nothing."""
        span = self._span(now)
        left_out = 1 if span == 0 and self.ignore_current else span
        first = self.offset + span + 1
        # The slots passed over follow the newest; after them come the live ones, oldest first.
        return [
            self._buckets[slot % self.size] for slot in range(first, first + self.size - left_out)
        ]

    def _span(self, now: int) -> int:
        """How many buckets ago the last add was; `size` when nothing of it is live."""
        elapsed = now - self.last_time
        if elapsed < 0:
            # Go's division goes toward zero: less than a bucket back is no bucket at all.
            return 0 if -elapsed < self.bucket_ms else self.size
        return min(elapsed // self.bucket_ms, self.size)

    def _advance(self, now: int, span: int) -> None:
        for slot in range(self.offset + 1, self.offset + 1 + span):
            self._buckets[slot % self.size].reset()
        self.offset = (self.offset + span) % self.size
        elapsed = now - self.last_time
        # Go's remainder has the sign of its dividend: time that went back aligns upwards.
        rest = elapsed % self.bucket_ms if elapsed >= 0 else -(-elapsed % self.bucket_ms)
        self.last_time = now - rest
