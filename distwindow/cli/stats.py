"""`distwindow stats`: the current windows of keys."""

from __future__ import annotations

from contextlib import suppress
from typing import Annotated

import typer

from distwindow import ConfigurationError

from ..protocol.keys import check_prefix
from ..store.redis.urls import masked_url
from .errors import report_errors
from .minute import MinuteQuery, check_no_watch, print_minute
from .options import DEFAULT_PREFIX, DEFAULT_URL, JsonOption, PrefixOption, UrlOption
from .ranking import Order
from .render import has_size, make_console, printable
from .selection import all_keys, matching_keys
from .servers import open_servers
from .stats_query import Query, Shown
from .stats_view import print_once, watch_limits

_TERMINAL_TOP = 50
_NOTHING: dict[Shown, tuple[str, str]] = {
    "all": ("no limits", "no call was counted within their windows"),
    "slots": ("no slots are held", "no call is under way"),
    "breakers": ("no circuit breakers", "no call has ended within their windows"),
}
"""What is said where nothing is found, and why that may be."""


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

    Below are the concurrency limits, with those who hold their slots, and the circuit breakers:
    their states, and the calls in their windows. With --json, only what --slots or --breakers
    asks for, or the limits.

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
    if minute or by is not None:
        check_no_watch(watch=watch)
        views = MinuteQuery(prefix, selection, sort, top, by is not None, minute)
        of_origins = " with an origin" if by is not None else ""
        no_entries = f"no entries{of_origins} on {where[0]} in the last minute {where[1]}"
        with open_servers(url) as servers:
            print_minute(views, servers, console, no_entries, as_json=as_json)
        return
    shown: Shown = "slots" if slots else "breakers" if breakers else "all"
    query = Query(prefix, selection, sort, top, shown)
    kind, why = _NOTHING[shown]
    nothing = f"{kind} on {where[0]} {where[1]}: {why}, or they are elsewhere (--prefix, --url)"
    if not watch:
        with open_servers(url) as servers:
            print_once(query.run(servers), console, nothing, query, as_json=as_json)
        return
    with suppress(KeyboardInterrupt):  # the regular end of --watch
        watch_limits(url, query, console, nothing, interval, as_json=as_json)
