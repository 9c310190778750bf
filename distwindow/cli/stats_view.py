"""How `distwindow stats` shows what it has found: once, or again and again."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Sequence
from typing import Any

import typer
from rich.console import Console
from rich.text import Text

from .render import has_size
from .servers import Server
from .stats_query import Found, Query
from .table import Table
from .watch import StreamView, TerminalView, watch_store


def print_once(
    found: Found, console: Console, nothing: str, query: Query, *, as_json: bool
) -> None:
    if as_json:
        objects = found.objects(query.shown)
        _print_json(objects)
        if not objects:
            typer.echo(nothing + found.options_note(), err=True)
        return
    tables = found.tables(console.width if has_size(console) else None)
    for number, table in enumerate(tables):
        if number:
            console.print()
        table.print_to(console)
    if found.keys:
        console.print(Text(f"\n{found.note}{_omitted_note(tables)}", style="dim"))
    elif not tables:
        console.print(Text(nothing))
        if "skipped" in found.note:
            console.print(Text(found.note, style="dim"))


def watch_limits(
    url: str, query: Query, console: Console, nothing: str, interval: float, *, as_json: bool
) -> None:
    def print_json_line(servers: Sequence[Server]) -> None:
        print(json.dumps(query.run(servers).objects(query.shown)), flush=True)

    def print_table(servers: Sequence[Server]) -> None:
        found = query.run(servers)
        print(time.strftime("%H:%M:%S"))
        print_once(found, console, nothing, query, as_json=False)
        print(flush=True)

    def terminal_lines(servers: Sequence[Server]) -> tuple[list[Text], str]:
        found = query.run(servers, max(1, console.height - 4), progress=False)
        tables = found.tables(console.width)
        if not tables:
            return [Text(nothing)], found.note
        lines = list(tables[0].styled_lines())
        for table in tables[1:]:
            lines += [Text(), *table.styled_lines()]
        return lines, f"{found.note}{_omitted_note(tables)}"

    if has_size(console) and not as_json:
        with TerminalView(console, terminal_lines) as view:
            watch_store(url, view, interval)
    else:
        watch_store(url, StreamView(print_json_line if as_json else print_table), interval)


def _omitted_note(tables: Sequence[Table]) -> str:
    omitted = list(dict.fromkeys(name for table in tables for name in table.omitted))
    return f"; too narrow for {', '.join(omitted)}" if omitted else ""


def _print_json(objects: Sequence[dict[str, Any]]) -> None:
    """Print one array, with one object on a line."""
    write = sys.stdout.write
    write("[")
    for i, one in enumerate(objects):
        write((",\n " if i else "\n ") + json.dumps(one))
    write("\n]\n" if objects else "]\n")
