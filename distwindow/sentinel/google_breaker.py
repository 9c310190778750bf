"""go-zero's adaptive breaker (`core/breaker/googlebreaker.go`), now and as the article has it.

It has no states. Each call is dropped with a probability that grows with the share of calls that
failed in the last window, by the formula for client-side throttling of Google's SRE book:

    drop ratio = (total - protection - k * accepts) / (total + 1)

Times are arguments, in ms, and so is the source of random numbers. Nothing here is locked.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterable
from typing import Generic, NamedTuple

from ..errors import ConfigurationError
from .windows.leap_array import bucket_length_ms
from .windows.rolling_window import RB, RollingWindow, SumBucket

MIN_K = 1.1
"""`k` shrinks to this while all buckets fail."""
PROTECTION = 5
"""So many calls of a window are not counted against the service."""
FORCE_PASS_MS = 1000
"""If no call was let through for longer than this, the next one is."""


class BreakerHistory(NamedTuple):
    """The calls that the breaker knows before it decides.

    `failing_buckets` and `working_buckets` are the lengths of the runs of buckets without a success
    and without a failure, at the newest end.
    """

    accepts: int
    total: int
    failing_buckets: int
    working_buckets: int


def history_of(buckets: Iterable[tuple[int, int, int]]) -> BreakerHistory:
    """Return what buckets (successes, failures, drops), the oldest first, are together."""
    accepts = total = failing = working = 0
    for success, failure, drop in buckets:
        accepts += success
        total += success + failure + drop
        # A bucket with neither (empty, or drops alone) changes no run.
        if failure:
            working = 0
        elif success:
            working += 1
        if success:
            failing = 0
        elif failure:
            failing += 1
    return BreakerHistory(accepts, total, failing, working)


class BreakerBucket:
    """The calls of one bucket: all, successes, failures and drops (go-zero `bucket`)."""

    __slots__ = ("drop", "failure", "success", "sum")

    def __init__(self) -> None:
        self.reset()

    def add(self, v: float) -> None:
        """Count a success if `v` is 1, a failure if 0, and a drop if -1."""
        self.sum += 1
        if v > 0:
            self.success += 1
        elif v < 0:
            self.drop += 1
        else:
            self.failure += 1

    def reset(self) -> None:
        """Remove all counts."""
        self.sum = self.success = self.failure = self.drop = 0


def weighted_k(k: float, failing_buckets: int, buckets: int) -> float:
    """Return the weight of a success: it shrinks from `k` to 1.1 as more buckets fail."""
    return max(k - (k - MIN_K) * failing_buckets / buckets, MIN_K)


def drop_ratio(accepts: float, total: int, weight: float) -> float:
    """Return the share of calls to drop; below 0 if there is no reason to drop any."""
    return ((total - PROTECTION) - weight * accepts) / (total + 1)


class _RollingBreaker(Generic[RB]):
    """Base class of both breakers: the arguments, the window, and the ends of calls."""

    _least_k = 0.0
    _new_bucket: Callable[[], RB]

    def __init__(
        self,
        now: int,
        *,
        k: float = 1.5,
        window_ms: int = 10_000,
        buckets: int = 40,
        draw: Callable[[], float] = random.random,
    ) -> None:
        self.k = checked_k(k, self._least_k)
        self.bucket_count = buckets
        width = bucket_length_ms(buckets, window_ms, ("buckets", "window_ms"))
        self.window: RollingWindow[RB] = RollingWindow(
            buckets, width, now, new_bucket=self._new_bucket
        )
        self.draw = draw

    def mark_success(self, now: int) -> None:
        """Count an admitted call that succeeded."""
        self.window.add(now, 1)

    def mark_failure(self, now: int) -> None:
        """Count an admitted call that failed."""
        self.window.add(now, 0)


class GoogleBreaker(_RollingBreaker[BreakerBucket]):
    """go-zero's breaker as it is now. It is made at `now` (ms).

    The drop ratio counts drops as calls; `k` shrinks with the run of failing buckets; a call is let
    through if none was for more than a second while there was reason to drop; and the ratio shrinks
    with the run of working buckets. `last_pass_ms` is when a call last passed at a ratio above 0.

    `window_ms` has to be divisible by `buckets`. `draw` returns a number in [0, 1). Not locked.
    Raises `ConfigurationError` for other sizes, and unless `k` is finite and at least 1.1.
    """

    _least_k, _new_bucket = MIN_K, BreakerBucket
    last_pass_ms = 0

    def allow(self, now: int) -> bool:
        """Return True if a call may go at `now` (ms); a refusal is counted as a drop."""
        allowed = self._accept(now)
        if not allowed:
            self.window.add(now, -1)
        return allowed

    def history(self, now: int) -> BreakerHistory:
        """Return the counts of the window at `now` (ms)."""
        return history_of((b.success, b.failure, b.drop) for b in self.window.buckets(now))

    def ratio(self, history: BreakerHistory) -> float:
        """Return the drop ratio before it is reduced by the run of working buckets."""
        weight = weighted_k(self.k, history.failing_buckets, self.bucket_count)
        return drop_ratio(history.accepts, history.total, weight)

    def reduced(self, ratio: float, history: BreakerHistory) -> float:
        """Return the probability of a drop: the ratio, less the longer the service has worked."""
        return ratio * ((self.bucket_count - history.working_buckets) / self.bucket_count)

    def _accept(self, now: int) -> bool:
        history = self.history(now)
        ratio = self.ratio(history)
        if ratio <= 0:
            return True
        if self.last_pass_ms > 0 and now - self.last_pass_ms > FORCE_PASS_MS:
            self.last_pass_ms = now
            return True
        if self.draw() < self.reduced(ratio, history):
            return False
        self.last_pass_ms = now
        return True


class ArticleGoogleBreaker(_RollingBreaker[SumBucket]):
    """go-zero's breaker as the article describes it (before February 2024). Made at `now` (ms).

    `k` does not change, nothing forces a pass, and a refusal is not counted. Arguments and errors
    are those of `GoogleBreaker`, but `k` may be any finite number of at least 0. Not locked.
    """

    _new_bucket = SumBucket

    def allow(self, now: int) -> bool:
        """Return True if a call may go at `now` (ms)."""
        ratio = self.ratio(*self.history(now))
        return ratio <= 0 or not self.draw() < ratio

    def history(self, now: int) -> tuple[int, int]:
        """Return the successes and the calls of the window at `now` (ms)."""
        accepts = total = 0
        for bucket in self.window.buckets(now):
            accepts += int(bucket.sum)
            total += bucket.count
        return accepts, total

    def ratio(self, accepts: int, total: int) -> float:
        """Return the probability of a drop, at least 0."""
        return max(0.0, drop_ratio(accepts, total, self.k))


def checked_k(k: float, least: float) -> float:
    """Return `k`; raises `ConfigurationError` unless it is finite and at least `least`."""
    if isinstance(k, bool) or not isinstance(k, (int, float)):
        raise ConfigurationError(f"k must be a number, not {k!r}")
    if not (math.isfinite(k) and k >= least):
        raise ConfigurationError(f"k must be finite and at least {least:g}, not {k!r}")
    return k
