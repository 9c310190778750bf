"""Contents of a ring at one moment, and their statistics."""

from __future__ import annotations

from dataclasses import dataclass, replace

from .borrowed import BorrowedPermits
from .key import AnyKey
from .limit import Limit


@dataclass(frozen=True, slots=True)
class ShapingStats:
    """The state of a limit that is paced or warms up (docs/howto/pacing.md). The tokens are those
    of Sentinel's WarmUpController (storedTokens, warningToken, maxToken).
    """

    rate: float
    """Permits that one interval admits now: the amount of the limit, or less while it warms up."""
    pace_ms: float | None
    """The time between two calls of cost 1 at this rate, ms; None: the limit is not paced."""
    promised_until_ms: int | None
    """When the call that was admitted last may proceed, ms since the epoch, rounded up; None: all
    that were admitted may proceed now, or the limit is not paced.
    """
    backlog_ms: float
    """How long it is until then, ms; 0 where it is None."""
    stored_tokens: float | None
    """How cold the limit is, in permits: 0 is warm; None: it does not warm up."""
    warning_tokens: float | None
    """Below so many tokens the limit admits its whole amount, in permits."""
    max_tokens: float | None
    """The tokens of a cold limit, in permits."""


@dataclass(frozen=True, slots=True)
class Bucket:
    """The counters of one bucket. `start` is ms since the epoch; response times are ms."""

    start: int
    passed: int = 0
    blocked: int = 0
    success: int = 0
    error: int = 0
    rt_sum_ms: int = 0
    rt_min_ms: int | None = None
    borrowed: int = 0
    """Of `passed`, the permits that were borrowed before the bucket began; of a bucket that has not
    begun, the permits that are borrowed from it.
    """


@dataclass(frozen=True, slots=True)
class RingState:
    """Everything a ring holds: the start of its newest bucket (ms), its totals (`lua/README.md`),
    the amount and bound of the limit last used ("100 leap"), its buckets that are not empty, oldest
    first, and the buckets after the newest one with what is borrowed from them.
    """

    start: int
    used: int
    closed_total: int
    limit: str
    buckets: tuple[Bucket, ...]
    coming: tuple[Bucket, ...] = ()


@dataclass(frozen=True, slots=True)
class WindowStats:
    """The window of one limit on one key."""

    limit: Limit
    passed: int
    blocked: int
    success: int
    error: int
    rt_sum_ms: int
    rt_min_ms: int | None
    remaining: int
    window_ms: int
    """The time that is summed, ms: the interval, and one bucket more when strict."""
    buckets: tuple[Bucket, ...]
    """The buckets of the window that are not empty, oldest first."""
    borrowed: int = 0
    """Permits that priority calls have borrowed: of the window, and of buckets to come."""
    borrowed_coming: int = 0
    """Of these, the permits of buckets that have not begun."""
    shaping: ShapingStats | None = None
    """How a limit that is paced or warms up stands now; None for any other."""


@dataclass(frozen=True, slots=True)
class Stats:
    """The statistics of one key now. With several limits, the figures are those of the window with
    the shortest interval, `remaining` is the smallest of all, and `windows` has every window.

    `passed` and `blocked` count permits (a refused call of cost 3 blocks 3). `success`, `error` and
    response times are recorded by `entry` only. `borrowed` counts the permits that priority calls
    have borrowed, in the window and from buckets that have not begun. `concurrency` is None,
    because this version does not record it.
    """

    key: AnyKey
    limits: tuple[Limit, ...]
    passed: int
    blocked: int
    success: int
    error: int
    borrowed: int
    rt_sum_ms: int
    rt_min_ms: int | None
    avg_rt_ms: float | None
    """The mean response time of the finished calls, ms; None when there was none."""
    concurrency: int | None
    remaining: int
    pass_qps: float
    block_qps: float
    window_ms: int
    buckets: tuple[Bucket, ...]
    now_ms: int
    windows: tuple[WindowStats, ...]


def window_at(
    state: RingState | None, limit: Limit, now_ms: int, shaping: ShapingStats | None = None
) -> WindowStats:
    """Return the window of `limit` at `now_ms` from the state of its ring. `shaping` becomes a part
    of it.

    Time never goes back: the window ends with the bucket of `now_ms` or with the ring's newest one,
    whichever is later. But where the ring is ahead of `now_ms` by more than its window, because the
    clock was set back far, the window is empty: the next counted call empties the ring.
    """
    bucket_ms, span = limit.bucket_ms, limit.span
    live: tuple[Bucket, ...] = ()
    borrowed_coming, peak_excess = 0, 0
    if state is not None and state.start - now_ms <= bucket_ms * span:
        newest = max(now_ms - now_ms % bucket_ms, state.start)
        coming = [b for b in state.coming if b.start > newest]
        # What was borrowed from a bucket that has begun has passed in it, even if nobody opened it.
        entered = [replace(b, passed=b.borrowed) for b in state.coming if b.start <= newest]
        begun = (*state.buckets, *entered)
        live = tuple(b for b in begun if newest - bucket_ms * span < b.start <= newest)
        if coming:
            borrowed_coming = sum(bucket.borrowed for bucket in coming)
            peak_excess = BorrowedPermits(
                {b.start // bucket_ms: b.borrowed for b in coming},
                {b.start // bucket_ms: b.passed for b in live if b.start < newest},
                newest // bucket_ms,
                span,
            ).peak_excess
    passed = sum(bucket.passed for bucket in live)
    return WindowStats(
        limit=limit,
        passed=passed,
        blocked=sum(bucket.blocked for bucket in live),
        success=sum(bucket.success for bucket in live),
        error=sum(bucket.error for bucket in live),
        rt_sum_ms=sum(bucket.rt_sum_ms for bucket in live),
        rt_min_ms=min((b.rt_min_ms for b in live if b.rt_min_ms is not None), default=None),
        remaining=max(0, limit.amount - passed - peak_excess),
        window_ms=bucket_ms * span,
        buckets=live,
        borrowed=borrowed_coming + sum(bucket.borrowed for bucket in live),
        borrowed_coming=borrowed_coming,
        shaping=shaping,
    )


def stats_of(key: AnyKey, windows: tuple[WindowStats, ...], now_ms: int) -> Stats:
    """Return the statistics of `key` from its windows, the shortest interval first."""
    first = windows[0]
    finished = first.success + first.error
    seconds = first.window_ms / 1000
    return Stats(
        key=key,
        limits=tuple(window.limit for window in windows),
        passed=first.passed,
        blocked=first.blocked,
        success=first.success,
        error=first.error,
        borrowed=first.borrowed,
        rt_sum_ms=first.rt_sum_ms,
        rt_min_ms=first.rt_min_ms,
        avg_rt_ms=first.rt_sum_ms / finished if finished else None,
        concurrency=None,
        remaining=min(window.remaining for window in windows),
        pass_qps=first.passed / seconds,
        block_qps=first.blocked / seconds,
        window_ms=first.window_ms,
        buckets=first.buckets,
        now_ms=now_ms,
        windows=windows,
    )
