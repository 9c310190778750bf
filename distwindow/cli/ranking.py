"""The order of keys in `stats`: groups the rings that a scan yields by key, and sorts the keys."""

from __future__ import annotations

import heapq
from collections.abc import Iterable
from enum import Enum
from typing import NamedTuple

from distwindow import Stats, WindowStats

from ..core.stats import stats_of
from ..protocol.keys import RingNameParts
from .scan import Ring, ScanCounts, read_rings
from .servers import Server

_SPARE_CANDIDATES = 1000
"""Candidates are cut down to `top` once there are this many more than twice `top`: so with a small
`top` it is rarely done.
"""


class Order(str, Enum):
    """What keys are sorted by. (An Enum, because typer before 0.19 does not support Literal.)"""

    BLOCKED = "blocked"
    PASSED = "passed"
    KEY = "key"


Score = tuple[float, float]
"""What a key is ranked by: the lowest comes first."""


def rank(rings: Iterable[Ring], order: Order, top: int) -> list[Stats]:
    """Return the keys of `rings` in their order. With `top`, return only the first ones, and hold
    only about that many in memory.

    `blocked` and `passed` put the largest count of any limit first. Of equal counts, the one with
    the largest used share of its limit comes first: where nothing is blocked, these are the keys
    that are nearly full. Equal keys, and all keys by `key`, are in alphabetical order.
    """
    keys = _rank_top(rings, order, top) if top else _group_all(rings)
    keys.sort(key=lambda stats: (_key_score(order, stats), str(stats.key)))
    return keys


def used_share(window: WindowStats) -> float:
    """Return the share of its limit that a window has used; above 1 if the limit was lowered."""
    return window.passed / window.limit.amount


def _window_score(order: Order, window: WindowStats) -> Score:
    """Return the score of a key by one of its windows.

    A key's score is the lowest of its windows' scores. So a scan that has read this window has the
    score of the key, without the other windows.
    """
    if order is Order.KEY:
        return 0, 0
    count = window.blocked if order is Order.BLOCKED else window.passed
    return -count, -used_share(window)


def _key_score(order: Order, stats: Stats) -> Score:
    return min(_window_score(order, window) for window in stats.windows)


def _group_all(rings: Iterable[Ring]) -> list[Stats]:
    # SCAN may return a ring twice, and shaped ones come with and without their shaping; bucket
    # length and span identify it within its key.
    keys: dict[bytes, dict[tuple[int, int], Ring]] = {}
    for ring in rings:
        own = keys.setdefault(ring.key_prefix, {})
        parameters = ring.name.bucket_ms, ring.name.span
        known = own.get(parameters)
        if known is None or known.window.shaping is None or ring.window.shaping is not None:
            own[parameters] = ring
    return [_stats(own.values()) for own in keys.values()]


def _stats(rings: Iterable[Ring]) -> Stats:
    ordered = sorted(rings, key=lambda ring: (ring.window.limit.interval_ms, *ring.name[1:]))
    first = ordered[0]
    return stats_of(first.name.key, tuple(ring.window for ring in ordered), first.now_ms)


class _Candidate(NamedTuple):
    score: Score
    key_prefix: bytes
    server: Server
    key: str


def _rank_top(rings: Iterable[Ring], order: Order, top: int) -> list[Stats]:
    """Rank in bounded memory.

    Dropping a candidate loses no key: a key's score is that of its best ring, and if that ring
    comes later, it makes the key a candidate again.
    """
    best: dict[bytes, _Candidate] = {}
    parameters: set[tuple[int, int]] = set()
    for ring in rings:
        parameters.add((ring.name.bucket_ms, ring.name.span))
        score = _window_score(order, ring.window)
        known = best.get(ring.key_prefix)
        if known is None or score < known.score:
            best[ring.key_prefix] = _Candidate(score, ring.key_prefix, ring.server, ring.name.key)
        if len(best) > 2 * top + _SPARE_CANDIDATES:
            best = {one.key_prefix: one for one in _first_candidates(best.values(), top)}
    # The scan may have met only some rings of these keys, so read all that they can have: each
    # bucket length and span that the scan has met.
    keys = []
    for one in _first_candidates(best.values(), top):
        page = [
            (b"%s:%d:%d" % (one.key_prefix, *pair), RingNameParts(one.key, *pair))
            for pair in sorted(parameters)
        ]
        if own := list(read_rings(one.server, page, ScanCounts(), with_shaping=True)):
            keys.append(_stats(own))
    return keys


def _first_candidates(candidates: Iterable[_Candidate], top: int) -> list[_Candidate]:
    return heapq.nsmallest(top, candidates, key=lambda one: (one.score, one.key))
