"""Which keys come first, and the first ones of all that a scan finds, page by page."""

from __future__ import annotations

import heapq
import itertools
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from enum import Enum
from typing import Any, Generic, TypeVar

from ..minute.view import MinuteStats
from ..ring.stats import WindowStats
from .windows import used_share

MOST_RANKED = 10_000
"""The number of keys that are ranked where no number is asked for."""
_RANKED_WITHIN_S = 0.5
"""How long the scan of a large store may take before its first keys are passed on."""
_PASSED_ON_AT_ONCE = 1000

Item = TypeVar("Item")


class Order(str, Enum):
    """Orders by which keys are sorted. (An Enum: typer before 0.19 does not support Literal.)"""

    BLOCKED = "blocked"
    PASSED = "passed"
    KEY = "key"


def window_rank(order: Order, window: WindowStats) -> tuple[float, float]:
    """Return the rank of a key by one of its windows. The lowest comes first, and is the key's.

    `blocked` and `passed` put the largest count of any limit first. Of equal counts, the one with
    the largest used share of its limit comes first: where nothing is blocked, these are the keys
    that are nearly full. Equal keys, and all keys by `key`, are in alphabetical order.
    """
    if order is Order.KEY:
        return 0, 0
    count = window.blocked if order is Order.BLOCKED else window.passed
    return -count, -used_share(window)


def rank_ceiling(order: Order, fields: Any) -> tuple[float, float] | None:
    """Return a rank that `window_rank` of a ring with this hash is not below; None if that would
    take as long.

    No bucket needs to be parsed for it, which takes most of the time of a ring: and of a million
    rings, most are not among the first.
    """
    if order is Order.KEY:
        return 0, 0
    try:
        used, amount = int(fields[b"used"]), abs(int(fields[b"limit"]))
        blocked = int(fields[b"block"])
        for name in [name for name, value in fields.items() if b" " in value]:
            if name.isdigit():
                blocked += int(fields[name].split()[1])
            elif name not in (b"head", b"finished"):
                return None  # borrowed permits, which may count in the window by now
        return -blocked if order is Order.BLOCKED else -used, -used / amount
    except (LookupError, TypeError, ArithmeticError, ValueError):
        return None


def minute_rank(order: Order, stats: MinuteStats) -> tuple[int, int, str]:
    """Return the rank of a key by its last minute."""
    key = str(stats.key)
    if order is Order.KEY:
        return 0, 0, key
    if order is Order.PASSED:
        return -stats.passed, 0, key
    return -stats.blocked, -stats.passed, key


class First(Generic[Item]):
    """The first `size` by rank of all items that are added, each name once."""

    def __init__(
        self, size: int, rank: Callable[[Item], Any], name: Callable[[Item], object]
    ) -> None:
        self.size, self._rank, self.name = size, rank, name
        self._items: dict[object, tuple[Any, Item]] = {}
        self.worst: Any = None
        """No item of a rank above this one is among the first; None while that is unknown."""

    def __len__(self) -> int:
        return len(self._items)

    def add(self, item: Item) -> None:
        """Keep `item`, while it may be one of the first."""
        rank, name = self._rank(item), self.name(item)
        known = self._items.get(name)
        if known is None or rank < known[0]:
            self._items[name] = rank, item
        if len(self._items) > 2 * self.size + 1000:  # so it is rarely done for a small size
            kept = self._nsmallest(self.size)
            self._items, self.worst = dict(kept), kept[-1][1][0]

    def ranked(self, *, cut: bool = True) -> list[Item]:
        """Return the first ones in order; not `cut`: all that are kept."""
        return [item for _, (_, item) in self._nsmallest(self.size if cut else len(self))]

    def _nsmallest(self, size: int) -> list[tuple[object, tuple[Any, Item]]]:
        return heapq.nsmallest(size, self._items.items(), key=lambda entry: entry[1][0])


def in_pages(
    batches: Iterable[Sequence[Item]],
    first: First[Item],
    *,
    stream: bool,
    on_stream: Callable[[bool], None] = lambda begins: None,
) -> Iterator[list[Item]]:
    """Yield the first items in order. With `stream`, yield all of them: where there are more than
    `first.size`, or finding them takes long, the others follow in the order of `batches`.

    `on_stream` is called with True before these are asked for, and with False if there are none.
    """
    until, batches = time.monotonic() + _RANKED_WITHIN_S, iter(batches)
    rest: Sequence[Item] | None = None
    for batch in batches:
        for item in batch:
            first.add(item)
        if stream and (len(first) > first.size or time.monotonic() > until):
            on_stream(True)
            if (rest := next(batches, None)) is not None:
                break
            on_stream(False)
    ranked = first.ranked(cut=not stream)
    for at in range(0, len(ranked), _PASSED_ON_AT_ONCE):
        yield ranked[at : at + _PASSED_ON_AT_ONCE]
    if rest is not None:
        shown = {first.name(item) for item in ranked}
        for batch in itertools.chain([rest], batches):
            if unshown := [item for item in batch if first.name(item) not in shown]:
                yield unshown
