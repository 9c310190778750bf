"""Minute views in this process: the specification of `view_flush` and `view_read`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ..ring.ring import Ring, SenderRecords
from ..ring.stats import Bucket
from .commands import ViewFlush, ViewFlushReply, ViewRead, ViewReadReply
from .view import SECONDS, MinuteViews

_MIN_SWEEP_SIZE = 1024
"""With so many keys or fewer, no views are dropped."""


class MemoryViews:
    """Minute views by their names. Not safe to share between threads: the store has a lock."""

    def __init__(self) -> None:
        self._views: dict[bytes, MinuteViews] = {}
        self._senders: dict[bytes, SenderRecords] = {}
        self._sweep_size = _MIN_SWEEP_SIZE
        self.handlers: dict[str, Callable[[Any, int], Any]] = {
            "view_flush": self._flush,
            "view_read": self._read,
        }

    def _flush(self, command: ViewFlush, now: int) -> ViewFlushReply:
        name, sender, seq = command.name, command.sender, command.seq
        views = self._views.get(name) or MinuteViews()
        # Sender records ask a ring for its newest bucket: that of a view is its newest second.
        newest = Ring(1000, SECONDS, views.newest_second(now) * 1000, "")
        records = self._senders.get(name) or SenderRecords()
        counts: dict[str, tuple[Bucket, ...]] = dict(command.counts)
        if not views.live_counts(counts, now) or (sender and records.has(sender, seq, newest)):
            return ViewFlushReply(False, now)
        views.add(counts, command.max_origins, now)
        self._views[name] = views
        if sender:
            records.remember(sender, seq, newest, now)
            self._senders[name] = records
        if len(self._views) >= self._sweep_size:
            self._sweep(now)
        return ViewFlushReply(True, now)

    def _read(self, command: ViewRead, now: int) -> ViewReadReply:
        views = self._views.get(command.name)
        return ViewReadReply({} if views is None else views.live(now), now)

    def _sweep(self, now: int) -> None:
        """Drop the views in which nothing happened in the last minute. It is done again when their
        number has doubled, so the cost per call is constant.
        """
        self._views = {name: views for name, views in self._views.items() if views.live(now)}
        self._senders = {
            name: records for name, records in self._senders.items() if now < records.expires_at
        }
        self._sweep_size = max(_MIN_SWEEP_SIZE, 2 * len(self._views))
