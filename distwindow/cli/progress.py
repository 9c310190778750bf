"""The progress of a long scan, on stderr."""

from __future__ import annotations

import sys
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from typing_extensions import Self

_FIRST_AFTER_S = 0.3
_INTERVAL_S = 0.1


class ProgressLine:
    """A line on stderr that counts scanned names. It is shown only where the scan takes long, and
    erased at the end of the `with`.
    """

    def __init__(self, *, enabled: bool = True) -> None:
        self._next_at = time.monotonic() + _FIRST_AFTER_S
        self._shown = False
        self._enabled = enabled and sys.stderr.isatty()

    def update(self, scanned: int) -> None:
        """Show the number of names so far, unless the line was updated a moment ago."""
        now = time.monotonic()
        if self._enabled and now >= self._next_at:
            self._next_at = now + _INTERVAL_S
            self._shown = True
            sys.stderr.write(f"\r  scanning: {scanned:,} names so far ")
            sys.stderr.flush()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._shown:
            sys.stderr.write("\r\x1b[K")
            sys.stderr.flush()
