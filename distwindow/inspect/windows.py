"""The windows of a key, from the hashes that Redis holds of its rings."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any, NamedTuple

import redis

from ..errors import ConfigurationError
from ..ring.key import shaping_name
from ..ring.limit import Limit
from ..ring.replies import ring_state
from ..ring.stats import WindowStats, window_at
from ..shaping.commands import shaped_limit, shaping_state
from ..shaping.shaping import shaping_stats


class HashKind(NamedTuple):
    """What distinguishes the hashes of one key."""

    bucket_ms: int
    span: int
    is_shaping: bool
    """True for the hash of how the limit is shaped, beside that of its ring."""

    def name(self, key_prefix: bytes) -> bytes:
        """Return the Redis key of this hash."""
        ring = b"%s:%d:%d" % (key_prefix, self.bucket_ms, self.span)
        return shaping_name(ring) if self.is_shaping else ring


def windows_of(hashes: Mapping[HashKind, Any], now_ms: int) -> tuple[WindowStats, ...]:
    """Return the windows of a key, the shortest interval first."""
    windows = []
    for bucket_ms, span in sorted({(kind.bucket_ms, kind.span) for kind in hashes}):
        fields = hashes.get(HashKind(bucket_ms, span, False)) or {}
        shaping = hashes.get(HashKind(bucket_ms, span, True)) or {}
        window = window_of(bucket_ms, span, fields, shaping, now_ms) if fields or shaping else None
        if window is not None:
            windows.append(window)
    return tuple(sorted(windows, key=lambda window: window.limit.interval_ms))


def window_of(
    bucket_ms: int, span: int, fields: Any, shaping: Any, now_ms: int
) -> WindowStats | None:
    """Return the window of a ring's hash and of its shaping; None where they are no ring's."""
    if isinstance(fields, redis.RedisError) or isinstance(shaping, redis.RedisError):
        return None
    try:
        state = ring_state(fields, bucket_ms, span)
        limit = None if state is None else _limit(state.limit, bucket_ms, span)
        shaped = shaped_limit(shaping, bucket_ms, span)
        # Another limit in the ring was used later: a call of a shaped limit writes both.
        if shaped is not None and (
            limit is None or (limit.amount, limit.bound) == (shaped.amount, shaped.bound)
        ):
            stats = shaping_stats(shaped, shaping_state(shaping), now_ms)
            return window_at(state, shaped, now_ms, stats)
        return None if limit is None else window_at(state, limit, now_ms)
    except (ConfigurationError, ArithmeticError, ValueError):
        return None


@functools.lru_cache(maxsize=1024)
def _limit(limit_field: str, bucket_ms: int, span: int) -> Limit:
    """Return a ring's limit, from `RingState.limit` ("100 leap") and from the ring's name."""
    amount, _, bound = limit_field.partition(" ")
    buckets = span - 1 if bound == "strict" else span
    per = bucket_ms * buckets / 1000
    return Limit(int(amount), per, buckets, "strict" if bound == "strict" else "leap")


def used_share(window: WindowStats) -> float:
    """Return the share of its limit that a window has used; above 1 if the limit was lowered."""
    return window.passed / window.limit.amount
