"""Minute views in this process: the specification of `view_flush` and `view_read`."""

from __future__ import annotations

from ..ring.memory_rings import Handlers, MemoryValues
from ..ring.stats import Bucket
from .commands import ViewFlush, ViewFlushReply, ViewRead, ViewReadReply
from .view import SECONDS, MinuteViews


class MemoryViews:
    """The commands on minute views. Callers hold the lock of the store."""

    def __init__(self, values: MemoryValues) -> None:
        self._values = values
        self.handlers: Handlers = {"view_flush": self._flush, "view_read": self._read}

    def _flush(self, command: ViewFlush, now: int) -> ViewFlushReply:
        name, values = command.name, self._values
        views = values.get(name) or MinuteViews()
        newest = views.newest_second(now)
        counts: dict[str, tuple[Bucket, ...]] = dict(command.counts)
        taken = values.has_taken(name, command, newest, SECONDS)
        if not views.live_counts(counts, now) or taken:
            return ViewFlushReply(False, now)
        views.add(counts, command.max_origins, now)
        values.put(name, views)
        values.remember(name, command, newest, SECONDS, (newest + SECONDS + 1) * 1000)
        return ViewFlushReply(True, now)

    def _read(self, command: ViewRead, now: int) -> ViewReadReply:
        views = self._values.get(command.name)
        return ViewReadReply({} if views is None else views.live(now), now)
