"""Minute views: what the entries of one key did in the last minute, by second.

One view is of all entries, one of each origin that has called, and one of the origins for which
there was no room. This is the specification of `lua/view_flush.lua`. The counters are those of
Sentinel's minute counter (StatisticNode), and an origin's view is its origin node
(ClusterNode.getOrCreateOriginNode), of the whole fleet.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from ..ring.key import AnyKey
from ..ring.ring import MAX_TOTAL
from ..ring.stats import Bucket
from ..runtime.options import OTHER_ORIGINS

SECONDS = 60
"""The number of seconds of a view."""

ALL_ORIGINS = ""
"""The origin under which the view of all entries is stored: no origin is empty."""


ViewCounts = Mapping[str, tuple[Bucket, ...]]
"""Counts by origin and second; `Bucket.start` is a whole second, ms since the epoch."""


@dataclass(frozen=True, slots=True)
class MinuteStats:
    """Statistics of entries over the last minute: all entries of a key, or those of one origin.

    `passed` and `blocked` count permits; `success`, `error` and response times are of the calls
    that ended. Calls without an entry are not in it.
    """

    key: AnyKey
    origin: str | None
    """The origin, or `OTHER_ORIGINS`; None for all entries of the key."""
    passed: int
    blocked: int
    success: int
    error: int
    rt_sum_ms: int
    rt_min_ms: int | None
    avg_rt_ms: float | None
    """The mean response time of the calls that ended, ms; None when there was none."""
    seconds: tuple[Bucket, ...]
    """The seconds in which anything happened, oldest first. The present one is among them."""
    now_ms: int


def minute_stats(
    key: AnyKey, origin: str | None, buckets: Iterable[Bucket], now_ms: int
) -> MinuteStats:
    """Return the statistics of a view that holds these seconds."""
    seconds = tuple(sorted(buckets, key=lambda bucket: bucket.start))
    finished = sum(b.success + b.error for b in seconds)
    rt_sum_ms = sum(b.rt_sum_ms for b in seconds)
    return MinuteStats(
        key=key,
        origin=origin,
        passed=sum(b.passed for b in seconds),
        blocked=sum(b.blocked for b in seconds),
        success=sum(b.success for b in seconds),
        error=sum(b.error for b in seconds),
        rt_sum_ms=rt_sum_ms,
        rt_min_ms=min((b.rt_min_ms for b in seconds if b.rt_min_ms is not None), default=None),
        avg_rt_ms=rt_sum_ms / finished if finished else None,
        seconds=seconds,
        now_ms=now_ms,
    )


class MinuteViews:
    """The views of one key. Times are ms since the epoch."""

    __slots__ = ("_views",)

    def __init__(self) -> None:
        self._views: dict[str, dict[int, Bucket]] = {}
        """By origin and second."""

    @property
    def expires_at_ms(self) -> int:
        """When the last minute holds nothing of them."""
        return (max(self._views.get(ALL_ORIGINS, ()), default=0) + SECONDS) * 1000

    def newest_second(self, now: int) -> int:
        """Return the second that is the newest at `now`: time never goes back. But views that are
        ahead of `now` by more than a minute, because the clock was set back far, count no more.
        """
        second = now // 1000
        stored = max(self._views.get(ALL_ORIGINS, ()), default=second)
        return second if self._is_far_ahead(now) else max(second, stored)

    def live(self, now: int) -> dict[str, tuple[Bucket, ...]]:
        """Return the views that hold anything of the last minute, by origin."""
        if self._is_far_ahead(now):
            return {}
        oldest = self.newest_second(now) - SECONDS
        views = {
            origin: tuple(bucket for second, bucket in sorted(view.items()) if second > oldest)
            for origin, view in self._views.items()
        }
        return {origin: buckets for origin, buckets in views.items() if buckets}

    def live_counts(self, counts: ViewCounts, now: int) -> dict[str, dict[int, Bucket]]:
        """Return what `add` would take of `counts`: a second that is over a minute old is dropped,
        and one ahead of the newest counts in the newest.
        """
        newest = self.newest_second(now)
        taken: dict[str, dict[int, Bucket]] = {}
        for origin, buckets in counts.items():
            for bucket in buckets:
                second = min(newest, bucket.start // 1000)
                if second > newest - SECONDS:
                    _add(taken.setdefault(origin, {}), second, bucket)
        return taken

    def add(self, counts: ViewCounts, max_origins: int, now: int) -> None:
        """Add `counts`. `ALL_ORIGINS` in it are the entries without an origin. An origin that has
        no view gets one if fewer than `max_origins` were called in the last minute.
        """
        added = self.live_counts(counts, now)
        newest = self.newest_second(now)
        if self._is_far_ahead(now):
            self._views = {}
        placed: set[str] = set()
        for origin, seconds in added.items():
            name = origin
            if origin not in (ALL_ORIGINS, OTHER_ORIGINS):
                if self._is_live(origin, newest) or self._has_room(max_origins, newest, placed):
                    placed.add(origin)
                    self._views.setdefault(origin, {})
                else:
                    name = OTHER_ORIGINS
            self._add_to_view(ALL_ORIGINS, seconds, newest)
            if name != ALL_ORIGINS:
                self._add_to_view(name, seconds, newest)

    def _add_to_view(self, name: str, seconds: dict[int, Bucket], newest: int) -> None:
        """Add these seconds. Where one is new to the view, drop what is over a minute old."""
        view = self._views.setdefault(name, {})
        is_opened = any(second not in view for second in seconds)
        for second, bucket in seconds.items():
            _add(view, second, bucket)
        if is_opened:
            self._views[name] = {s: b for s, b in view.items() if s > newest - SECONDS}

    def _is_live(self, origin: str, newest: int) -> bool:
        return max(self._views.get(origin, ()), default=0) > newest - SECONDS

    def _has_room(self, max_origins: int, newest: int, placed: set[str]) -> bool:
        """True if one more origin gets a view; origins not called in the last minute make room."""
        named = self._views.keys() - {ALL_ORIGINS, OTHER_ORIGINS}
        if len(named) >= max_origins:
            for origin in named - placed:
                if not self._is_live(origin, newest):
                    del self._views[origin]
                    named.remove(origin)
        return len(named) < max_origins

    def _is_far_ahead(self, now: int) -> bool:
        stored = self._views.get(ALL_ORIGINS)
        return stored is not None and max(stored, default=0) - now // 1000 > SECONDS


def _add(view: dict[int, Bucket], second: int, added: Bucket) -> None:
    """Add `added` to the bucket of `second`. No total grows beyond MAX_TOTAL."""
    before = view.get(second, Bucket(second * 1000))
    # A second in which no call ended has no least response time.
    least = [b.rt_min_ms or 0 for b in (before, added) if b.success or b.error]
    view[second] = Bucket(
        second * 1000,
        min(before.passed + added.passed, MAX_TOTAL),
        min(before.blocked + added.blocked, MAX_TOTAL),
        min(before.success + added.success, MAX_TOTAL),
        min(before.error + added.error, MAX_TOTAL),
        min(before.rt_sum_ms + added.rt_sum_ms, MAX_TOTAL),
        min(least) if least else None,
    )
