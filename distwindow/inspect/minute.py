"""The minute views of a key: what its entries did in the last minute, and those of each origin."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from ..minute.commands import parse_views
from ..minute.operations import by_origin
from ..minute.view import ALL_ORIGINS, MinuteStats, minute_stats
from .servers import Server, read_hashes


class KeyMinute(NamedTuple):
    """The last minute of one key."""

    total: MinuteStats
    origins: dict[str, MinuteStats]


def read_minutes(server: Server, names: Mapping[bytes, str]) -> list[KeyMinute]:
    """Return the views of these names that hold anything; each name has the text of its key."""
    found = []
    now_ms, hashes = read_hashes(server, list(names)) if names else (0, [])
    for key, fields in zip(names.values(), hashes, strict=True):
        if isinstance(fields, Exception):
            continue  # of another type, or its slot was moved meanwhile
        try:
            views = parse_views(fields, now_ms)
        except ValueError:
            continue  # not of distwindow
        if views:
            total = minute_stats(key, None, views.get(ALL_ORIGINS, ()), now_ms)
            found.append(KeyMinute(total, by_origin(key, views, now_ms)))
    return found
