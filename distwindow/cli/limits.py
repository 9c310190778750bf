"""The limits in use that a scan has found: their windows as a table, and for JSON."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

from distwindow import Bucket, Limit, Stats, WindowStats

from .key_text import json_text, shell_word
from .ranking import used_share
from .render import bar, format_rate, usage_color
from .shaping import ShapingColumns, shaping_object
from .table import Cell, Column, Table

_BAR_WIDTH = 10
_FIELD_NAMES = {
    kind: [field.name for field in dataclasses.fields(kind)]
    for kind in (Stats, WindowStats, Bucket)
}


def limits_table(keys: Sequence[Stats], width: int | None) -> Table:
    """Return a table with a row for each key and limit."""
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
    shaping = ShapingColumns([window.shaping for _, window in windows])
    columns += shaping.columns()
    narrow = width is not None and width < 100 and with_outcomes
    bar_width = _BAR_WIDTH // 2 if narrow else _BAR_WIDTH
    rows = [
        _row(stats, window, bar_width, with_borrowed, with_outcomes) + shaping.cells(window)
        for stats, window in windows
    ]
    return Table(columns, rows, width)


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
                "shaping": shaping_object(window.shaping),
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
