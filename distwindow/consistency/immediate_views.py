"""The minute views of a store in this process, which is given each event at once."""

from __future__ import annotations

from collections.abc import Callable

from ..core.key import AnyKey
from ..core.stats import Bucket
from ..operations.minute_views import EntryEvent
from ..protocol.frames import Command
from ..protocol.view_commands import ViewFlush, ViewFlushReply, views_name


class ImmediateViews:
    """Has each event counted by `execute`, so that nothing is pending here."""

    def __init__(
        self, prefix: str, max_origins: int, execute: Callable[[Command[ViewFlushReply]], object]
    ) -> None:
        self._prefix = prefix
        self._max_origins = max_origins
        self._execute = execute

    def count(self, event: EntryEvent) -> None:
        """Count what an entry did."""
        key, at_ms, origin, passed, blocked, success, error, rt_ms = event
        least = rt_ms if success or error else None
        bucket = Bucket(at_ms - at_ms % 1000, passed, blocked, success, error, rt_ms, least)
        name, counts = views_name(self._prefix, key), ((origin, (bucket,)),)
        self._execute(ViewFlush((), name=name, counts=counts, max_origins=self._max_origins))

    def flush_command(self, key: AnyKey) -> None:
        """Return None: nothing is pending."""
