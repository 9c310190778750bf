"""`distwindow stats`: what the windows hold now."""

from __future__ import annotations

import dataclasses
import functools
import json
import sys
import time
from collections.abc import Sequence
from typing import Annotated, Any

import typer
from rich.console import Console, Group
from rich.live import Live
from rich.text import Text

from distwindow import Bucket, Limit, Stats, WindowStats

from ..protocol.keys import check_prefix
from ..store.redis.urls import masked_url
from . import scan as walk
from .errors import guarded
from .options import DEFAULT_PREFIX, DEFAULT_URL, Json, Prefix, Url
from .ranking import Order, ranked
from .render import Cell, Column, Table, bar, console, heat, number, printable, shortened
from .servers import Server, servers

_SCREENFUL = 50
_LONGEST_KEY = 60
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
    """
    check_prefix(prefix)
    choice = walk.everything(prefix) if pattern is None else walk.like(prefix, pattern)
    out = console()
    if top is None:
        top = _SCREENFUL if out.is_terminal and not as_json else 0
    with servers(url) as nodes:
        look = _Look(nodes, prefix, choice, sort, top)
        where = f"{pattern or 'any key'!r}" if pattern else "any key"
        nothing = (
            f"no limits on {printable(where)} under the prefix {prefix!r} at {masked_url(url)}: "
            "nobody has called them within their window, or they live elsewhere "
            "(--prefix, --url)"
        )
        if not watch:
            _once(look, out, nothing, as_json=as_json)
            return
        try:
            _watch(look, out, nothing, interval, as_json=as_json)
        except KeyboardInterrupt:  # how one ends it
            return


class _Look:
    """One look at the store, repeated at will."""

    def __init__(
        self, nodes: Sequence[Server], prefix: str, choice: walk.Choice, sort: Order, top: int
    ) -> None:
        self._nodes, self._prefix, self._choice = nodes, prefix, choice
        self._sort, self._top = sort, top

    def __call__(self, at_most: int = 0, *, progress: bool = True) -> tuple[list[Stats], str]:
        """The keys, and a note on what else there is."""
        top = min(self._top, at_most) if self._top and at_most else self._top or at_most
        tally = walk.Tally()
        with walk.Progress(wanted=progress) as tally.watch:
            rings = walk.rings(self._nodes, self._prefix, self._choice, tally)
            keys = ranked(rings, self._sort, top)
        notes = []
        if top and len(keys) == top:
            notes.append(f"the first {top} by {self._sort.value}, of {tally.rings:,} limits in use")
        else:
            notes.append(f"{len(keys):,} key{'s' if len(keys) != 1 else ''}")
        if tally.gone:
            notes.append(f"{tally.gone:,} expired meanwhile")
        if tally.strangers:
            notes.append(f"{tally.strangers:,} skipped: not distwindow's")
        return keys, "; ".join(notes)


def _once(look: _Look, out: Console, nothing: str, *, as_json: bool) -> None:
    keys, note = look()
    if as_json:
        _print_json(keys)
        if not keys:
            typer.echo(nothing, err=True)
        return
    if keys:
        _table(keys, out.width).show(out)
        out.print(Text(f"\n{note}", style="dim"))
    else:
        out.print(Text(nothing))
        if "skipped" in note:
            out.print(Text(note, style="dim"))


def _watch(look: _Look, out: Console, nothing: str, interval: float, *, as_json: bool) -> None:
    if as_json or not out.is_terminal:
        while True:
            if as_json:
                keys, _ = look()
                print(json.dumps([as_object(one) for one in keys]), flush=True)
            else:
                print(time.strftime("%H:%M:%S"))
                _once(look, out, nothing, as_json=False)
                print(flush=True)
            time.sleep(interval)
    with Live(console=out, screen=True, auto_refresh=False, redirect_stdout=False) as live:
        while True:
            rows = max(1, out.height - 4)
            keys, note = look(rows, progress=False)
            lines = list(_table(keys, out.width).texts()) if keys else [Text(nothing)]
            foot = Text(f"{time.strftime('%H:%M:%S')}  {note}  (Ctrl-C ends)", style="dim")
            live.update(Group(*lines[: rows + 1], Text(), foot), refresh=True)
            time.sleep(interval)


def _table(keys: Sequence[Stats], width: int) -> Table:
    windows = [(stats, window) for stats in keys for window in stats.windows]
    finished = any(window.success or window.error for _, window in windows)
    columns = [
        Column("KEY", flexible=12),
        Column("LIMIT", flexible=10),
        Column("USED", right=True),
        Column(""),
        Column("PASS/S", right=True),
        Column("BLOCK/S", right=True),
    ]
    if finished:
        columns += [Column(title, right=True) for title in ("OK", "ERR", "AVG MS", "MIN MS")]
    bar_width = _BAR if width >= 100 or not finished else _BAR // 2
    rows = [_row(stats, window, bar_width, finished=finished) for stats, window in windows]
    return Table(columns, rows, width)


def _row(stats: Stats, window: WindowStats, bar_width: int, *, finished: bool) -> list[Cell]:
    seconds, share = window.window_ms / 1000, window.passed / window.limit.amount
    row = [
        (shortened(printable(str(stats.key)), _LONGEST_KEY), ""),
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
        "key": str(stats.key),
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
