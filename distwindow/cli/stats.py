"""`distwindow stats`: the current windows of keys."""

from __future__ import annotations

import dataclasses
import functools
import json
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from typing import Annotated, Any, Literal, NamedTuple

import typer
from rich.console import Console
from rich.text import Text

from distwindow import Bucket, ConfigurationError, Limit, Stats, WindowStats

from ..protocol.keys import check_prefix
from ..store.redis.urls import masked_url
from .breakers import FoundBreaker, breaker_object, breaker_table, read_breakers
from .errors import report_errors
from .key_text import json_text, shell_word
from .minute import By, MinuteQuery, check_no_watch, print_minute
from .options import DEFAULT_PREFIX, DEFAULT_URL, JsonOption, PrefixOption, UrlOption
from .progress import ProgressLine
from .ranking import Order, rank, used_share
from .render import bar, format_rate, has_size, make_console, printable, usage_color
from .scan import ScanCounts, scan_rings
from .selection import Selection, all_keys, matching_keys
from .servers import Server, open_servers
from .slots import HeldSlots, read_slots, slots_object, slots_table
from .table import Cell, Column, Table
from .watch import StreamView, TerminalView, watch_store

_TERMINAL_TOP = 50
_BAR_WIDTH = 10
_Shown = Literal["all", "slots", "breakers"]
_FIELD_NAMES = {
    kind: [field.name for field in dataclasses.fields(kind)]
    for kind in (Stats, WindowStats, Bucket)
}


@report_errors
def stats(
    pattern: Annotated[
        str | None,
        typer.Argument(help="A glob over keys: 'user:*'. Without wildcards, this one key."),
    ] = None,
    watch: Annotated[
        bool, typer.Option("--watch", "-w", help="Repeat until Ctrl-C, every --interval seconds.")
    ] = False,
    as_json: JsonOption = False,
    sort: Annotated[Order, typer.Option(help="What keys are sorted by.")] = Order.BLOCKED,
    top: Annotated[
        int | None,
        typer.Option(
            min=0,
            help=f"Show only the first N keys; 0: all. The default is {_TERMINAL_TOP} on a "
            "terminal, else all.",
            show_default=False,
        ),
    ] = None,
    slots: Annotated[
        bool, typer.Option("--slots", help="Show concurrency limits only, also with --json.")
    ] = False,
    breakers: Annotated[
        bool, typer.Option("--breakers", help="Show circuit breakers only, also with --json.")
    ] = False,
    interval: Annotated[float, typer.Option(min=0.1, help="For --watch, in seconds.")] = 1.0,
    by: Annotated[
        By | None, typer.Option(help="Show the last minute of entries, a row for each origin.")
    ] = None,
    minute: Annotated[
        bool, typer.Option("--minute", help="Show the last minute of entries, by second.")
    ] = False,
    url: UrlOption = DEFAULT_URL,
    prefix: PrefixOption = DEFAULT_PREFIX,
) -> None:
    """Show who is using how much of which limit.

    A row for each key and limit: what its window has admitted, as a bar; permits passed and blocked
    per second; permits that priority calls have borrowed, where there are any; and successes,
    errors and response times (ms) where they are recorded.

    Below are the concurrency limits, with those who hold their slots, and the circuit breakers:
    their states, and the calls in their windows.

    KEY is quoted for bash, so it can be copied into `reset`. In a terminal that is too narrow,
    columns are omitted; in a pipe nothing is omitted.

    With --minute or --by, what entries did in the last minute, of all keys that have any.
    """
    check_prefix(prefix)
    selection = all_keys(prefix) if pattern is None else matching_keys(prefix, pattern)
    console = make_console()
    if top is None:
        top = _TERMINAL_TOP if has_size(console) and not as_json else 0
    selected = repr(pattern) if pattern else "any key"
    no_keys = (
        f"no limits on {printable(selected)} under the prefix {prefix!r} at {masked_url(url)}: "
        "no call was counted within their windows, or they are elsewhere (--prefix, --url)"
    )
    if slots + breakers + (minute or by is not None) > 1:
        raise ConfigurationError(
            "--slots, --breakers and --minute or --by each show nothing else: give one of them"
        )
    if minute or by is not None:
        check_no_watch(watch=watch)
        views = MinuteQuery(prefix, selection, sort, top, by is By.ORIGIN, minute)
        of_origins = " with an origin" if by is By.ORIGIN else ""
        no_entries = (
            f"no entries{of_origins} on {printable(selected)} in the last minute under the prefix "
            f"{prefix!r} at {masked_url(url)}"
        )
        with open_servers(url) as servers:
            print_minute(views, servers, console, no_entries, as_json=as_json)
        return
    shown: _Shown = "slots" if slots else "breakers" if breakers else "all"
    query = _Query(prefix, selection, sort, top, shown)
    if not watch:
        with open_servers(url) as servers:
            _print_once(query.run(servers), console, no_keys, query, as_json=as_json)
        return
    with suppress(KeyboardInterrupt):  # the regular end of --watch
        _watch(url, query, console, no_keys, interval, as_json=as_json)


class _Found(NamedTuple):
    """What one scan has found: keys, a note about how many there are besides, slots, breakers."""

    keys: list[Stats]
    note: str
    slots: list[HeldSlots]
    breakers: list[FoundBreaker]

    def objects(self, shown: _Shown) -> list[dict[str, Any]]:
        """Return what `--json` prints: objects of one kind, so that all have the same fields."""
        if shown == "slots":
            return [slots_object(one) for one in self.slots]
        if shown == "breakers":
            return [breaker_object(one) for one in self.breakers]
        return [as_object(one) for one in self.keys]

    def tables(self, width: int | None) -> list[Table]:
        """Return the tables of limits, slots and breakers, without those that are empty."""
        tables = [_table(self.keys, width)] if self.keys else []
        if self.slots:
            tables.append(slots_table(self.slots, width))
        if self.breakers:
            tables.append(breaker_table(self.breakers, width))
        return tables


class _Query:
    """A question about the keys of a store, which can be repeated."""

    def __init__(
        self, prefix: str, selection: Selection, sort: Order, top: int, shown: _Shown
    ) -> None:
        self._prefix, self._selection = prefix, selection
        self.shown = shown
        self._sort, self._top = sort, top

    def run(self, servers: Sequence[Server], at_most: int = 0, *, progress: bool = True) -> _Found:
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
        return _Found(
            keys if self.shown == "all" else [],
            "; ".join(notes),
            slots[:top] if top else slots,
            breakers[:top] if top else breakers,
        )


def _print_once(
    found: _Found, console: Console, no_keys: str, query: _Query, *, as_json: bool
) -> None:
    if as_json:
        objects = found.objects(query.shown)
        _print_json(objects)
        if not objects:
            typer.echo(no_keys, err=True)
        return
    tables = found.tables(console.width if has_size(console) else None)
    for number, table in enumerate(tables):
        if number:
            console.print()
        table.print_to(console)
    if found.keys:
        console.print(Text(f"\n{found.note}{_omitted_note(tables)}", style="dim"))
    elif not tables:
        console.print(Text(no_keys))
        if "skipped" in found.note:
            console.print(Text(found.note, style="dim"))


def _watch(
    url: str, query: _Query, console: Console, no_keys: str, interval: float, *, as_json: bool
) -> None:
    def print_json_line(servers: Sequence[Server]) -> None:
        print(json.dumps(query.run(servers).objects(query.shown)), flush=True)

    def print_table(servers: Sequence[Server]) -> None:
        found = query.run(servers)
        print(time.strftime("%H:%M:%S"))
        _print_once(found, console, no_keys, query, as_json=False)
        print(flush=True)

    def terminal_lines(servers: Sequence[Server]) -> tuple[list[Text], str]:
        found = query.run(servers, max(1, console.height - 4), progress=False)
        tables = found.tables(console.width)
        if not tables:
            return [Text(no_keys)], found.note
        lines = list(tables[0].styled_lines())
        for table in tables[1:]:
            lines += [Text(), *table.styled_lines()]
        return lines, f"{found.note}{_omitted_note(tables)}"

    if has_size(console) and not as_json:
        with TerminalView(console, terminal_lines) as view:
            watch_store(url, view, interval)
    else:
        watch_store(url, StreamView(print_json_line if as_json else print_table), interval)


def _table(keys: Sequence[Stats], width: int | None) -> Table:
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
    narrow = width is not None and width < 100 and with_outcomes
    bar_width = _BAR_WIDTH // 2 if narrow else _BAR_WIDTH
    rows = [
        _row(stats, window, bar_width, with_borrowed, with_outcomes) for stats, window in windows
    ]
    return Table(columns, rows, width)


def _omitted_note(tables: Sequence[Table]) -> str:
    omitted = list(dict.fromkeys(name for table in tables for name in table.omitted))
    return f"; too narrow for {', '.join(omitted)}" if omitted else ""


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


def _print_json(objects: Sequence[dict[str, Any]]) -> None:
    """Print one array, with one object on a line."""
    write = sys.stdout.write
    write("[")
    for i, one in enumerate(objects):
        write((",\n " if i else "\n ") + json.dumps(one))
    write("\n]\n" if objects else "]\n")


def as_object(stats: Stats) -> dict[str, Any]:
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
