"""The limits of `limits`, as keys name them, and as limits of this library."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from functools import lru_cache
from types import FrameType
from typing import NamedTuple, TypeAlias

from limits.limits import GRANULARITIES

from ...ring.limit import MAX_AMOUNT, Limit

MAX_LIMITS = 10_000
"""Limits, and keys, that one storage remembers; the least recent go first."""


class LimitsItem(NamedTuple):
    """The numbers of a `RateLimitItem`."""

    amount: int
    expiry: int
    """The interval in seconds."""


def item_in(key: str) -> LimitsItem | None:
    """Return the limit that the end of `key` names; None if it names none."""
    parts = key.rsplit("/", 3)
    granularity = GRANULARITIES.get(parts[-1])
    if granularity is None or len(parts) < 4 or not (parts[1] + parts[2]).isdecimal():
        return None
    return LimitsItem(int(parts[1]), granularity.GRANULARITY.seconds * int(parts[2]))


def maker_of_storage() -> str:
    """Return the name of the package that makes a storage, and has called this for it."""
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        package = str(frame.f_globals.get("__name__")).partition(".")[0]
        if package not in ("distwindow", "limits"):
            return package
        frame = frame.f_back
    return ""


def scope_in(key: str, maker: str) -> str | None:
    """Return what stands before the limit in a key of Flask-Limiter or slowapi: the route, its path
    in the URL, or the scope of a shared limit. None for other makers, where it may be a user.
    """
    if maker not in ("flask_limiter", "slowapi") or item_in(key) is None:
        return None
    before = key.rsplit("/", 3)[0]
    path = _PATH.fullmatch(before) if maker == "slowapi" else None
    return before.rpartition("/")[2] if path is None else path[1]


_PATH = re.compile(r".*[^:]/(/.*)", re.DOTALL)
"""The path of a route behind a key, which may be a URL itself."""


MakeLimit: TypeAlias = Callable[[LimitsItem, "int | None"], Limit]
"""Returns the limit of a strategy, with some number of buckets."""


@lru_cache(MAX_LIMITS)
def strict_limit(item: LimitsItem, buckets: int | None) -> Limit:
    """Return the limit of a moving window."""
    return Limit(min(item.amount, MAX_AMOUNT), per=item.expiry, buckets=buckets, bound="strict")


@lru_cache(MAX_LIMITS)
def leap_limit(item: LimitsItem, buckets: int | None) -> Limit:
    """Return the limit of a sliding window; of a fixed one with 1 of `buckets`."""
    return Limit(min(item.amount, MAX_AMOUNT), per=item.expiry, buckets=buckets)


def total_limit(expiry: int) -> Limit:
    """Return the limit of a fixed window that counts all hits, and refuses none."""
    return leap_limit(LimitsItem(MAX_AMOUNT, expiry), 1)
