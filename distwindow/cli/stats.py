"""`distwindow stats`: the current windows of keys. The command, and how it shows what is found."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Annotated, Any, NamedTuple

import typer
from rich.console import Console, Group
from rich.live import Live
from rich.text import Text

from distwindow import ConfigurationError

from ..protocol.keys import check_prefix
from ..store.redis.urls import masked_url
from .breakers import breaker_object, breaker_table
from .errors import report_errors
from .limits import limits_object, limits_table
from .minute import MinuteQuery, check_no_watch, print_minute
from .options import DEFAULT_PREFIX, DEFAULT_URL, JsonOption, PrefixOption, UrlOption
from .render import has_size, make_console, printable
from .selection import all_keys, matching_keys
from .servers import Server, open_servers
from .slots import slots_object, slots_table
from .stats_query import MOST_RANKED, Found, Order, Query, Shown, print_json, used_share
from .table import Table
from .watch import StreamView, TerminalView, watch_store

_TERMINAL_TOP = 50
_FOOTER = "00:00:00    (Ctrl-C ends)"
"""What `--watch` puts around the last line."""
_NOTHING: dict[Shown, tuple[str, str]] = {
    "all": ("no limits", "no call was counted within their windows"),
    "slots": ("no slots are held", "no call is under way"),
    "breakers": ("no circuit breakers", "no call has ended within their windows"),
}
"""What is said where nothing is found, and why that may be."""
_OBJECTS: dict[Shown, Callable[[Any], dict[str, Any]]] = {
    "all": limits_object,
    "slots": slots_object,
    "breakers": breaker_object,
}
_TABLES: dict[Shown, Callable[[Any, int | None, Table | None], Table]] = {
    "all": limits_table,
    "slots": slots_table,
    "breakers": breaker_table,
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
    if slots + breakers + (minute or by is not None) > 1:
        raise ConfigurationError(
            "--slots, --breakers and --minute or --by each show nothing else: give one of them"
        )
    stream = not top and sort is None
    order = sort or Order.BLOCKED
    if minute or by is not None:
        check_no_watch(watch=watch)
        views = MinuteQuery(prefix, selection, order, top, stream, by is not None, minute)
        of_origins = " with an origin" if by is not None else ""
        no_entries = f"no entries{of_origins} on {where[0]} in the last minute {where[1]}"
        with open_servers(url) as servers:
            print_minute(views, servers, console, no_entries, as_json=as_json)
        return
    shown: Shown = "slots" if slots else "breakers" if breakers else "all"
    query = Query(prefix, selection, order, top, stream, shown)
    kind, why = _NOTHING[shown]
    nothing = f"{kind} on {where[0]} {where[1]}: {why}, or they are elsewhere (--prefix, --url)"
    view = _View(query, console, nothing)
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


class _Section(NamedTuple):
    """A table of one kind, and what is in it."""

    kind: Shown
    items: Sequence[Any]
    is_wrong: bool

    def rows(self) -> int:
        return (
            sum(len(one.windows) for one in self.items) if self.kind == "all" else len(self.items)
        )

    def cut(self, rows: int) -> _Section:
        """Return no more than this many rows, but at least one item."""
        count = len(self.items)
        while count > 1 and self._replace(items=self.items[:count]).rows() > rows:
            count -= 1
        return self._replace(items=self.items[:count])


def _sections(found: Found, keys: Sequence[Any]) -> list[_Section]:
    """Return what is to be shown of all kinds: first what is wrong."""
    breakers, slots = found.breakers.ranked(), found.slots.ranked()
    exhausted = any(w.blocked or used_share(w) >= 1 for one in keys for w in one.windows)
    wrong = [
        _Section("breakers", breakers, found.counts.not_closed > 0),
        _Section("all", keys, exhausted),
        _Section("slots", slots, found.counts.with_lost > 0),
    ]
    right = [wrong[1], wrong[2], wrong[0]]
    ordered = [one for one in wrong if one.is_wrong] + [one for one in right if not one.is_wrong]
    return [one for one in ordered if one.items]


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
    ):
        left, left_wrong = total - shown.get(kind, 0), wrong - shown.get(kind, 0)
        if left > 0 and query.shown in ("all", kind):
            wrong_text = f" ({left_wrong:,} {what})" if left_wrong > 0 else ""
            option = f": --{kind}" if query.shown == "all" else ""
            notes.append(f"{left:,} of {total:,} {name} left out{wrong_text}{option}")
    if counts.expired:
        notes.append(f"{counts.expired:,} expired during the scan")
    if counts.foreign:
        notes.append(f"{counts.foreign:,} skipped: not distwindow's")
    if omitted:
        notes.append(f"too narrow for {', '.join(omitted)}")
    return "; ".join(notes)


class _View:
    """The answers to a query as text and as JSON, once or again and again."""

    def __init__(self, query: Query, console: Console, nothing: str) -> None:
        self._query, self._console, self._nothing = query, console, nothing
        self._is_drawn = False

    def print_tables(self, servers: Sequence[Server], above: str = "") -> None:
        """Print tables. That of a large store is printed page by page, and the others below it."""
        query, console = self._query, self._console
        width = console.width if has_size(console) else None
        shown, omitted = dict[str, int](), list[str]()
        live = Live(console=console, transient=True, auto_refresh=False, redirect_stdout=False)

        def show_page(found: Found, page: Sequence[Any]) -> None:
            lines, note = self._fitted(found, page, so_far=True)
            live.start()
            live.update(Group(*lines, Text(), Text(note, style="dim")), refresh=True)

        found = query.run(servers, show_page=show_page if width is not None else None)

        def show(kind: Shown, items: Sequence[Any], after: Table | None = None) -> Table:
            if shown and after is None:
                console.print()
            table = _TABLES[kind](items, width, after)
            table.print_to(console)
            console.file.flush()
            shown[kind] = shown.get(kind, 0) + len(items)
            omitted.extend(name for name in table.omitted if name not in omitted)
            return table

        own, below = None, list[_Section]()
        pages = found.pages()
        try:
            page = next(pages, [])
        finally:
            live.stop()
        console.print(above, end="")
        if query.shown == "all" and not found.is_streamed:
            sections = _sections(found, page)
            at = [one.kind for one in sections].index("all") if page else len(sections)
            for one in sections[:at]:
                show(one.kind, one.items)
            below = sections[at + 1 :]
        while page:
            own = show(query.shown, page, own)
            page = next(pages, [])
        if query.shown == "all" and found.is_streamed:
            below = _sections(found, [])
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
        found = query.run(servers)
        if not (count := print_json(found.pages(), _OBJECTS[query.shown])):
            typer.echo(self._nothing + _more(found), err=True)
        elif (count == found.top and not (query.top or query.stream)) or (
            query.shown == "all" and (found.counts.not_closed or found.counts.with_lost)
        ):
            note = _note(found, query, {query.shown: count}, ())
            typer.echo(f"distwindow: {note}", err=True)

    def print_json_line(self, servers: Sequence[Server]) -> None:
        """Print the array in one line."""
        print_json(self._query.run(servers).pages(), _OBJECTS[self._query.shown], in_line=True)

    def terminal_lines(
        self, servers: Sequence[Server], draw: Callable[[list[Text], str], None]
    ) -> tuple[list[Text], str]:
        """Return as many rows as the terminal has room for, and the last line.

        Until there is a table the screen is empty, so what a long scan has found is drawn.
        """

        def show_page(found: Found, page: Sequence[Any]) -> None:
            draw(*self._fitted(found, page, so_far=True))

        found = self._query.run(
            servers,
            self._console.height,
            progress=not self._is_drawn,
            show_page=None if self._is_drawn else show_page,
        )
        items = [one for page in found.pages() for one in page]
        self._is_drawn = True
        return self._fitted(found, items)

    def _fitted(
        self, found: Found, items: Sequence[Any], *, so_far: bool = False
    ) -> tuple[list[Text], str]:
        """Return as many rows as the terminal has room for, and a note on what is left out."""
        query, (width, height) = self._query, self._console.size
        if query.shown == "all":
            sections = _sections(found, items)
        else:
            sections = [_Section(query.shown, items, True)] if items else []
        if not sections:
            nothing = found.progress_text() if so_far else self._nothing
            return [Text(nothing)], "" if so_far else _note(found, query, {}, ())
        lines, note = list[Text](), ""
        for room in range(height, 0, -1):  # until all fits, with keys and notes of several lines
            cut = [
                one.cut(rows)
                for one, rows in zip(
                    sections, _rooms([o.rows() for o in sections], room), strict=True
                )
            ]
            tables = [_TABLES[one.kind](one.items, width, None) for one in cut]
            lines = [line for table in tables for line in (Text(), *table.styled_lines())][1:]
            shown = {str(one.kind): len(one.items) for one in cut}
            omitted = list(dict.fromkeys(name for table in tables for name in table.omitted))
            note = _note(found, query, shown, omitted)
            if so_far:
                note = f"the first ones so far; {found.progress_text()}"
            if len(lines) + 1 + len(Text(f"{note}{_FOOTER}").wrap(self._console, width)) <= height:
                break
        return lines, note


def _rooms(wanted: Sequence[int], room: int) -> list[int]:
    """Return how many rows of `room` each gets: equal parts, but none more than it wants."""
    rooms, left = [0] * len(wanted), room
    for done, i in enumerate(sorted(range(len(wanted)), key=lambda i: wanted[i])):
        rooms[i] = min(wanted[i], left // (len(wanted) - done))
        left -= rooms[i]
    return rooms


def _more(found: Found) -> str:
    """Return which options show what else was found, as the end of a message."""
    options = [
        option
        for option, count in (
            ("--slots", found.counts.slots),
            ("--breakers", found.counts.breakers),
        )
        if count
    ]
    return f"; there is more with {' and '.join(options)}" if options else ""
