"""Tables for terminals and pipes. No cell is ever truncated, so that keys can be copied whole.

They are laid out here and not by rich, because this way a hundred thousand lines take a second, and
a pipe gets the same table without colours.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from rich.cells import cell_len
from rich.console import Console
from rich.text import Text

_GAP = "  "
_FIRST_COLUMN_SHARE = 0.6
"""The share of the width that the first column may take. Longer cells get lines of their own."""


@dataclass(frozen=True)
class Column:
    """A column of a table."""

    title: str
    align_right: bool = False
    omit_order: int = 0
    """In a terminal that is too narrow, columns are omitted, the highest number first; 0: never."""
    name: str = ""
    """The name of an omitted column in the note below the table, where it has no title."""


Cell = tuple[str, str]
"""A text and its rich style, which may be empty."""


class Table:
    """Rows of cells below a line of titles.

    With a `width`, columns are omitted until a line fits. A cell of the first column that is still
    too long stands on a line of its own above the rest of its row. `after` is the table that was
    printed just before: with the same columns, this one continues it without titles.
    """

    def __init__(
        self,
        columns: Sequence[Column],
        rows: Sequence[Sequence[Cell]],
        width: int | None = None,
        *,
        after: Table | None = None,
    ) -> None:
        self._columns = columns
        self._rows = rows
        self._shown_columns = list(range(len(columns)))
        self._widths = [
            max([len(column.title), *(_width(row[i][0]) for row in rows)])
            for i, column in enumerate(columns)
        ]
        if width is not None:
            self._fit_width(width)
        self._continues = False
        if after is not None and after.titles == self.titles:
            self._continues = True
            self._widths = list(map(max, self._widths, after._widths))

    @property
    def titles(self) -> list[str]:
        """The titles of the shown columns."""
        return [self._columns[i].title for i in self._shown_columns]

    @property
    def omitted(self) -> list[str]:
        """The titles or names of the columns for which the width does not suffice."""
        return [
            column.title or column.name
            for i, column in enumerate(self._columns)
            if i not in self._shown_columns
        ]

    def styled_lines(self) -> Iterator[Text]:
        """Yield the lines with their styles, the titles first."""
        if not self._continues:
            yield Text(self._line([column.title for column in self._columns]), style="bold")
        for row in self._rows:
            first, style = row[0]
            own_line = self._is_too_long(first)
            if own_line:
                yield Text(first, style=style, no_wrap=True)
            cells = self._padded(["" if own_line else first, *(text for text, _ in row[1:])])
            line = Text(no_wrap=True)
            for n, (i, cell) in enumerate(zip(self._shown_columns, cells, strict=True)):
                line.append(_GAP if n else "").append(cell, row[i][1] or None)
            line.rstrip()
            yield line

    def plain_lines(self) -> Iterator[str]:
        """Yield the same lines without styles."""
        if not self._continues:
            yield self._line([column.title for column in self._columns])
        for row in self._rows:
            cells = [text for text, _ in row]
            if self._is_too_long(cells[0]):
                yield cells[0]
                cells[0] = ""
            yield self._line(cells)

    def print_to(self, console: Console) -> None:
        """Print the table: with styles on a terminal, else plain."""
        if console.is_terminal:
            for text in self.styled_lines():
                console.print(text, crop=False)
        else:
            for line in self.plain_lines():
                print(line, file=console.file)

    def _fit_width(self, width: int) -> None:
        title_width = len(self._columns[0].title)
        cell_widths = [_width(row[0][0]) for row in self._rows]
        most = width * _FIRST_COLUMN_SHARE
        wanted = max([title_width, *(cells for cells in cell_widths if cells <= most)])
        omissible = [i for i, column in enumerate(self._columns) if column.omit_order]
        for i in sorted(omissible, key=lambda i: -self._columns[i].omit_order):
            if wanted <= self._first_column_room(width):
                break
            self._shown_columns.remove(i)
        room = self._first_column_room(width)
        self._widths[0] = max([title_width, *(cells for cells in cell_widths if cells <= room)])

    def _first_column_room(self, width: int) -> int:
        """Return the columns of `width` that the other shown columns leave to the first one."""
        return width - sum(self._widths[i] + len(_GAP) for i in self._shown_columns[1:])

    def _is_too_long(self, first: str) -> bool:
        return _width(first) > self._widths[0]

    def _line(self, cells: Sequence[str]) -> str:
        return _GAP.join(self._padded(cells)).rstrip()

    def _padded(self, cells: Sequence[str]) -> list[str]:
        return [
            _pad(cells[i], self._widths[i], align_right=self._columns[i].align_right)
            for i in self._shown_columns
        ]


def _pad(cell: str, width: int, *, align_right: bool) -> str:
    padding = " " * (width - _width(cell))
    return padding + cell if align_right else cell + padding


def _width(text: str) -> int:
    return len(text) if text.isascii() else cell_len(text)
