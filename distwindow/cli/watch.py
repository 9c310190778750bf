"""`stats --watch`: looks at a store again and again, also after a time in which it was away."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Protocol

from rich.cells import chop_cells
from rich.console import Console, Group
from rich.live import Live
from rich.text import Text

from .errors import complain, explained_outage, one_line
from .render import duration
from .servers import Server, servers

if TYPE_CHECKING:
    from typing_extensions import Self

_RETRY_S = 1.0
"""While the store is away, it is tried at least this often, and the age of the table is shown."""


class View(Protocol):
    """Where people or programs see what a look finds."""

    def look(self, nodes: Sequence[Server]) -> None:
        """Ask the servers, and show what they hold."""

    def away(self, reason: str) -> None:
        """Say that the store does not answer. Called again for each attempt that fails."""


def watch_store(
    url: str, view: View, interval: float, sleep: Callable[[float], None] = time.sleep
) -> None:
    """Look every `interval` seconds, until an exception ends it.

    A store that has answered once and then does not is tried again. One that has never answered is
    an error at once, since its URL may be wrong, and so is what trying again cannot mend.
    """
    answered = False
    while True:
        try:
            # Opened anew after each failure: the primaries of a cluster may be others by then.
            with servers(url) as nodes:
                while True:
                    view.look(nodes)
                    answered = True
                    sleep(interval)
        except Exception as exc:
            reason = explained_outage(exc, url) if answered else None
            if reason is None:
                raise
            view.away(one_line(reason, url))
        sleep(min(interval, _RETRY_S))


class Stream:
    """For a pipe or a file: `show` prints one look. Outages are told on stderr, once each."""

    def __init__(self, show: Callable[[Sequence[Server]], None]) -> None:
        self._show = show
        self._away = False

    def look(self, nodes: Sequence[Server]) -> None:
        """See `View`."""
        self._show(nodes)
        if self._away:
            self._away = False
            complain("the store answers again", "")

    def away(self, reason: str) -> None:
        """See `View`."""
        if not self._away:
            self._away = True
            complain(f"{reason}; trying again", "")


class Screen:
    """For a terminal: the whole window. The last table stays while the store is away, with its age.

    `make` asks the servers, and returns the lines of a table and a note on them.
    """

    def __init__(
        self,
        out: Console,
        make: Callable[[Sequence[Server]], tuple[list[Text], str]],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._out, self._make, self._clock = out, make, clock
        self._lines: list[Text] = []
        self._shown_at = 0.0
        self._live = Live(console=out, screen=True, auto_refresh=False, redirect_stdout=False)

    def __enter__(self) -> Self:
        self._live.__enter__()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        exc: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._live.__exit__(kind, exc, trace)

    def look(self, nodes: Sequence[Server]) -> None:
        """See `View`."""
        self._lines, note = self._make(nodes)
        self._shown_at = self._clock()
        self._draw(f"{note}  (Ctrl-C ends)", "dim")

    def away(self, reason: str) -> None:
        """See `View`."""
        age = self._clock() - self._shown_at
        old = f"{age:.0f} s" if age < 100 else duration(age)
        self._draw(f"{reason}; this table is {old} old; trying again  (Ctrl-C ends)", "red")

    def _draw(self, note: str, style: str) -> None:
        width, height = self._out.size
        foot = Text(f"{time.strftime('%H:%M:%S')}  {note}", style=style).wrap(self._out, width)
        lines = [part for line in self._lines for part in _folded(line, width)]
        room = max(0, height - len(foot) - 1)
        self._live.update(Group(*lines[:room], Text(), *foot), refresh=True)


def _folded(line: Text, width: int) -> list[Text]:
    """A line that is wider than the window, such as a long key, in as many lines as it takes."""
    if line.cell_len <= width:
        return [line]
    return [Text(part, style=line.style, no_wrap=True) for part in chop_cells(line.plain, width)]
