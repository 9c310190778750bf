"""The progress of a long scan, on stderr."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, suppress
from typing import TypeVar

import redis

from ..inspect.servers import Server

Page = TypeVar("Page")

_TERMINAL_S = 0.3, 0.1
"""How long a scan takes before its progress is shown, and the time between two updates."""
_PIPE_S = 1.0, 5.0


class ProgressLine(AbstractContextManager["ProgressLine"]):
    """Counts scanned names on stderr, only where the scan takes long: on a terminal in a line that
    is erased before other output and at the end of the `with`, else in a line each 5 s.
    """

    def __init__(self, servers: Sequence[Server], *, enabled: bool = True) -> None:
        self._servers, self._total = servers, ""
        self._enabled = enabled and sys.stderr is not None
        self._is_terminal = self._enabled and sys.stderr.isatty()
        first_s, self._interval_s = _TERMINAL_S if self._is_terminal else _PIPE_S
        self._next_at = time.monotonic() + first_s
        self._shown = False

    def update(self, scanned: int) -> None:
        """Show the number of names so far, unless it was shown a moment ago."""
        now = time.monotonic()
        if not self._enabled or now < self._next_at:
            return
        self._next_at = now + self._interval_s
        text = self.text(scanned)
        self._shown = self._is_terminal
        sys.stderr.write(f"\r  {text} " if self._is_terminal else f"distwindow: {text}\n")
        sys.stderr.flush()

    def text(self, scanned: int) -> str:
        """Return how many names are scanned, and how many keys there are."""
        if not self._total:
            self._total = " so far"
            with suppress(redis.ResponseError):  # the user of the URL may lack the right
                total = sum(server.client.dbsize() for server in self._servers)
                self._total = f"; the store has {total:,} keys"
        return f"scanning: {scanned:,} names{self._total}"

    def clear(self) -> None:
        """Erase the line from a terminal, which may be the one that is printed to next."""
        if self._shown:
            self._shown = False
            sys.stderr.write("\r\x1b[K")
            sys.stderr.flush()

    def clear_before(self, pages: Iterable[Page]) -> Iterator[Page]:
        """Yield `pages`, which are printed, each after the line is erased."""
        with self:
            for page in pages:
                self.clear()
                yield page

    def __exit__(self, *_: object) -> None:
        self.clear()
