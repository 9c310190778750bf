"""Tables for terminals and pipes. No cell is ever cut: what a table shows can be copied whole.

They are laid out here, not by rich: a hundred thousand lines take a second, and what goes into a
pipe is the same table without colours.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from rich.cells import cell_len
from rich.console import Console
from rich.text import Text

_GAP = "  "
_FIRST_COLUMN_SHARE = 0.6
"""How much of the width the first column may take before its longest cells get their own lines."""


@dataclass(frozen=True)
class Column:
    """A column of a table. `right` aligns to the right."""

    title: str
    right: bool = False
    drop: int = 0
    """Where the window is too narrow, columns are left out, the highest number first; 0: never."""
    name: str = ""
    """What to call it when it is left out, where it has no title."""


Cell = tuple[str, str]
"""Text and its style, which may be empty."""


class Table:
    """Rows of cells under titles. With a `width`, columns are left out until a line fits; a cell of
    the first column that is still too long stands on a line of its own above the rest of its row.
    """

    def __init__(
        self,
        columns: Sequence[Column],
        rows: Sequence[Sequence[Cell]],
        width: int | None = None,
    ) -> None:
        self._columns = columns
        self._rows = rows
        self._shown = list(range(len(columns)))
        self._widths = [
            max([cell_len(column.title), *(cell_len(row[i][0]) for row in rows)])
            for i, column in enumerate(columns)
        ]
        if width is not None:
            self._fit(width)

    @property
    def left_out(self) -> list[str]:
        """The columns for which the window is too narrow."""
        return [
            column.title or column.name
            for i, column in enumerate(self._columns)
            if i not in self._shown
        ]

    def texts(self) -> Iterator[Text]:
        """The lines with their styles, the title first."""
        yield Text(self._line([column.title for column in self._columns]), style="bold")
        for row in self._rows:
            first, style = row[0]
            alone = self._is_too_long(first)
            if alone:
                yield Text(first, style=style, no_wrap=True)
            cells = self._padded(["" if alone else first, *(text for text, _ in row[1:])])
            line = Text(no_wrap=True)
            for n, (i, cell) in enumerate(zip(self._shown, cells, strict=True)):
                line.append(_GAP if n else "").append(cell, row[i][1] or None)
            line.rstrip()
            yield line

    def lines(self) -> Iterator[str]:
        """The same without styles."""
        yield self._line([column.title for column in self._columns])
        for row in self._rows:
            cells = [text for text, _ in row]
            if self._is_too_long(cells[0]):
                yield cells[0]
                cells[0] = ""
            yield self._line(cells)

    def show(self, out: Console) -> None:
        """Print it."""
        if out.is_terminal:
            for text in self.texts():
                out.print(text, crop=False)
        else:
            for line in self.lines():
                print(line, file=out.file)

    def _fit(self, width: int) -> None:
        title = cell_len(self._columns[0].title)
        firsts = [cell_len(row[0][0]) for row in self._rows]
        wanted = max([title, *(one for one in firsts if one <= width * _FIRST_COLUMN_SHARE)])
        droppable = [i for i, column in enumerate(self._columns) if column.drop]
        for i in sorted(droppable, key=lambda i: -self._columns[i].drop):
            if wanted <= self._room(width):
                break
            self._shown.remove(i)
        room = self._room(width)
        self._widths[0] = max([title, *(one for one in firsts if one <= room)])

    def _room(self, width: int) -> int:
        """What the columns that are shown leave to the first one."""
        return width - sum(self._widths[i] + len(_GAP) for i in self._shown[1:])

    def _is_too_long(self, first: str) -> bool:
        # Its number of cells is at most twice that of its characters.
        return len(first) * 2 > self._widths[0] and cell_len(first) > self._widths[0]

    def _line(self, cells: Sequence[str]) -> str:
        return _GAP.join(self._padded(cells)).rstrip()

    def _padded(self, cells: Sequence[str]) -> list[str]:
        return [_pad(cells[i], self._widths[i], right=self._columns[i].right) for i in self._shown]


def _pad(cell: str, width: int, *, right: bool) -> str:
    space = " " * (width - cell_len(cell))
    return space + cell if right else cell + space
