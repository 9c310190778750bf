"""`distwindow stats`: what the windows hold now."""

from __future__ import annotations

import dataclasses
import functools
import json
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.text import Text

from distwindow import Bucket, Limit, Stats, WindowStats

from ..protocol.keys import check_prefix
from ..store.redis.urls import masked_url
from . import scan as walk
from .errors import guarded
from .key_text import json_text, shell_word
from .options import DEFAULT_PREFIX, DEFAULT_URL, Json, Prefix, Url
from .ranking import Order, ranked, share_used
from .render import bar, console, heat, is_window, number, printable
from .servers import Server, servers
from .table import Cell, Column, Table
from .watch import Screen, Stream, watch_store

_SCREENFUL = 50
_BAR = 10
_NAMES = {
    kind: [field.name for field in dataclasses.fields(kind)]
    for kind in (Stats, WindowStats, Bucket)
}


@guarded
def stats(
    pattern: Annotated[
        str | None,
        typer.Argument(help="Keys like this alone: 'user:*'. Without wildcards, this very key."),
    ] = None,
    watch: Annotated[bool, typer.Option("--watch", "-w", help="Look again and again.")] = False,
    as_json: Json = False,
    sort: Annotated[Order, typer.Option(help="What comes first.")] = Order.BLOCKED,
    top: Annotated[
        int | None,
        typer.Option(
            min=0,
            help=f"The first N keys alone; 0: all. On a terminal {_SCREENFUL} unless you say.",
            show_default=False,
        ),
    ] = None,
    interval: Annotated[
        float, typer.Option(min=0.1, help="Seconds between two looks of --watch.")
    ] = 1.0,
    url: Url = DEFAULT_URL,
    prefix: Prefix = DEFAULT_PREFIX,
) -> None:
    """Show who is using how much of which limit.

    A row for each key and limit: what its window has admitted, as a bar; permits passed and blocked
    per second; and successes, errors and response times (ms) where they are recorded.

    KEY is written as bash reads it, so it can be given to `reset`. What is too wide for a window
    is left out column by column; into a pipe everything goes.
    """
    check_prefix(prefix)
    choice = walk.everything(prefix) if pattern is None else walk.like(prefix, pattern)
    out = console()
    if top is None:
        top = _SCREENFUL if is_window(out) and not as_json else 0
    look = _Look(prefix, choice, sort, top)
    where = f"{pattern or 'any key'!r}" if pattern else "any key"
    nothing = (
        f"no limits on {printable(where)} under the prefix {prefix!r} at {masked_url(url)}: "
        "nobody has called them within their window, or they live elsewhere "
        "(--prefix, --url)"
    )
    if not watch:
        with servers(url) as nodes:
            _once(look(nodes), out, nothing, as_json=as_json)
        return
    with suppress(KeyboardInterrupt):  # how one ends it
        _watch(url, look, out, nothing, interval, as_json=as_json)


class _Look:
    """One look at the store, repeated at will."""

    def __init__(self, prefix: str, choice: walk.Choice, sort: Order, top: int) -> None:
        self._prefix, self._choice = prefix, choice
        self._sort, self._top = sort, top

    def __call__(
        self, nodes: Sequence[Server], at_most: int = 0, *, progress: bool = True
    ) -> tuple[list[Stats], str]:
        """The keys, and a note on what else there is."""
        top = min(self._top, at_most) if self._top and at_most else self._top or at_most
        tally = walk.Tally()
        with walk.Progress(wanted=progress) as tally.watch:
            rings = walk.rings(nodes, self._prefix, self._choice, tally)
            keys = ranked(rings, self._sort, top)
        notes = []
        if top and len(keys) == top:
            notes.append(
                f"the first {top} by {self._sort.value}"
                f"{', then by share used' if self._sort is not Order.KEY else ''}"
                f", of {tally.rings:,} limits in use"
            )
        else:
            notes.append(f"{len(keys):,} key{'s' if len(keys) != 1 else ''}")
        if tally.gone:
            notes.append(f"{tally.gone:,} expired meanwhile")
        if tally.strangers:
            notes.append(f"{tally.strangers:,} skipped: not distwindow's")
        return keys, "; ".join(notes)


def _once(look: tuple[list[Stats], str], out: Console, nothing: str, *, as_json: bool) -> None:
    keys, note = look
    if as_json:
        _print_json(keys)
        if not keys:
            typer.echo(nothing, err=True)
        return
    if keys:
        table = _table(keys, out.width if is_window(out) else None)
        table.show(out)
        out.print(Text(f"\n{note}{_narrowness(table)}", style="dim"))
    else:
        out.print(Text(nothing))
        if "skipped" in note:
            out.print(Text(note, style="dim"))


def _watch(
    url: str, look: _Look, out: Console, nothing: str, interval: float, *, as_json: bool
) -> None:
    def line_of_json(nodes: Sequence[Server]) -> None:
        keys, _ = look(nodes)
        print(json.dumps([as_object(one) for one in keys]), flush=True)

    def page(nodes: Sequence[Server]) -> None:
        found = look(nodes)
        print(time.strftime("%H:%M:%S"))
        _once(found, out, nothing, as_json=False)
        print(flush=True)

    def screenful(nodes: Sequence[Server]) -> tuple[list[Text], str]:
        keys, note = look(nodes, max(1, out.height - 4), progress=False)
        if not keys:
            return [Text(nothing)], note
        table = _table(keys, out.width)
        return list(table.texts()), f"{note}{_narrowness(table)}"

    if is_window(out) and not as_json:
        with Screen(out, screenful) as screen:
            watch_store(url, screen, interval)
    else:
        watch_store(url, Stream(line_of_json if as_json else page), interval)


def _table(keys: Sequence[Stats], width: int | None) -> Table:
    windows = [(stats, window) for stats in keys for window in stats.windows]
    finished = any(window.success or window.error for _, window in windows)
    # Left out first is what follows from other columns, or is no part of limiting.
    columns = [
        Column("KEY"),
        Column("LIMIT", drop=2),
        Column("USED", right=True),
        Column("", drop=3, name="bar"),
        Column("PASS/S", right=True, drop=5),
        Column("BLOCK/S", right=True, drop=1),
    ]
    if finished:
        columns += [
            Column(title, right=True, drop=drop)
            for title, drop in (("OK", 6), ("ERR", 4), ("AVG MS", 7), ("MIN MS", 8))
        ]
    bar_width = _BAR if width is None or width >= 100 or not finished else _BAR // 2
    rows = [_row(stats, window, bar_width, finished=finished) for stats, window in windows]
    return Table(columns, rows, width)


def _narrowness(table: Table) -> str:
    return f"; too narrow for {', '.join(table.left_out)}" if table.left_out else ""


def _row(stats: Stats, window: WindowStats, bar_width: int, *, finished: bool) -> list[Cell]:
    seconds, share = window.window_ms / 1000, share_used(window)
    row = [
        (shell_word(str(stats.key)), ""),
        (_spoken(window.limit), "dim"),
        (f"{window.passed:,}", heat(share) if share else ""),
        (bar(share, bar_width), heat(share)),
        (number(window.passed / seconds), ""),
        (number(window.blocked / seconds), "red" if window.blocked else "dim"),
    ]
    if finished:
        done = window.success + window.error
        average = number(window.rt_sum_ms / done) if done else "-"
        least = "-" if window.rt_min_ms is None else number(window.rt_min_ms)
        row += [
            (f"{window.success:,}" if done else "-", ""),
            (f"{window.error:,}" if done else "-", "red" if window.error else ""),
            (average, ""),
            (least, ""),
        ]
    return row


def _print_json(keys: Sequence[Stats]) -> None:
    """One array, an object to a line."""
    write = sys.stdout.write
    write("[")
    for i, one in enumerate(keys):
        write((",\n " if i else "\n ") + json.dumps(as_object(one)))
    write("\n]\n" if keys else "]\n")


def as_object(stats: Stats) -> dict[str, Any]:
    """`Stats` for JSON: its fields by their names, limits as strings, buckets as objects."""
    return _fields(stats) | {
        "key": json_text(str(stats.key)),
        "limits": [_spoken(limit) for limit in stats.limits],
        "buckets": [_fields(bucket) for bucket in stats.buckets],
        "windows": [
            _fields(window)
            | {
                "limit": _spoken(window.limit),
                "buckets": [_fields(bucket) for bucket in window.buckets],
            }
            for window in stats.windows
        ],
    }


def _fields(value: Stats | WindowStats | Bucket) -> dict[str, Any]:
    # dataclasses.asdict copies deeply: half of the time of a hundred thousand keys.
    return {name: getattr(value, name) for name in _NAMES[type(value)]}


@functools.lru_cache(maxsize=1024)
def _spoken(limit: Limit) -> str:
    return str(limit)
