"""What the commands print: text for a terminal, keys as words of a shell, and tables."""

from __future__ import annotations

import io
import math
import os
import re
import sys
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, TextIO

from rich.cells import cell_len
from rich.console import Console
from rich.text import Text

if TYPE_CHECKING:
    from typing_extensions import Buffer


class OutputError(OSError):
    """Standard output cannot be written."""


class _CheckedFile(io.FileIO):
    """A file that raises `OutputError` where a write fails, except for a closed pipe."""

    def write(self, data: Buffer, /) -> int:
        try:
            return super().write(data)
        except BrokenPipeError:  # `check_output` ends the command without a message
            raise
        except OSError as exc:
            raise OutputError(exc.errno, exc.strerror) from exc


def prepare_output() -> None:
    """Have stdout raise `OutputError`, and both streams escape what they cannot encode."""
    if sys.stdout is None:  # Python's value where the descriptor is closed: `distwindow >&-`
        raise OutputError("standard output is closed")
    if isinstance(sys.stdout, io.TextIOWrapper):
        raw = _CheckedFile(sys.stdout.fileno(), "wb", closefd=False)
        sys.stdout = io.TextIOWrapper(
            io.BufferedWriter(raw),
            encoding=sys.stdout.encoding,
            errors="backslashreplace",
            line_buffering=sys.stdout.line_buffering or sys.stdout.write_through,
        )
    if isinstance(sys.stderr, io.TextIOWrapper):
        sys.stderr.reconfigure(errors="backslashreplace")


def redirect_to_devnull(stream: TextIO | None) -> None:
    """Point the descriptor of `stream` to /dev/null, so that the flush at exit cannot fail."""
    with suppress(OSError, ValueError, AttributeError):  # in tests it is not a file
        devnull = os.open(os.devnull, os.O_WRONLY)
        os.dup2(devnull, stream.fileno())  # type: ignore[union-attr]  # the error is suppressed


PIPE_WIDTH = 160
"""Columns of text that goes into a pipe or a file, which has no width of its own."""

_PARTIAL_BLOCKS = " ▏▎▍▌▋▊▉█"
"""Blocks of 0 to 8 eighths of a character."""


class _Console(Console):
    def on_broken_pipe(self) -> None:
        # rich calls this while it handles the BrokenPipeError; its own version exits with code 1.
        raise


def make_console(file: TextIO | None = None) -> Console:
    """Return a console for output: colours on a terminal unless NO_COLOR is set, else plain."""
    console = _Console(file=file, highlight=False, soft_wrap=True)
    if not console.is_terminal and not os.environ.get("COLUMNS"):
        console.width = PIPE_WIDTH
    return console


def has_size(console: Console) -> bool:
    """True if `console` writes to a terminal, which has a width and a height.

    `Console.is_terminal` only tells whether to print colours: FORCE_COLOR makes it true for a pipe.
    """
    return console.is_terminal and console.file.isatty()


def printable(text: str) -> str:
    """Return `text` with what could move a cursor, or change the direction of writing, escaped."""
    if not text.isprintable():
        text = "".join(
            char if char.isprintable() else char.encode("unicode_escape").decode() for char in text
        )
    if supports_unicode() or text.isascii():
        return text
    return text.encode(sys.stdout.encoding or "ascii", "backslashreplace").decode(
        "ascii", "replace"
    )


def format_rate(value: float) -> str:
    """Return a rate in few digits: 0.25, 12.5, 1,234."""
    if value == 0:
        return "0"
    if value >= 100 or value == int(value):
        return f"{value:,.0f}"
    if value < 0.01:
        return "<0.01"
    return f"{value:.1f}" if value >= 1 else f"{value:.2g}"


def format_duration(seconds: float) -> str:
    """Return `0.83 s`, `2 min 5 s`, `3 h 20 min` or `4 d 2 h`. Seconds are rounded up."""
    if seconds < 100:
        return f"{math.ceil(round(seconds * 100, 6)) / 100:.2f} s"
    whole = math.ceil(seconds)
    for unit, unit_s, part, part_s in (("d", 86_400, "h", 3600), ("h", 3600, "min", 60)):
        if whole >= unit_s:
            rest = whole % unit_s // part_s
            count = whole // unit_s
            return f"{count} {unit} {rest} {part}" if rest else f"{count} {unit}"
    return f"{whole // 60} min {whole % 60} s"


def bar(share: float, width: int) -> str:
    """Return a bar of `width` characters, filled by `share`: empty at 0, full from 1 on."""
    eighths = round(min(1.0, max(0.0, share)) * width * 8)
    if share > 0:
        eighths = max(1, eighths)
    if not supports_unicode():
        full = -(-eighths // 8)
        return "#" * full + "." * (width - full)
    full, part = divmod(eighths, 8)
    return ("█" * full + (_PARTIAL_BLOCKS[part] if part else "")).ljust(width, "·")


def usage_color(share: float) -> str:
    """Return the colour for a limit of which this share is used."""
    return "red" if share >= 1 else "yellow" if share >= 0.75 else "green"


def supports_unicode() -> bool:
    """True if stdout can encode every character, which with LANG=C it cannot."""
    encoding = sys.stdout.encoding if sys.stdout is not None else ""
    return (encoding or "").lower().replace("-", "") in ("utf8", "utf16", "utf8sig")


# --------------------------------------------------------------------------------------------------
#
# Keys as text: quoted so that a shell reads the same key again, and the spellings of one key.
#
# The text of a key is that of `unescape` in `ring/key.py`: bytes that are not UTF-8 are surrogates.

_PLAIN = re.compile(r"[A-Za-z0-9_@%+=:,./-]+")
_UNQUOTED = re.compile(r"[A-Za-z0-9_@%+=:,./-]|[^\x00-\x7f]")
"""Characters that have no special meaning in bash."""
_SHORT_ESCAPES = {"\n": "\\n", "\t": "\\t", "\r": "\\r", "\\": "\\\\", "'": "\\'"}


def shell_word(text: str) -> str:
    """Return the key of this text as one word of bash that is safe to print.

    The word is bare where nothing needs quoting, else in single quotes. A character that could
    harm a terminal, or that the output cannot encode, makes it `$'...'` with escapes. These are
    escapes of bytes, so they mean the same in every locale.
    """
    if _PLAIN.fullmatch(text):  # as most keys are
        return text
    # An argument cannot contain NUL: it is spelled as in the names of Redis keys.
    text = text.replace("\0", "%00")
    if not all(map(_is_displayable, text)):
        return "$'" + "".join(map(_ansi_c_quoted, text)) + "'"
    if text and all(map(_UNQUOTED.match, text)):
        return text
    return "'" + text.replace("'", "'\"'\"'") + "'"


def json_text(text: str) -> str:
    """Return the key of this text for JSON, where many readers refuse lone surrogates."""
    return text.encode("utf-8", "surrogateescape").decode("utf-8", "backslashreplace")


def spellings(text: str) -> set[str]:
    """Return the texts that name the key of this text: in commands, in tables and in JSON."""
    return {text, text.replace("\0", "%00"), json_text(text)}


def _is_displayable(char: str) -> bool:
    return char.isprintable() and (char.isascii() or supports_unicode())


def _ansi_c_quoted(char: str) -> str:
    """Return the character as it is written inside `$'...'`, which bash calls ANSI-C quoting."""
    if char in _SHORT_ESCAPES:
        return _SHORT_ESCAPES[char]
    if _is_displayable(char):
        return char
    return "".join(f"\\x{byte:02x}" for byte in char.encode("utf-8", "surrogateescape"))


# --------------------------------------------------------------------------------------------------
#
# Tables for terminals and pipes. No cell is ever truncated, so that keys can be copied whole.
#
# They are laid out here and not by rich, because this way a hundred thousand lines take a second,
# and a pipe gets the same table without colours.

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
