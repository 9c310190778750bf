"""The form in JSON of all that is read: that of `--json`, which programs of others parse."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

from ..minute.view import MinuteStats
from ..ring.limit import Limit
from ..ring.stats import Bucket, Stats, WindowStats
from .breakers import FoundBreaker
from .key_text import json_text
from .pauses import FoundPause
from .slots import SlotUsage

_FIELD_NAMES = {
    kind: [field.name for field in dataclasses.fields(kind)]
    for kind in (Stats, WindowStats, Bucket)
}


def limits_object(stats: Stats) -> dict[str, Any]:
    """Return the limits of a key: the fields by name, limits as strings, buckets as objects."""
    return _fields(stats) | {
        "key": json_text(str(stats.key)),
        "limits": [limit_text(limit) for limit in stats.limits],
        "buckets": [_fields(bucket) for bucket in stats.buckets],
        "windows": [
            _fields(window)
            | {
                "limit": limit_text(window.limit),
                "buckets": [_fields(bucket) for bucket in window.buckets],
                "shaping": window.shaping and dataclasses.asdict(window.shaping),
            }
            for window in stats.windows
        ],
    }


def _fields(value: Stats | WindowStats | Bucket) -> dict[str, Any]:
    # dataclasses.asdict copies deeply, which took half of the time of a hundred thousand keys.
    return {name: getattr(value, name) for name in _FIELD_NAMES[type(value)]}


@functools.lru_cache(maxsize=1024)
def limit_text(limit: Limit) -> str:
    """Return `str(limit)`, which takes longer."""
    return str(limit)


def slots_object(slots: SlotUsage) -> dict[str, Any]:
    """Return the slots of a key."""
    return {
        "key": json_text(slots.key),
        "slots": slots.limit,
        "held": len(slots.holders),
        "lost": slots.lost,
        "holders": [
            {"name": holder.name, "expires_in": holder.expires_in} for holder in slots.holders
        ],
    }


def pause_object(pause: FoundPause) -> dict[str, Any]:
    """Return the pause of a key; durations in seconds."""
    return {
        "key": json_text(pause.key),
        "state": pause.state,
        "paused_for": pause.left_s,
        "said": pause.said_s,
        "in_a_row": pause.in_a_row,
        "until_ms": pause.until_ms,
        "now_ms": pause.now_ms,
    }


def breaker_object(one: FoundBreaker) -> dict[str, Any]:
    return {
        "key": json_text(one.name.key),
        "rule": one.name.kind,
        "settings": dict(one.name.settings),
        "state": one.state,
        "since_ms": one.stored.epoch,
        "retry_ms": one.stored.retry_ms if one.state == "open" else 0,
        "calls": one.stored.total,
        "bad": one.stored.bad,
        "probes": one.stored.probes if one.state == "half_open" else 0,
        "window_ms": one.name.bucket_ms * one.name.buckets,
        "now_ms": one.now_ms,
    }


def minute_object(stats: MinuteStats) -> dict[str, Any]:
    """Return the last minute of a key or of one of its origins: the fields by name."""
    origin = None if stats.origin is None else json_text(stats.origin)
    return dataclasses.asdict(stats) | {"key": json_text(str(stats.key)), "origin": origin}
