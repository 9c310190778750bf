"""A ring as it was at one moment, and the statistics a person reads from it.

What is recorded follows Sentinel's MetricBucket: pass, block, success, exception (here: error),
response-time sum and minimum.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from .limit import Limit


@dataclass(frozen=True, slots=True)
class Bucket:
    """One bucket's counters. `start` is ms since the epoch; response times are ms."""

    start: int
    passed: int = 0
    blocked: int = 0
    success: int = 0
    error: int = 0
    rt_sum_ms: int = 0
    rt_min_ms: int | None = None


@dataclass(frozen=True, slots=True)
class RingState:
    """Everything a ring holds: the start of its newest bucket, the running totals (see
    `lua/README.md`), the limit it was last called with ("100 leap"), and its buckets, oldest first.
    """

    start: int
    used: int
    closed_total: int
    limit: str
    buckets: tuple[Bucket, ...]


@dataclass(frozen=True, slots=True)
class WindowStats:
    """The live window of one limit on one key."""

    limit: Limit
    passed: int
    blocked: int
    success: int
    error: int
    rt_sum_ms: int
    rt_min_ms: int | None
    remaining: int
    window_ms: int
    """How much time is summed, ms: the interval, and one bucket more when strict."""
    buckets: tuple[Bucket, ...]
    """The non-empty buckets of the window, oldest first."""


@dataclass(frozen=True, slots=True)
class Stats:
    """The live statistics of one key. With several limits, the figures are those of the window
    with the shortest interval, `remaining` is the least, and `windows` has them all.

    `passed` and `blocked` count permits (a refused call of cost 3 blocks 3); `success`, `error`
    and response times are there where `entry` recorded them. `borrowed` is 0, as
    nothing can be borrowed in this version; `concurrency` is None, as it is not recorded.
    """

    key: Any
    limits: tuple[Limit, ...]
    passed: int
    blocked: int
    success: int
    error: int
    borrowed: int
    rt_sum_ms: int
    rt_min_ms: int | None
    avg_rt_ms: float | None
    """Mean response time of the finished calls, ms; None when there was none."""
    concurrency: int | None
    remaining: int
    pass_qps: float
    block_qps: float
    window_ms: int
    buckets: tuple[Bucket, ...]
    now_ms: int
    windows: tuple[WindowStats, ...]


def window_at(state: RingState | None, limit: Limit, now_ms: int) -> WindowStats:
    """The window of `limit` at `now_ms` over what its ring holds.

    Time never goes back: the window ends with the bucket of now or with the newest one, whichever
    is later; a ring ahead of now by more than its window is lost state, and empty.
    """
    width, span = limit.bucket_ms, limit.span
    live: tuple[Bucket, ...] = ()
    if state is not None and state.start - now_ms <= width * span:
        newest = max(now_ms - now_ms % width, state.start)
        live = tuple(b for b in state.buckets if newest - width * span < b.start <= newest)
    passed = sum(bucket.passed for bucket in live)
    return WindowStats(
        limit=limit,
        passed=passed,
        blocked=sum(bucket.blocked for bucket in live),
        success=sum(bucket.success for bucket in live),
        error=sum(bucket.error for bucket in live),
        rt_sum_ms=sum(bucket.rt_sum_ms for bucket in live),
        rt_min_ms=min((b.rt_min_ms for b in live if b.rt_min_ms is not None), default=None),
        remaining=max(0, limit.amount - passed),
        window_ms=width * span,
        buckets=live,
    )


def stats_of(key: Any, windows: tuple[WindowStats, ...], now_ms: int) -> Stats:
    """One key's statistics from its windows, the shortest interval first."""
    first = windows[0]
    done = first.success + first.error
    seconds = first.window_ms / 1000
    return Stats(
        key=key,
        limits=tuple(window.limit for window in windows),
        passed=first.passed,
        blocked=first.blocked,
        success=first.success,
        error=first.error,
        borrowed=0,
        rt_sum_ms=first.rt_sum_ms,
        rt_min_ms=first.rt_min_ms,
        avg_rt_ms=first.rt_sum_ms / done if done else None,
        concurrency=None,
        remaining=min(window.remaining for window in windows),
        pass_qps=first.passed / seconds,
        block_qps=first.blocked / seconds,
        window_ms=first.window_ms,
        buckets=first.buckets,
        now_ms=now_ms,
        windows=windows,
    )
