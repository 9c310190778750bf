"""How things look: text that is safe for a terminal, durations, bars, and tables of fixed width.

The tables are laid out here, not by rich: a hundred thousand lines take a second, and what goes
into a pipe is the same table without colours.
"""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TextIO

from rich.cells import cell_len, set_cell_size
from rich.console import Console
from rich.text import Text

PIPE_WIDTH = 160
"""Columns of a table that goes into a pipe or a file, where no window sets them."""

_EIGHTHS = " ▏▎▍▌▋▊▉█"
_GAP = "  "


def console(file: TextIO | None = None) -> Console:
    """Where people look: colours on a terminal unless NO_COLOR, plain text in a pipe."""
    out = Console(file=file, highlight=False, soft_wrap=True)
    if not out.is_terminal and not os.environ.get("COLUMNS"):
        out.width = PIPE_WIDTH
    return out


def printable(text: str) -> str:
    """`text` with everything escaped that could move a cursor or turn writing around."""
    if not text.isprintable():
        text = "".join(
            char if char.isprintable() else char.encode("unicode_escape").decode() for char in text
        )
    if blocks() or text.isascii():
        return text
    return text.encode(sys.stdout.encoding or "ascii", "backslashreplace").decode(
        "ascii", "replace"
    )


def shortened(text: str, most: int) -> str:
    """`text` in at most `most` cells, its middle left out where it is longer."""
    if (len(text) <= most and text.isascii()) or cell_len(text) <= most:
        return text
    tail = most // 3
    # Of a name, the start says more than the end, and the end more than the middle.
    end = text[-tail:] if tail else ""
    while cell_len(end) > tail:
        end = end[1:]
    return set_cell_size(text, most - 1 - cell_len(end)).rstrip() + ellipsis() + end


def number(value: float) -> str:
    """A rate in few digits: 0.25, 12.5, 1,234."""
    if value == 0:
        return "0"
    if value >= 100 or value == int(value):
        return f"{value:,.0f}"
    if value < 0.01:
        return "<0.01"
    return f"{value:.1f}" if value >= 1 else f"{value:.2g}"


def duration(seconds: float) -> str:
    """`0.83 s`, `2 min 5 s`, `3 h 20 min`, `4 d 2 h`; never less than it is."""
    if seconds < 100:
        return f"{math.ceil(round(seconds * 100, 6)) / 100:.2f} s"
    whole = math.ceil(seconds)
    for unit, size, part, part_size in (("d", 86_400, "h", 3600), ("h", 3600, "min", 60)):
        if whole >= size:
            rest = whole % size // part_size
            return f"{whole // size} {unit} {rest} {part}" if rest else f"{whole // size} {unit}"
    return f"{whole // 60} min {whole % 60} s"


def bar(share: float, width: int) -> str:
    """A bar that is full at 1."""
    eighths = round(min(1.0, max(0.0, share)) * width * 8)
    if share > 0:
        eighths = max(1, eighths)
    if not blocks():
        full = -(-eighths // 8)
        return "#" * full + "." * (width - full)
    full, part = divmod(eighths, 8)
    return ("█" * full + (_EIGHTHS[part] if part else "")).ljust(width, "·")


def heat(share: float) -> str:
    """The colour of something used to this share."""
    return "red" if share >= 1 else "yellow" if share >= 0.75 else "green"


def blocks() -> bool:
    """Can this output say block characters, and all others? With LANG=C it cannot."""
    return (sys.stdout.encoding or "").lower().replace("-", "") in ("utf8", "utf16", "utf8sig")


def ellipsis() -> str:
    """The sign for what is left out."""
    return "…" if blocks() else "~"


@dataclass(frozen=True)
class Column:
    """A column of a table. `right` aligns to the right; `flexible` gives way in a narrow window."""

    title: str
    right: bool = False
    flexible: int = 0
    """The least width that it gives way to; 0: it never does."""


Cell = tuple[str, str]
"""Text and its style, which may be empty."""


class Table:
    """Rows of cells under titles, in at most `width` columns of a terminal."""

    def __init__(self, columns: Sequence[Column], rows: Sequence[Sequence[Cell]], width: int):
        self._columns = columns
        self._rows = rows
        self._widths = [
            max([cell_len(column.title), *(cell_len(row[i][0]) for row in rows)])
            for i, column in enumerate(columns)
        ]
        over = sum(self._widths) + len(_GAP) * (len(columns) - 1) - width
        for i, column in enumerate(columns):
            if over > 0 and column.flexible:
                give = min(over, max(0, self._widths[i] - column.flexible))
                self._widths[i] -= give
                over -= give

    def texts(self, rows: Iterable[Sequence[Cell]] | None = None) -> Iterator[Text]:
        """The lines with their styles, the title first."""
        yield Text(self._line([column.title for column in self._columns]), style="bold")
        for row in self._rows if rows is None else rows:
            cells = self._fitted([text for text, _ in row])
            line = Text(no_wrap=True, overflow="crop")
            for i, (cell, (_, style)) in enumerate(zip(cells, row, strict=True)):
                line.append(_GAP if i else "").append(cell, style or None)
            line.rstrip()
            yield line

    def lines(self) -> Iterator[str]:
        """The same without styles."""
        yield self._line([column.title for column in self._columns])
        for row in self._rows:
            yield self._line([text for text, _ in row])

    def show(self, out: Console) -> None:
        """Print it."""
        if out.is_terminal:
            for text in self.texts():
                out.print(text, crop=False)
        else:
            for line in self.lines():
                print(line, file=out.file)

    def _line(self, cells: list[str]) -> str:
        return _GAP.join(self._fitted(cells)).rstrip()

    def _fitted(self, cells: list[str]) -> list[str]:
        return [
            _fit(cell, width, right=column.right)
            for cell, width, column in zip(cells, self._widths, self._columns, strict=True)
        ]


def _fit(cell: str, width: int, *, right: bool) -> str:
    cell = shortened(cell, width)
    space = " " * (width - cell_len(cell))
    return space + cell if right else cell + space
