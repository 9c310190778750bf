"""`distwindow stats`: the windows, slots, breakers and minute views of a store."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from typing import Annotated, Any, NamedTuple

import typer
from rich.console import Console, Group
from rich.live import Live
from rich.text import Text

from .. import ConfigurationError, MinuteStats
from ..inspect.json_form import (
    breaker_object,
    limits_object,
    minute_object,
    pause_object,
    slots_object,
)
from ..inspect.minute import KeyMinute
from ..inspect.query import Found, Query, Shown
from ..inspect.ranking import MOST_RANKED, Order
from ..inspect.selection import all_keys, matching_keys
from ..inspect.servers import Server, open_servers
from ..ring.key import check_prefix
from ..rules.shadow import shadow_prefix
from ..stores.redis.urls import masked_url
from .command import DEFAULT_PREFIX, DEFAULT_URL, JsonOption, PrefixOption, UrlOption, report_errors
from .progress import ProgressLine
from .render import has_size, make_console, printable
from .sections import Section, rows_of_each, sections_of
from .stats_tables import breaker_table, limits_table, minute_table, pauses_table, slots_table
from .table import Table
from .watch import Draw, StreamView, TerminalView, watch_store

_TERMINAL_TOP = 50
_FIRST_PAGE_S = 0.5
"""How long a scan takes before a terminal shows what it has found so far."""
_PAGE_EVERY_S = 1.0
"""The time between two pages of what a long scan has found so far."""
_FOOTER = "00:00:00    (Ctrl-C ends)"
"""The codes that `--watch` puts around the last line."""


class _Kind(NamedTuple):
    """How what a query shows is printed."""

    table: Callable[[Any, int | None, Table | None], Table]
    as_object: Callable[[Any], dict[str, Any]]
    nothing: str
    """Why there is nothing on some keys."""


_KINDS: dict[Shown, _Kind] = {
    "all": _Kind(
        limits_table, limits_object, "no limits on {}: no call was counted within their windows"
    ),
    "slots": _Kind(slots_table, slots_object, "no slots are held on {}: no call is under way"),
    "pauses": _Kind(pauses_table, pause_object, "no upstream of {} has asked to wait"),
    "breakers": _Kind(
        breaker_table,
        breaker_object,
        "no circuit breakers on {}: no call has ended within their windows",
    ),
}


@report_errors
def stats(
    pattern: Annotated[
        str | None,
        typer.Argument(
            metavar="PATTERN", help="A glob over keys: 'user:*'. Without wildcards, this one key."
        ),
    ] = None,
    watch: Annotated[
        bool, typer.Option("--watch", "-w", help="Repeat until Ctrl-C, every --interval seconds.")
    ] = False,
    as_json: JsonOption = False,
    sort: Annotated[
        Order | None,
        typer.Option(
            help=f"What keys are sorted by; without --top, the first {MOST_RANKED:,}. Without "
            f"both, all are shown, and beyond {MOST_RANKED:,} in the order found.",
            show_default="blocked",
        ),
    ] = None,
    top: Annotated[
        int | None,
        typer.Option(
            min=0,
            help=f"Show only the first N keys. The default is {_TERMINAL_TOP} on a terminal; 0 is "
            "the default elsewhere.",
            show_default=False,
        ),
    ] = None,
    slots: Annotated[bool, typer.Option("--slots", help="Show concurrency limits only.")] = False,
    breakers: Annotated[
        bool, typer.Option("--breakers", help="Show circuit breakers only.")
    ] = False,
    pauses: Annotated[
        bool, typer.Option("--pauses", help="Show upstreams that have asked to wait only.")
    ] = False,
    shadow: Annotated[bool, typer.Option("--shadow", help="Show limits in shadow only.")] = False,
    interval: Annotated[float, typer.Option(min=0.1, help="For --watch, in seconds.")] = 1.0,
    by: Annotated[
        str | None,
        typer.Option(
            metavar="[origin]", help="Show the last minute of entries, a row for each origin."
        ),
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
    errors and response times (ms) where they are recorded. Of paced limits, the ms between two
    calls and the ms until the last promised start; of limits that warm up, the rate of now and the
    tokens, which are 0 when it is warm.

    Then the concurrency limits, with those who hold their slots, and the circuit breakers: their
    states, and the calls in their windows. What is wrong comes first: breakers that are not closed,
    exhausted limits, lost slots. The last line counts what is left out. With --json, only what
    --slots or --breakers asks for, or the limits.

    KEY is quoted for bash, so it can be copied into `reset`. In a terminal that is too narrow,
    columns are omitted; in a pipe nothing is omitted.

    With --minute or --by, what entries did in the last minute, of all keys that have any.
    """
    check_prefix(prefix)
    if shadow:
        prefix = shadow_prefix(prefix)
    selection = all_keys(prefix) if pattern is None else matching_keys(prefix, pattern)
    console = make_console()
    if top is None:
        top = _TERMINAL_TOP if has_size(console) and not as_json else 0
    where = (
        printable(repr(pattern)) if pattern else "any key",
        f"under the prefix {prefix!r} at {masked_url(url)}",
    )
    if by not in (None, "origin"):
        raise ConfigurationError(f"--by {by} is not known; the last minute is shown --by origin")
    if slots + breakers + pauses + (minute or by is not None) > 1:
        raise ConfigurationError(
            "--slots, --breakers, --pauses and --minute or --by each show nothing else: "
            "give one of them"
        )
    stream = not top and sort is None
    order = sort or Order.BLOCKED
    if minute or by is not None:
        if watch:
            raise ConfigurationError(
                "--watch cannot be combined with --minute or --by; leave it out"
            )
        minutes = Query(prefix, selection, order, top, stream, "minute")
        of_origins = " with an origin" if by is not None else ""
        no_entries = f"no entries{of_origins} on {where[0]} in the last minute {where[1]}"
        with open_servers(url) as servers:
            line = ProgressLine(servers)
            found = minutes.run(servers, on_names=lambda found: line.update(found.counts.names))
            rows = _minute_rows(line.clear_before(found.pages()), by is not None)
            if not as_json:
                _print_minute(rows, console, no_entries, by_origin=by is not None, by_second=minute)
            elif not _print_json(rows, minute_object):
                typer.echo(no_entries, err=True)
        return
    alone: dict[Shown, bool] = {"slots": slots, "breakers": breakers, "pauses": pauses}
    shown: Shown = next((kind for kind, is_asked in alone.items() if is_asked), "all")
    query = Query(prefix, selection, order, top, stream, shown)
    nothing = _KINDS[shown].nothing.format(" ".join(where))
    view = _View(query, console, f"{nothing}, or they are elsewhere (--prefix, --url)")
    if not watch:
        with open_servers(url) as servers:
            if as_json:
                view.print_json(servers)
            else:
                view.print_tables(servers)
        return
    with suppress(KeyboardInterrupt):  # the regular end of --watch
        if has_size(console) and not as_json:
            with TerminalView(console, view.terminal_lines) as terminal:
                watch_store(url, terminal, interval)
        else:
            once = view.print_json_line if as_json else view.print_tables_with_time
            watch_store(url, StreamView(once), interval)


def _note(found: Found, query: Query, shown: dict[str, int], omitted: Sequence[str]) -> str:
    """Return the last line: how many keys there are, and what is left out."""
    counts, keys, notes = found.counts, shown.get("all", 0), list[str]()
    if query.shown == "all":
        if keys < counts.keys_shown or (not found.is_streamed and keys == found.top):
            by_share = ", then by share used" if query.sort is not Order.KEY else ""
            by = f"{query.sort.value}{by_share}"
            notes.append(f"the first {keys:,} by {by}, of {counts.limits:,} limits in use")
        elif keys:
            notes.append(f"{keys:,} key{'s' if keys != 1 else ''}")
    for kind, total, wrong, name, what in (
        ("breakers", counts.breakers, counts.not_closed, "circuit breakers", "not closed"),
        ("slots", counts.slots, counts.with_lost, "keys with slots", "with lost ones"),
        ("pauses", counts.pauses, counts.paused, "upstreams that have asked to wait", "paused"),
    ):
        left, left_wrong = total - shown.get(kind, 0), wrong - shown.get(kind, 0)
        if left > 0 and query.shown in ("all", kind):
            wrong_text = f" ({left_wrong:,} {what})" if left_wrong > 0 else ""
            option = f": --{kind}" if query.shown == "all" else ""
            notes.append(f"{left:,} of {total:,} {name} left out{wrong_text}{option}")
    if counts.expired:
        notes.append(f"{counts.expired:,} expired during the scan")
    if counts.foreign:
        shadows = "in shadow (--shadow, of a whole process --prefix PREFIX:shadow-process)"
        notes.append(
            f"{counts.foreign:,} skipped: {shadows}, of another prefix, or not distwindow's"
        )
    if omitted:
        notes.append(f"too narrow for {', '.join(omitted)}")
    return "; ".join(notes)


class _View:
    """The answers to a query as text and as JSON, once or again and again."""

    def __init__(self, query: Query, console: Console, nothing: str) -> None:
        self._query, self._console, self._nothing = query, console, nothing
        self._is_drawn = False

    def _find(
        self, servers: Sequence[Server], at_most: int = 0, draw: Draw | None = None
    ) -> tuple[Found, Iterator[list[Any]]]:
        """Return a scan and its pages. While it ranks keys, what it has found so far is drawn,
        unless a terminal shows a table already.
        """
        line = ProgressLine(servers, enabled=not self._is_drawn)
        page_at = time.monotonic() + _FIRST_PAGE_S

        def on_names(found: Found) -> None:
            nonlocal page_at
            if draw is None or self._is_drawn or found.is_streamed:
                line.update(found.counts.names)
            elif time.monotonic() >= page_at:
                line.clear()
                draw(*self._fitted(found, found.first_so_far(), line.text(found.counts.names)))
                page_at = time.monotonic() + _PAGE_EVERY_S

        found = self._query.run(servers, at_most, on_names)
        return found, line.clear_before(found.pages())

    def print_tables(self, servers: Sequence[Server], above: str = "") -> None:
        """Print tables. That of a large store is printed page by page, and the others below it."""
        query, console = self._query, self._console
        width = console.width if has_size(console) else None
        shown, omitted = dict[str, int](), list[str]()
        live = Live(console=console, transient=True, auto_refresh=False, redirect_stdout=False)

        def draw(lines: list[Text], note: str) -> None:
            live.start()
            live.update(Group(*lines, Text(), Text(note, style="dim")), refresh=True)

        found, pages = self._find(servers, draw=draw if width is not None else None)

        def show(kind: Shown, items: Sequence[Any], after: Table | None = None) -> Table:
            if shown and after is None:
                console.print()
            table = _KINDS[kind].table(items, width, after)
            table.print_to(console)
            console.file.flush()
            shown[kind] = shown.get(kind, 0) + len(items)
            omitted.extend(name for name in table.omitted if name not in omitted)
            return table

        own, below = None, list[Section]()
        try:
            page = next(pages, [])
        finally:
            live.stop()
        console.print(above, end="")
        if query.shown == "all" and not found.is_streamed:
            sections = sections_of(found, page)
            at = [one.kind for one in sections].index("all") if page else len(sections)
            for one in sections[:at]:
                show(one.kind, one.items)
            below = sections[at + 1 :]
        while page:
            own = show(query.shown, page, own)
            page = next(pages, [])
        if query.shown == "all" and found.is_streamed:
            below = sections_of(found, [])
        for one in below:
            show(one.kind, one.items)
        note = _note(found, query, shown, omitted)
        if not shown:
            console.print(Text(self._nothing))
        if note and (shown or found.counts.foreign):
            console.print(Text(f"\n{note}" if shown else note, style="dim"))

    def print_tables_with_time(self, servers: Sequence[Server]) -> None:
        """Print the tables below the time of day, which stands there once the store answers."""
        self.print_tables(servers, time.strftime("%H:%M:%S\n"))
        print(flush=True)

    def print_json(self, servers: Sequence[Server]) -> None:
        """Print one array, with one object on a line, and what is left out on stderr."""
        query = self._query
        found, pages = self._find(servers)
        if not (count := _print_json(pages, _KINDS[query.shown].as_object)):
            typer.echo(self._nothing + _more(found), err=True)
        elif (count == found.top and not (query.top or query.stream)) or (
            query.shown == "all" and (found.counts.not_closed or found.counts.with_lost)
        ):
            note = _note(found, query, {query.shown: count}, ())
            typer.echo(f"distwindow: {note}", err=True)

    def print_json_line(self, servers: Sequence[Server]) -> None:
        """Print the array in one line."""
        _, pages = self._find(servers)
        _print_json(pages, _KINDS[self._query.shown].as_object, in_line=True)

    def terminal_lines(self, servers: Sequence[Server], draw: Draw) -> tuple[list[Text], str]:
        """Return as many rows as the terminal has room for, and the last line.

        Until there is a table the screen is empty, so what a long scan has found is drawn.
        """
        found, pages = self._find(servers, self._console.height, draw)
        items = [one for page in pages for one in page]
        self._is_drawn = True
        return self._fitted(found, items)

    def _fitted(
        self, found: Found, items: Sequence[Any], progress: str = ""
    ) -> tuple[list[Text], str]:
        """Return as many rows as the terminal has room for, and a note on what is left out, or
        how far a scan is that has not ended.
        """
        query, (width, height) = self._query, self._console.size
        if query.shown == "all":
            sections = sections_of(found, items)
        else:
            sections = [Section(query.shown, items, True)] if items else []
        if not sections:
            note = "" if progress else _note(found, query, {}, ())
            return [Text(progress or self._nothing)], note
        lines, note = list[Text](), ""
        for room in range(height, 0, -1):  # until all fits, with keys and notes of several lines
            cut = [
                one.cut(rows)
                for one, rows in zip(
                    sections, rows_of_each([o.rows() for o in sections], room), strict=True
                )
            ]
            tables = [_KINDS[one.kind].table(one.items, width, None) for one in cut]
            lines = [line for table in tables for line in (Text(), *table.styled_lines())][1:]
            shown = {str(one.kind): len(one.items) for one in cut}
            omitted = list(dict.fromkeys(name for table in tables for name in table.omitted))
            note = _note(found, query, shown, omitted)
            if progress:
                note = f"the first ones so far; {progress}"
            if len(lines) + 1 + len(Text(f"{note}{_FOOTER}").wrap(self._console, width)) <= height:
                break
        return lines, note


def _more(found: Found) -> str:
    """Return which options show what else was found, as the end of a message."""
    counts = {
        "--slots": found.counts.slots,
        "--breakers": found.counts.breakers,
        "--pauses": found.counts.pauses,
    }
    options = " and ".join(option for option, count in counts.items() if count)
    return f"; there is more with {options}" if options else ""


def _print_json(
    pages: Iterable[Iterable[Any]], as_object: Callable[[Any], Any], *, in_line: bool = False
) -> int:
    """Print one array, page by page, an object a line unless `in_line`; return how many."""
    opening, comma, closing = ("[", ", ", "]\n") if in_line else ("[\n ", ",\n ", "\n]\n")
    count = 0
    for page in pages:
        for one in page:
            sys.stdout.write((comma if count else opening) + json.dumps(as_object(one)))
            count += 1
        sys.stdout.flush()
    sys.stdout.write(closing if count else "[]\n")
    sys.stdout.flush()
    return count


def _minute_rows(pages: Iterable[list[KeyMinute]], by_origin: bool) -> Iterator[list[MinuteStats]]:
    """Yield what is to be shown of keys: of each all entries, or those of each of its origins."""
    for page in pages:
        rows = [row for key in page for row in (key.origins.values() if by_origin else [key.total])]
        if rows:
            yield rows


def _print_minute(
    pages: Iterable[Sequence[MinuteStats]],
    console: Console,
    no_entries: str,
    *,
    by_origin: bool,
    by_second: bool,
) -> None:
    table = None
    width = console.width if has_size(console) else None
    for rows in pages:
        table = minute_table(rows, width, table, by_origin=by_origin, by_second=by_second)
        table.print_to(console)
        console.file.flush()
    style = "dim" if table else ""
    console.print(Text("\nthe last minute, of entries only" if table else no_entries, style=style))
