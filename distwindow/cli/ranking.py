"""From rings, in whatever order a walk meets them, to the statistics of keys in theirs."""

from __future__ import annotations

import heapq
from collections.abc import Iterable
from enum import Enum
from typing import Any, NamedTuple

from distwindow import Stats, WindowStats

from ..core.stats import stats_of
from ..protocol.keys import RingName
from .scan import Ring, Tally, read
from .servers import Server


class Order(str, Enum):
    """What comes first. (An Enum, because typer before 0.19 knows no Literal.)"""

    BLOCKED = "blocked"
    PASSED = "passed"
    KEY = "key"


def ranked(rings: Iterable[Ring], order: Order, top: int) -> list[Stats]:
    """The keys of `rings` in their order. With `top`, the first ones alone, and no more than these
    are held.

    `blocked` and `passed` put the largest count of any limit first. Of equal counts, the one with
    the largest share of its limit used comes first: where nothing is blocked, these are the keys
    that are nearly full. `key`, and whatever is still equal, goes by the alphabet.
    """
    keys = _first(rings, order, top) if top else _all(rings)
    keys.sort(key=lambda stats: (_score_of(order, stats), str(stats.key)))
    return keys


def share_used(window: WindowStats) -> float:
    """How much of its limit a window has used; above 1 where the limit was lowered since."""
    return window.passed / window.limit.amount


def _score(order: Order, key: str, window: WindowStats) -> Any:
    """What a key is ranked by for one of its windows: the lowest comes first.

    A key's score is the lowest of its windows' scores, so one window decides, and a walk that meets
    it learns the score of its key without knowing the others.
    """
    if order is Order.KEY:
        return key
    return -getattr(window, order.value), -share_used(window)


def _score_of(order: Order, stats: Stats) -> Any:
    return min(_score(order, str(stats.key), window) for window in stats.windows)


def _all(rings: Iterable[Ring]) -> list[Stats]:
    # SCAN may name a ring twice; by its shape it is kept once.
    keys: dict[bytes, dict[tuple[int, int], Ring]] = {}
    for ring in rings:
        shape = ring.name.bucket_ms, ring.name.span
        keys.setdefault(ring.stem, {})[shape] = ring
    return [_stats(shapes.values()) for shapes in keys.values()]


def _stats(rings: Iterable[Ring]) -> Stats:
    some = sorted(rings, key=lambda ring: (ring.window.limit.interval_ms, *ring.name[1:]))
    return stats_of(some[0].name.key, tuple(ring.window for ring in some), some[0].now_ms)


class _Candidate(NamedTuple):
    score: Any
    stem: bytes
    server: Server
    key: str


def _first(rings: Iterable[Ring], order: Order, top: int) -> list[Stats]:
    """In bounded memory: a key's score is its best ring's, so it can only grow as rings come, and
    a key that falls behind for now returns with the ring that makes it one of the first.
    """
    best: dict[bytes, _Candidate] = {}
    shapes: set[tuple[int, int]] = set()
    for ring in rings:
        shapes.add((ring.name.bucket_ms, ring.name.span))
        score = _score(order, ring.name.key, ring.window)
        known = best.get(ring.stem)
        if known is None or score < known.score:
            best[ring.stem] = _Candidate(score, ring.stem, ring.server, ring.name.key)
        if len(best) > 2 * top + 1000:
            best = {one.stem: one for one in _cut(best.values(), top)}
    # All rings of the first ones: of the shapes that the walk has met, those that they have.
    keys = []
    for one in _cut(best.values(), top):
        step = [
            (b"%s:%d:%d" % (one.stem, *shape), RingName(one.key, *shape))
            for shape in sorted(shapes)
        ]
        if again := list(read(one.server, step, Tally())):
            keys.append(_stats(again))
    return keys


def _cut(candidates: Iterable[_Candidate], top: int) -> list[_Candidate]:
    return heapq.nsmallest(top, candidates, key=lambda one: (one.score, one.key))
