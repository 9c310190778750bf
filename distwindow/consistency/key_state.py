"""What this process knows of one key: permits it may spend, a refusal it remembers, and what it has
counted and not yet told the store.

    left, until       permits that may be spent here, and until when
    denied, ...       the least cost that is refused here, and until when
    start .. rt_min   what has been counted in the present bucket
    pending           what was counted in buckets before, oldest first
    flight            what has been sent, and whether it arrived is not known yet

Moments are monotonic seconds of this process; bucket starts are the store's ms. `offset_ms` turns
one into the other, as well as the last reply told: never ahead of the store's clock.

Two locks guard a cell. `lock` is a plain one, taken on every call, and no code that holds it calls
anything: only there can a signal handler run, and one that calls the limiter would wait for itself.
`Cells.slow` is re-entrant, and guards what happens once a bucket.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from threading import Lock
from typing import Any, NamedTuple

from ..core.limit import Limit
from ..core.stats import Bucket

NEVER = float("inf")


class KeyState:
    """One key's state. Its owner locks it."""

    __slots__ = (
        "blocked",
        "bucket_ends_at",
        "bucket_start",
        "charges",
        "count_bucket_ms",
        "dirty",
        "error",
        "in_flight",
        "key",
        "left_in_store",
        "limit",
        "longest_ms",
        "offset_ms",
        "passed",
        "pending",
        "permits_left",
        "permits_until",
        "refill_below",
        "refusal",
        "refused_cost",
        "refused_until",
        "reset_at",
        "rt_min",
        "rt_sum",
        "success",
    )  # fmt: skip

    def __init__(self, key: Any, charges: Any, limits: Sequence[Limit], offset_ms: float) -> None:
        self.key = key
        self.charges = charges
        """What one permit counts where: for the owner, who speaks to the store."""
        self.count_bucket_ms = math.gcd(*(limit.bucket_ms for limit in limits))
        """Width of the buckets that counts are kept by, ms: no bucket of a limit cuts one."""
        self.longest_ms = max(limit.span * limit.bucket_ms for limit in limits)
        """After so long nothing counts any more."""
        self.offset_ms = offset_ms
        self.permits_left = 0
        self.permits_until = 0.0
        self.refill_below = -1
        """At so many left, there should soon be more."""
        self.limit = limits[0]
        """What binds, as the last reply said; `beyond` permits are left there besides ours."""
        self.left_in_store = 0
        self.reset_at = 0.0
        """When its window is empty if nobody calls."""
        self.refused_cost = 0
        self.refused_until = 0.0
        self.refusal: CachedRefusal | None = None
        self.bucket_start = 0
        self.bucket_ends_at = 0.0
        """When the present bucket ends."""
        self.passed = self.blocked = self.success = self.error = self.rt_sum = self.rt_min = 0
        self.pending: tuple[Bucket, ...] = ()
        self.in_flight: Any = None
        self.dirty = False
        """Its owner knows that there is something to tell."""

    def has_counts(self) -> bool:
        """Is there anything that the store has not been told?"""
        return bool(
            self.passed or self.blocked or self.success or self.error
            or self.pending or self.in_flight is not None
        )  # fmt: skip

    def update_clock_offset(self, now_ms: int, sent_at: float, now: float) -> None:
        """The store's clock said `now_ms` at some moment between `sent_at` and `now`. The best that
        was known stays, unless that can be true no more: replies are late at times.
        """
        least, most = now_ms - now * 1000, now_ms + 1 - sent_at * 1000
        if not least <= self.offset_ms <= most:
            self.offset_ms = least

    def open_bucket(self, lock: Lock, now: float) -> bool:
        """Make the present bucket that of `now`, and put what was counted before to `pending`; has
        it changed? Under `slow`.
        """
        now_ms = int(now * 1000 + self.offset_ms)
        start = now_ms - now_ms % self.count_bucket_ms
        if start <= self.bucket_start and now < self.bucket_ends_at:
            return False
        # Time never goes back, unless by a whole window: then the store's clock was set.
        if self.bucket_start - start <= self.longest_ms:
            start = max(start, self.bucket_start)
        turns = max(now + 0.0005, (start + self.count_bucket_ms - self.offset_ms) / 1000)
        self._move_to_pending(lock, start, turns)
        return True

    def close_bucket(self, lock: Lock) -> None:
        """Put what was counted in the present bucket to `pending`, too. Under `slow`."""
        self._move_to_pending(lock, self.bucket_start, self.bucket_ends_at)

    def on_bucket_closed(self, start: int, passed: int) -> None:
        """So many were passed in the bucket of `start`: for who keeps account of that. Told twice
        where a signal handler raises right after.
        """

    def correct_clock(self, lock: Lock, offset_ms: float, now: float) -> None:
        """The store's clock is another than was thought: move what was counted, and make the
        present bucket that of `now`. Under `slow`.
        """
        self.close_bucket(lock)
        shift = round(offset_ms - self.offset_ms)
        # Rather late than early: what is ahead of the store's newest bucket counts in that.
        starts = [seen.start + shift + self.count_bucket_ms - 1 for seen in self.pending]
        pending = tuple(
            replace(seen, start=start - start % self.count_bucket_ms)
            for seen, start in zip(self.pending, starts, strict=True)
        )
        now_ms = int(now * 1000 + offset_ms)
        start = now_ms - now_ms % self.count_bucket_ms
        turns = max(now + 0.0005, (start + self.count_bucket_ms - offset_ms) / 1000)
        with lock:  # other threads go on counting: they must find a bucket at any moment
            self.offset_ms, self.pending = offset_ms, pending
            self.bucket_start, self.bucket_ends_at = start, turns

    def _move_to_pending(self, lock: Lock, start: int, turns: float) -> None:
        """What was counted goes from the counters to `pending` in one step, without a call in it:
        a signal handler that raises comes before it or after it (`core/interrupts.py`).
        """
        with lock:
            before = self.bucket_start
            passed, blocked, success = self.passed, self.blocked, self.success
            error, rt_sum, rt_min = self.error, self.rt_sum, self.rt_min
        pending = self.pending
        if passed or blocked or success or error:
            if passed:
                self.on_bucket_closed(before, passed)
            least = rt_min if success or error else None
            seen = Bucket(before, passed, blocked, success, error, rt_sum, least)
            # While the store is away, what is out of the window is not kept for it.
            oldest = before - self.longest_ms
            pending = (*[b for b in pending if b.start > oldest], seen)
        with lock:
            # Less what was seen, as other threads have gone on counting.
            self.passed -= passed
            self.blocked -= blocked
            self.success -= success
            self.error -= error
            self.rt_sum -= rt_sum
            self.bucket_start, self.bucket_ends_at = start, turns
            self.pending = pending


class CachedRefusal(NamedTuple):
    """A refusal, as it will be repeated; moments are monotonic seconds."""

    limit: Limit
    remaining: int
    retry_at: float
    reset_at: float
    """Never before `retry_at`."""


def merge_buckets(buckets: tuple[Bucket, ...], width: int) -> tuple[Bucket, ...]:
    """The same counts in buckets of `width`, a multiple of the present one; oldest first."""
    sums: dict[int, Bucket] = {}
    for seen in buckets:
        start = seen.start - seen.start % width
        known = sums.get(start)
        sums[start] = Bucket(start, *_counters_of(seen)) if known is None else _sum_of(known, seen)
    return tuple(sums[start] for start in sorted(sums))


def _counters_of(b: Bucket) -> tuple[int, int, int, int, int, int | None]:
    return b.passed, b.blocked, b.success, b.error, b.rt_sum_ms, b.rt_min_ms


def _sum_of(one: Bucket, two: Bucket) -> Bucket:
    least = [rt for rt in (one.rt_min_ms, two.rt_min_ms) if rt is not None]
    return Bucket(
        one.start,
        one.passed + two.passed,
        one.blocked + two.blocked,
        one.success + two.success,
        one.error + two.error,
        one.rt_sum_ms + two.rt_sum_ms,
        min(least) if least else None,
    )
