"""`distwindow stats --minute` and `--by origin`: what entries did in the last minute."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import typer
from rich.console import Console
from rich.text import Text

from distwindow import Bucket, ConfigurationError, MinuteStats

from ..core.minute_view import ALL_ORIGINS, minute_stats
from ..operations.minute_views import by_origin
from ..protocol.view_commands import parse_views
from .key_text import json_text, shell_word
from .progress import ProgressLine
from .render import format_rate, has_size, printable
from .scan import scan_names
from .selection import Selection
from .servers import Server, read_hashes
from .stats_query import MOST_RANKED, First, Order, in_pages, print_json
from .table import Cell, Column, Table


class KeyMinute(NamedTuple):
    """The last minute of one key."""

    total: MinuteStats
    origins: dict[str, MinuteStats]


class MinuteQuery(NamedTuple):
    """A question about the minute views of a store."""

    prefix: str
    selection: Selection
    sort: Order
    top: int
    """Only so many keys, the first ones; 0: no number is given."""
    stream: bool
    """Without a number, show all keys, and not only the first 10,000."""
    by_origin: bool
    """A row for each origin instead of each key."""
    by_second: bool
    """A row for each second."""

    def run(self, servers: Sequence[Server]) -> Iterator[list[KeyMinute]]:
        """Scan the servers, and yield keys page by page (see `in_pages`)."""
        with ProgressLine(servers) as line:
            first = First[KeyMinute](
                self.top or MOST_RANKED,
                lambda one: _rank(self.sort, one.total),
                lambda one: str(one.total.key),
            )
            batches = _scan_views(servers, self.prefix, self.selection, line)
            for page in in_pages(batches, first, stream=self.stream):
                line.clear()
                yield page

    def rows(self, keys: Sequence[KeyMinute]) -> list[MinuteStats]:
        """Return the statistics to show: of each key, or of each of its origins."""
        if not self.by_origin:
            return [one.total for one in keys]
        return [stats for one in keys for stats in one.origins.values()]


def print_minute(
    query: MinuteQuery, servers: Sequence[Server], console: Console, no_keys: str, *, as_json: bool
) -> None:
    """Scan the servers, and print what was found."""
    pages = filter(None, map(query.rows, query.run(servers)))
    if as_json:
        if not print_json(pages, _as_object):
            typer.echo(no_keys, err=True)
        return
    table = None
    for rows in pages:
        table = _table(query, rows, console.width if has_size(console) else None, table)
        table.print_to(console)
        console.file.flush()
    style = "dim" if table else ""
    console.print(Text("\nthe last minute, of entries only" if table else no_keys, style=style))


def _scan_views(
    servers: Sequence[Server], prefix: str, selection: Selection, line: ProgressLine
) -> Iterator[list[KeyMinute]]:
    """Yield the keys that have minute views, page by page."""
    scanned = 0
    for server in servers:
        for page in scan_names(server, prefix, selection, redis_type="hash"):
            scanned += page.names
            line.update(scanned)
            yield list(_read_views(server, page.views))


def _read_views(server: Server, page: Sequence[tuple[bytes, str]]) -> Iterator[KeyMinute]:
    if not page:
        return
    now_ms, hashes = read_hashes(server, [name for name, _ in page])
    for (_, key), fields in zip(page, hashes, strict=True):
        if isinstance(fields, Exception):
            continue  # of another type, or its slot was moved meanwhile
        try:
            views = parse_views(fields, now_ms)
        except ValueError:
            continue  # not of distwindow
        if views:
            total = minute_stats(key, None, views.get(ALL_ORIGINS, ()), now_ms)
            yield KeyMinute(total, by_origin(key, views, now_ms))


def _rank(order: Order, stats: MinuteStats) -> tuple[int, int, str]:
    key = str(stats.key)
    if order is Order.KEY:
        return 0, 0, key
    if order is Order.PASSED:
        return -stats.passed, 0, key
    return -stats.blocked, -stats.passed, key


def _table(
    query: MinuteQuery, rows: Sequence[MinuteStats], width: int | None, after: Table | None
) -> Table:
    columns = [Column("KEY")]
    if query.by_origin:
        columns.append(Column("ORIGIN"))
    if query.by_second:
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
        if query.by_origin:
            start.append((printable(json_text(stats.origin or "")), ""))
        if not query.by_second:
            cells.append([*start, *_counters(stats)])
            continue
        cells += [
            [*start, (_time_text(second.start), "dim"), *_counters(second)]
            for second in stats.seconds
        ]
    return Table(columns, cells, width, after=after)


def _counters(counted: MinuteStats | Bucket) -> list[Cell]:
    finished = counted.success + counted.error
    return [
        (f"{counted.passed:,}", ""),
        (f"{counted.blocked:,}", "red" if counted.blocked else "dim"),
        (f"{counted.success:,}", ""),
        (f"{counted.error:,}", "red" if counted.error else ""),
        (format_rate(counted.rt_sum_ms / finished) if finished else "-", ""),
        ("-" if counted.rt_min_ms is None else format_rate(counted.rt_min_ms), ""),
    ]


def _time_text(start_ms: int) -> str:
    return time.strftime("%H:%M:%S", time.localtime(start_ms // 1000))


def _as_object(stats: MinuteStats) -> dict[str, Any]:
    """Return `MinuteStats` for JSON: its fields by name."""
    origin = None if stats.origin is None else json_text(stats.origin)
    return dataclasses.asdict(stats) | {"key": json_text(str(stats.key)), "origin": origin}


def check_no_watch(*, watch: bool) -> None:
    """Raise `ConfigurationError` for `--watch` beside `--minute` or `--by`."""
    if watch:
        raise ConfigurationError("--watch cannot be combined with --minute or --by; leave it out")
