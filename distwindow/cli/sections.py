"""Which tables `distwindow stats` shows of all kinds, in which order, and with how many rows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from ..inspect.query import Found, Shown
from ..inspect.windows import used_share


class Section(NamedTuple):
    """A table of one kind, and what is in it."""

    kind: Shown
    items: Sequence[Any]
    is_wrong: bool

    def rows(self) -> int:
        return (
            sum(len(one.windows) for one in self.items) if self.kind == "all" else len(self.items)
        )

    def cut(self, rows: int) -> Section:
        """Return no more than this many rows, but at least one item."""
        count = len(self.items)
        while count > 1 and self._replace(items=self.items[:count]).rows() > rows:
            count -= 1
        return self._replace(items=self.items[:count])


def sections_of(found: Found, keys: Sequence[Any]) -> list[Section]:
    """Return what is to be shown of all kinds: first what is wrong."""
    breakers, slots = found.breakers.ranked(), found.slots.ranked()
    pauses = found.pauses.ranked()
    exhausted = any(w.blocked or used_share(w) >= 1 for one in keys for w in one.windows)
    wrong = [
        Section("breakers", breakers, found.counts.not_closed > 0),
        Section("all", keys, exhausted),
        Section("slots", slots, found.counts.with_lost > 0),
        Section("pauses", pauses, found.counts.paused > 0),
    ]
    right = [wrong[1], wrong[2], wrong[0], wrong[3]]
    ordered = [one for one in wrong if one.is_wrong] + [one for one in right if not one.is_wrong]
    return [one for one in ordered if one.items]


def rows_of_each(wanted: Sequence[int], room: int) -> list[int]:
    """Return how many rows of `room` each gets: equal parts, but none more than it wants."""
    rooms, left = [0] * len(wanted), room
    for done, i in enumerate(sorted(range(len(wanted)), key=lambda i: wanted[i])):
        rooms[i] = min(wanted[i], left // (len(wanted) - done))
        left -= rooms[i]
    return rooms
