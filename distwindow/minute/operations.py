"""Minute views: counting what entries do, and reading it."""

from __future__ import annotations

from typing import NamedTuple, Protocol

from ..errors import ConfigurationError
from ..options import OTHER_ORIGINS
from ..ring.clock import Clock
from ..ring.key import AnyKey, normalize_key
from ..ring.stats import Bucket
from ..runtime.flush import OutgoingCommand, send_all
from ..runtime.steps import Operation, send
from .commands import ViewRead, ViewReadReply, views_name
from .view import ALL_ORIGINS, MinuteStats, minute_stats


class EntryEvent(NamedTuple):
    """Something that an entry did: it was admitted or refused, or its block ended."""

    key: AnyKey
    at_ms: int
    """When, by the store's clock, ms since the epoch."""
    origin: str
    """Empty for an entry without an origin."""
    passed: int = 0
    blocked: int = 0
    success: int = 0
    error: int = 0
    rt_ms: int = 0


class EntryViews(Protocol):
    """The minute views as limiters use them (`minute/views.py`)."""

    def count(self, event: EntryEvent) -> None:
        """Count what an entry did. Raises `ConfigurationError` once the limiter is closed."""

    def flush_command(self, key: AnyKey) -> OutgoingCommand | None:
        """Return the command that sends what is counted of `key`; None if there is nothing."""


def minute(
    views: EntryViews | None, prefix: str, key: AnyKey, clock: Clock
) -> Operation[MinuteStats]:
    """Return what all entries of `key` did in the last minute."""
    found, now_ms = yield from _read(views, prefix, key, clock)
    return minute_stats(normalize_key(key), None, found.get(ALL_ORIGINS, ()), now_ms)


def origins(
    views: EntryViews | None, prefix: str, key: AnyKey, clock: Clock
) -> Operation[dict[str, MinuteStats]]:
    """Return what the entries of each origin of `key` did in the last minute."""
    found, now_ms = yield from _read(views, prefix, key, clock)
    return by_origin(normalize_key(key), found, now_ms)


def by_origin(
    key: AnyKey, views: dict[str, tuple[Bucket, ...]], now_ms: int
) -> dict[str, MinuteStats]:
    """Return the statistics of each origin: those with most permits passed and blocked first,
    `OTHER_ORIGINS` last.
    """
    of_origins = [
        minute_stats(key, origin, buckets, now_ms)
        for origin, buckets in views.items()
        if origin != ALL_ORIGINS
    ]
    of_origins.sort(
        key=lambda one: (one.origin == OTHER_ORIGINS, -one.passed - one.blocked, one.origin or "")
    )
    return {one.origin or "": one for one in of_origins}


def require_views(views: EntryViews | None) -> EntryViews:
    """Return `views`; raise `ConfigurationError` if the store cannot keep any."""
    if views is None:
        raise ConfigurationError(
            "this store keeps no minute views: origin=, minute and origins need Redis or memory://"
        )
    return views


def _read(
    views: EntryViews | None, prefix: str, key: AnyKey, clock: Clock
) -> Operation[ViewReadReply]:
    command = ViewRead((), name=views_name(prefix, key))
    for _ in range(2):  # what is in flight already, and then what was counted since
        pending = require_views(views).flush_command(key)
        if pending is not None:
            yield from send_all([pending], clock.monotonic)
    reply: ViewReadReply = yield from send(command)
    return reply
