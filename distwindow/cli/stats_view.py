"""The limits in use that a scan has found: their windows as a table, and for JSON."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

from .. import Bucket, Limit, ShapingStats, Stats, WindowStats
from .key_text import json_text, shell_word
from .render import bar, format_rate, usage_color
from .table import Cell, Column, Table

_BAR_WIDTH = 10
_FIELD_NAMES = {
    kind: [field.name for field in dataclasses.fields(kind)]
    for kind in (Stats, WindowStats, Bucket)
}


def limits_table(keys: Sequence[Stats], width: int | None, after: Table | None = None) -> Table:
    """Return a table with a row for each key and limit; `after`: see `Table`."""
    windows = [(stats, window) for stats in keys for window in stats.windows]
    with_outcomes = any(window.success or window.error for _, window in windows)
    with_borrowed = any(window.borrowed for _, window in windows)
    # Omitted first are columns that follow from others, or that do not concern the limit.
    columns = [
        Column("KEY"),
        Column("LIMIT", omit_order=2),
        Column("USED", align_right=True),
        Column("", omit_order=3, name="bar"),
        Column("PASS/S", align_right=True, omit_order=5),
        Column("BLOCK/S", align_right=True, omit_order=1),
    ]
    if with_borrowed:
        columns.append(Column("BORROWED", align_right=True, omit_order=4))
    if with_outcomes:
        columns += [
            Column(title, align_right=True, omit_order=omit_order)
            for title, omit_order in (("OK", 6), ("ERR", 4), ("AVG MS", 7), ("MIN MS", 8))
        ]
    shaping = _ShapingColumns([window.shaping for _, window in windows])
    columns += shaping.columns()
    narrow = width is not None and width < 100 and with_outcomes
    bar_width = _BAR_WIDTH // 2 if narrow else _BAR_WIDTH
    rows = [
        _row(stats, window, bar_width, with_borrowed, with_outcomes) + shaping.cells(window)
        for stats, window in windows
    ]
    return Table(columns, rows, width, after=after)


def _row(
    stats: Stats, window: WindowStats, bar_width: int, with_borrowed: bool, with_outcomes: bool
) -> list[Cell]:
    seconds, share = window.window_ms / 1000, used_share(window)
    row = [
        (shell_word(str(stats.key)), ""),
        (_limit_text(window.limit), "dim"),
        (f"{window.passed:,}", usage_color(share) if share else ""),
        (bar(share, bar_width), usage_color(share)),
        (format_rate(window.passed / seconds), ""),
        (format_rate(window.blocked / seconds), "red" if window.blocked else "dim"),
    ]
    if with_borrowed:
        row.append((f"{window.borrowed:,}" if window.borrowed else "-", ""))
    if with_outcomes:
        finished = window.success + window.error
        average = format_rate(window.rt_sum_ms / finished) if finished else "-"
        minimum = "-" if window.rt_min_ms is None else format_rate(window.rt_min_ms)
        row += [
            (f"{window.success:,}" if finished else "-", ""),
            (f"{window.error:,}" if finished else "-", "red" if window.error else ""),
            (average, ""),
            (minimum, ""),
        ]
    return row


def limits_object(stats: Stats) -> dict[str, Any]:
    """Return `Stats` for JSON: its fields by name, limits as strings, buckets as objects."""
    return _fields(stats) | {
        "key": json_text(str(stats.key)),
        "limits": [_limit_text(limit) for limit in stats.limits],
        "buckets": [_fields(bucket) for bucket in stats.buckets],
        "windows": [
            _fields(window)
            | {
                "limit": _limit_text(window.limit),
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
def _limit_text(limit: Limit) -> str:
    return str(limit)


class _ShapingColumns:
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


def used_share(window: WindowStats) -> float:
    """Return the share of its limit that a window has used; above 1 if the limit was lowered."""
    return window.passed / window.limit.amount
