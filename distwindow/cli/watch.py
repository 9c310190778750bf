"""`stats --watch`: repeated queries of a store, which go on after an outage of the store."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from rich.cells import chop_cells
from rich.console import Console, Group
from rich.live import Live
from rich.text import Text

from ..inspect.servers import Server, open_servers
from .command import describe_outage, print_error, single_line
from .render import format_duration

if TYPE_CHECKING:
    from typing_extensions import Self


_RETRY_S = 1.0
"""During an outage, the longest time between two attempts, and between updates of the age shown."""


Draw = Callable[[list[Text], str], None]
"""Shows the lines of a table, and a note below it."""


class View(Protocol):
    """The output of `stats --watch`."""

    def refresh(self, servers: Sequence[Server]) -> None:
        """Query the servers, and show the result."""

    def show_outage(self, reason: str) -> None:
        """Show that the store does not answer. Called for each attempt that fails."""


def watch_store(
    url: str, view: View, interval: float, sleep: Callable[[float], None] = time.sleep
) -> None:
    """Refresh `view` every `interval` seconds, until an exception ends it.

    After a first success, an outage is shown and the store is tried again. Before it, an outage is
    raised at once, because the URL may be wrong. Errors that another attempt cannot resolve are
    always raised.
    """
    succeeded = False
    while True:
        try:
            # Connect anew after each failure: a cluster may have other primaries by then.
            with open_servers(url) as servers:
                while True:
                    view.refresh(servers)
                    succeeded = True
                    sleep(interval)
        except Exception as exc:
            reason = describe_outage(exc, url) if succeeded else None
            if reason is None:
                raise
            view.show_outage(single_line(reason, url))
        sleep(min(interval, _RETRY_S))


class StreamView:
    """The output into a pipe or a file. An outage's beginning and end are a line each on stderr."""

    def __init__(self, print_result: Callable[[Sequence[Server]], None]) -> None:
        self._print_result = print_result
        self._in_outage = False

    def refresh(self, servers: Sequence[Server]) -> None:
        self._print_result(servers)
        if self._in_outage:
            self._in_outage = False
            print_error("the store answers again", "")

    def show_outage(self, reason: str) -> None:
        if not self._in_outage:
            self._in_outage = True
            print_error(f"{reason}; trying again", "")


class TerminalView:
    """The output on a whole terminal. During an outage the last table stays, with its age.

    `make_lines` queries the servers, and returns the lines of a table and a note on them. Until
    then it may have others drawn.
    """

    def __init__(
        self,
        console: Console,
        make_lines: Callable[[Sequence[Server], Draw], tuple[list[Text], str]],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._console, self._make_lines, self._clock = console, make_lines, clock
        self._lines: list[Text] = []
        self._refreshed_at = 0.0
        self._live = Live(console=console, screen=True, auto_refresh=False, redirect_stdout=False)

    def __enter__(self) -> Self:
        self._live.__enter__()
        return self

    def __exit__(self, *exc: Any) -> None:
        self._live.__exit__(*exc)

    def refresh(self, servers: Sequence[Server]) -> None:
        self._show(*self._make_lines(servers, self._show))

    def _show(self, lines: list[Text], note: str) -> None:
        self._lines, self._refreshed_at = lines, self._clock()
        self._draw(f"{note}  (Ctrl-C ends)", "dim")

    def show_outage(self, reason: str) -> None:
        age_s = self._clock() - self._refreshed_at
        age = f"{age_s:.0f} s" if age_s < 100 else format_duration(age_s)
        self._draw(f"{reason}; this table is {age} old; trying again  (Ctrl-C ends)", "red")

    def _draw(self, note: str, style: str) -> None:
        width, height = self._console.size
        footer = Text(f"{time.strftime('%H:%M:%S')}  {note}", style=style)
        footer_lines = footer.wrap(self._console, width)
        lines = [part for line in self._lines for part in _folded(line, width)]
        room = max(0, height - len(footer_lines) - 1)
        self._live.update(Group(*lines[:room], Text(), *footer_lines), refresh=True)


def _folded(line: Text, width: int) -> list[Text]:
    """Return the line, split where it is wider than the terminal, as one with a long key may be."""
    if line.cell_len <= width:
        return [line]
    return [Text(part, style=line.style, no_wrap=True) for part in chop_cells(line.plain, width)]
