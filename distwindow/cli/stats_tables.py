"""The tables of `stats`: limits, slots, circuit breakers and the last minute, a function for each.

`after` is the table that was printed just before, as in `Table`.
"""

from __future__ import annotations

import dataclasses
import time
from collections import Counter
from collections.abc import Sequence
from typing import Any

from .. import Bucket, Holder, MinuteStats, ShapingStats, Stats, WindowStats
from ..breaker.commands import BreakerNameParts
from ..breaker.rules import RULES
from ..inspect.breakers import FoundBreaker
from ..inspect.json_form import limit_text
from ..inspect.key_text import json_text
from ..inspect.pauses import FoundPause
from ..inspect.slots import SlotUsage
from ..inspect.windows import used_share
from .render import bar, format_rate, printable, shell_word, usage_color
from .table import Cell, Column, Table

_BAR_WIDTH = 10
_MAX_OWNERS = 4
_DEFAULTS: dict[str, dict[str, Any]] = {
    rule.kind: {each.name: each.default for each in dataclasses.fields(rule)} for rule in RULES
}
_STATE_STYLES = {"closed": "", "open": "red", "half_open": "yellow"}


def limits_table(keys: Sequence[Stats], width: int | None, after: Table | None = None) -> Table:
    """Return a table with a row for each key and limit; `after`: see `Table`."""
    windows = [(stats, window) for stats in keys for window in stats.windows]
    with_outcomes = any(window.success or window.error for _, window in windows)
    with_borrowed = any(window.borrowed for _, window in windows)
    shapings = [window.shaping for _, window in windows if window.shaping]
    with_pace = any(one.pace_ms is not None for one in shapings)
    with_warm_up = any(one.stored_tokens is not None for one in shapings)
    titles = (
        [("BORROWED", 4)] * with_borrowed
        + [("OK", 6), ("ERR", 4), ("AVG MS", 7), ("MIN MS", 8)] * with_outcomes
        + [("PACE MS", 9), ("BACKLOG MS", 4)] * with_pace
        + [("RATE/S", 5), ("TOKENS", 9)] * with_warm_up
    )
    # Omitted first are columns that follow from others, or that do not concern the limit.
    columns = [
        Column("KEY"),
        Column("LIMIT", omit_order=2),
        Column("USED", align_right=True),
        Column("", omit_order=3, name="bar"),
        Column("PASS/S", align_right=True, omit_order=5),
        Column("BLOCK/S", align_right=True, omit_order=1),
        *(Column(title, align_right=True, omit_order=order) for title, order in titles),
    ]
    narrow = width is not None and width < 100 and with_outcomes
    bar_width = _BAR_WIDTH // 2 if narrow else _BAR_WIDTH
    rows = []
    for stats, window in windows:
        row = _usage_cells(stats, window, bar_width)
        if with_borrowed:
            row.append((f"{window.borrowed:,}" if window.borrowed else "-", ""))
        if with_outcomes:
            row += _outcome_cells(window)
        if with_pace:
            row += _pace_cells(window.shaping)
        if with_warm_up:
            row += _warm_up_cells(window)
        rows.append(row)
    return Table(columns, rows, width, after=after)


def _usage_cells(stats: Stats, window: WindowStats, bar_width: int) -> list[Cell]:
    seconds, share = window.window_ms / 1000, used_share(window)
    return [
        (shell_word(str(stats.key)), ""),
        (limit_text(window.limit), "dim"),
        (f"{window.passed:,}", usage_color(share) if share else ""),
        (bar(share, bar_width), usage_color(share)),
        (format_rate(window.passed / seconds), ""),
        (format_rate(window.blocked / seconds), "red" if window.blocked else "dim"),
    ]


def _outcome_cells(counted: WindowStats | MinuteStats | Bucket) -> list[Cell]:
    finished = counted.success + counted.error
    return [
        (f"{counted.success:,}" if finished else "-", ""),
        (f"{counted.error:,}" if finished else "-", "red" if counted.error else ""),
        (format_rate(counted.rt_sum_ms / finished) if finished else "-", ""),
        ("-" if counted.rt_min_ms is None else format_rate(counted.rt_min_ms), ""),
    ]


def _pace_cells(shaping: ShapingStats | None) -> list[Cell]:
    if shaping is None or shaping.pace_ms is None:
        return [("-", ""), ("-", "")]
    return [(format_rate(shaping.pace_ms), ""), (format_rate(shaping.backlog_ms), "")]


def _warm_up_cells(window: WindowStats) -> list[Cell]:
    one = window.shaping
    if one is None or one.stored_tokens is None:
        return [("-", ""), ("-", "dim")]
    is_warm = one.stored_tokens < (one.warning_tokens or 0)
    rate = format_rate(one.rate * 1000 / window.limit.interval_ms)
    tokens = f"{one.stored_tokens:,.0f} of {one.max_tokens or 0:,.0f}"
    return [(rate, "" if is_warm else "yellow"), (tokens, "dim")]


def slots_table(slots: Sequence[SlotUsage], width: int | None, after: Table | None = None) -> Table:
    """Return a table with a row for each key."""
    columns = [
        Column("KEY"),
        Column("SLOTS", align_right=True, omit_order=2),
        Column("HELD", align_right=True),
        Column("", omit_order=3, name="bar"),
    ]
    with_lost = any(one.lost for one in slots)
    columns += [Column("LOST", align_right=True)] * with_lost + [Column("HELD BY", omit_order=1)]
    rows = []
    for one in slots:
        share = len(one.holders) / max(1, one.limit)
        rows.append(
            [
                (shell_word(one.key), ""),
                (f"{one.limit:,}", "dim"),
                (f"{len(one.holders):,}", usage_color(share)),
                (bar(share, _BAR_WIDTH), usage_color(share)),
                *[(f"{one.lost:,}", "red" if one.lost else "")] * with_lost,
                (_owners(one.holders), "dim"),
            ]
        )
    return Table(columns, rows, width, after=after)


def pauses_table(
    pauses: Sequence[FoundPause], width: int | None, after: Table | None = None
) -> Table:
    """Return a table with a row for each key of which an upstream has asked to wait."""
    columns = [
        Column("UPSTREAM"),
        Column("STATE"),
        Column("FOR S", align_right=True),
        Column("SAID S", align_right=True, omit_order=2),
        Column("IN A ROW", align_right=True, omit_order=1),
    ]
    rows: list[list[Cell]] = [
        [
            (shell_word(one.key), ""),
            (one.state, "red" if one.state == "paused" else "yellow"),
            (f"{one.left_s:,.1f}", ""),
            (f"{one.said_s:,.1f}", "dim"),
            (f"{one.in_a_row:,}", ""),
        ]
        for one in pauses
    ]
    return Table(columns, rows, width, after=after)


def _owners(holders: Sequence[Holder]) -> str:
    """Return who holds most slots: `web-1:4242 (3), web-2:4310`."""
    counted = Counter(holder.name for holder in holders).most_common()
    shown = [
        f"{printable(name)} ({count})" if count > 1 else printable(name)
        for name, count in counted[:_MAX_OWNERS]
    ]
    rest = len(counted) - len(shown)
    return ", ".join(shown) + (f" and {rest:,} more" if rest else "")


def breaker_table(
    found: Sequence[FoundBreaker], width: int | None, after: Table | None = None
) -> Table:
    """Return the table of these breakers."""
    columns = [
        Column("BREAKER"),
        Column("RULE", omit_order=2),
        Column("STATE"),
        Column("SINCE S", align_right=True, omit_order=1),
        Column("CALLS", align_right=True, omit_order=3),
        Column("BAD", align_right=True),
        Column("PROBES", align_right=True, omit_order=4),
    ]
    return Table(columns, [_breaker_row(one) for one in found], width, after=after)


def _breaker_row(one: FoundBreaker) -> list[Cell]:
    since_s, stored = one.since_s, one.stored
    return [
        (shell_word(one.name.key), ""),
        (_rule_text(one.name), "dim"),
        (one.state, _STATE_STYLES.get(one.state, "")),
        ("-" if since_s is None else format_rate(since_s), ""),
        (f"{stored.total:,}", ""),
        (f"{stored.bad:,}", "red" if stored.bad else ""),
        (f"{stored.probes:,}" if one.state == "half_open" else "-", ""),
    ]


def _rule_text(name: BreakerNameParts) -> str:
    """Return the kind of the rule, and its parameters that are not the usual ones."""
    usual = _DEFAULTS.get(name.kind, {})
    unusual = [f"{one}={value}" for one, value in name.settings if value != usual.get(one)]
    return " ".join([name.kind, *unusual])


def minute_table(
    rows: Sequence[MinuteStats],
    width: int | None,
    after: Table | None = None,
    *,
    by_origin: bool,
    by_second: bool,
) -> Table:
    """Return a table with a row for each of these, or for each of their seconds."""
    columns = [Column("KEY")]
    if by_origin:
        columns.append(Column("ORIGIN"))
    if by_second:
        columns.append(Column("TIME"))
    columns += [
        Column(title, align_right=True, omit_order=omit_order)
        for title, omit_order in (
            ("PASS", 0), ("BLOCK", 0), ("OK", 2), ("ERR", 1), ("AVG MS", 3), ("MIN MS", 4),
        )
    ]  # fmt: skip
    cells: list[list[Cell]] = []
    for stats in rows:
        start: list[Cell] = [(shell_word(str(stats.key)), "")]
        if by_origin:
            start.append((printable(json_text(stats.origin or "")), ""))
        if not by_second:
            cells.append([*start, *_counters(stats)])
            continue
        for second in stats.seconds:
            at = time.strftime("%H:%M:%S", time.localtime(second.start // 1000))
            cells.append([*start, (at, "dim"), *_counters(second)])
    return Table(columns, cells, width, after=after)


def _counters(counted: MinuteStats | Bucket) -> list[Cell]:
    return [
        (f"{counted.passed:,}", ""),
        (f"{counted.blocked:,}", "red" if counted.blocked else "dim"),
        (f"{counted.success:,}", ""),
        (f"{counted.error:,}", "red" if counted.error else ""),
        *_outcome_cells(counted)[2:],
    ]
