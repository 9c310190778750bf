"""How limits that are paced or warm up stand: the columns of them in `stats`, and for JSON."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from distwindow import ShapingStats, WindowStats

from .render import format_rate
from .table import Cell, Column


class ShapingColumns:
    """The columns that a table has where any of its limits is paced, or warms up."""

    def __init__(self, shapings: Sequence[ShapingStats | None]) -> None:
        self._any_paced = any(one and one.pace_ms is not None for one in shapings)
        self._any_warming = any(one and one.stored_tokens is not None for one in shapings)

    def columns(self) -> list[Column]:
        """Return the columns, which may be none."""
        shown = []
        if self._any_paced:
            shown += [("PACE MS", 9), ("BACKLOG MS", 4)]
        if self._any_warming:
            shown += [("RATE/S", 5), ("TOKENS", 9)]
        return [Column(title, align_right=True, omit_order=order) for title, order in shown]

    def cells(self, window: WindowStats) -> list[Cell]:
        """Return the cells of one limit in these columns."""
        one, cells = window.shaping, list[Cell]()
        if self._any_paced:
            paced = one if one and one.pace_ms is not None else None
            cells += [
                (format_rate(paced.pace_ms or 0) if paced else "-", ""),
                (format_rate(paced.backlog_ms) if paced else "-", ""),
            ]
        if self._any_warming:
            warming = one if one and one.stored_tokens is not None else None
            cells += [
                (format_rate(warming.rate * 1000 / window.limit.interval_ms), _style(warming))
                if warming
                else ("-", ""),
                (_tokens(warming) if warming else "-", "dim"),
            ]
        return cells


def _style(shaping: ShapingStats) -> str:
    is_warm = (shaping.stored_tokens or 0) < (shaping.warning_tokens or 0)
    return "" if is_warm else "yellow"


def _tokens(shaping: ShapingStats) -> str:
    return f"{shaping.stored_tokens or 0:,.0f} of {shaping.max_tokens or 0:,.0f}"


def shaping_object(shaping: ShapingStats | None) -> dict[str, Any] | None:
    """Return it for JSON: its fields by name; None for a limit that is not shaped."""
    return None if shaping is None else dataclasses.asdict(shaping)
