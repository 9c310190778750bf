"""What `distwindow stats` asks of a store, and what it has found: limits, slots and breakers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

from distwindow import Stats

from .breakers import FoundBreaker, breaker_object, breaker_table, read_breakers
from .limits import limits_object, limits_table
from .progress import ProgressLine
from .ranking import Order, rank
from .scan import ScanCounts, scan_rings
from .selection import Selection
from .servers import Server
from .slots import HeldSlots, read_slots, slots_object, slots_table
from .table import Table

Shown = Literal["all", "slots", "breakers"]


class Found(NamedTuple):
    """What one scan has found: keys, a note about how many there are besides, slots, breakers."""

    keys: list[Stats]
    note: str
    slots: list[HeldSlots]
    breakers: list[FoundBreaker]

    def objects(self, shown: Shown) -> list[dict[str, Any]]:
        """Return what `--json` prints: objects of one kind, so that all have the same fields."""
        if shown == "slots":
            return [slots_object(one) for one in self.slots]
        if shown == "breakers":
            return [breaker_object(one) for one in self.breakers]
        return [limits_object(one) for one in self.keys]

    def options_note(self) -> str:
        """Return which options show what else was found, as the end of a message."""
        options = [
            option
            for option, has_any in (("--slots", self.slots), ("--breakers", self.breakers))
            if has_any
        ]
        return f"; there is more with {' and '.join(options)}" if options else ""

    def tables(self, width: int | None) -> list[Table]:
        """Return the tables of limits, slots and breakers, without those that are empty."""
        tables = [limits_table(self.keys, width)] if self.keys else []
        if self.slots:
            tables.append(slots_table(self.slots, width))
        if self.breakers:
            tables.append(breaker_table(self.breakers, width))
        return tables


class Query:
    """A question about the keys of a store, which can be repeated."""

    def __init__(
        self, prefix: str, selection: Selection, sort: Order, top: int, shown: Shown
    ) -> None:
        self._prefix, self._selection = prefix, selection
        self.shown = shown
        self._sort, self._top = sort, top

    def run(self, servers: Sequence[Server], at_most: int = 0, *, progress: bool = True) -> Found:
        """Scan the servers. Return no more than `at_most` keys, unless that is 0."""
        top = min(self._top, at_most) if self._top and at_most else self._top or at_most
        with ProgressLine(enabled=progress) as line:
            counts = ScanCounts(on_progress=line.update)
            rings = scan_rings(servers, self._prefix, self._selection, counts)
            keys = rank(rings, self._sort, top)
        notes = []
        if top and len(keys) == top:
            notes.append(
                f"the first {top} by {self._sort.value}"
                f"{', then by share used' if self._sort is not Order.KEY else ''}"
                f", of {counts.rings:,} limits in use"
            )
        else:
            notes.append(f"{len(keys):,} key{'s' if len(keys) != 1 else ''}")
        if counts.expired:
            notes.append(f"{counts.expired:,} expired during the scan")
        if counts.foreign:
            notes.append(f"{counts.foreign:,} skipped: not distwindow's")
        slots = read_slots(counts.slots) if self.shown != "breakers" else []
        breakers = read_breakers(counts.breakers) if self.shown != "slots" else []
        return Found(
            keys if self.shown == "all" else [],
            "; ".join(notes),
            slots[:top] if top else slots,
            breakers[:top] if top else breakers,
        )
