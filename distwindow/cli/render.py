"""What the commands print to, and how: text that is safe for a terminal, and keys as words of a
shell, which reads the same key again.
"""

from __future__ import annotations

import io
import math
import os
import re
import sys
from contextlib import suppress
from typing import TYPE_CHECKING, TextIO

from rich.console import Console

if TYPE_CHECKING:
    from typing_extensions import Buffer

PIPE_WIDTH = 160
"""Columns of text that goes into a pipe or a file, which has no width of its own."""
_PARTIAL_BLOCKS = " ▏▎▍▌▋▊▉█"
"""Blocks of 0 to 8 eighths of a character."""
_PLAIN = re.compile(r"[A-Za-z0-9_@%+=:,./-]+")
_UNQUOTED = re.compile(r"[A-Za-z0-9_@%+=:,./-]|[^\x00-\x7f]")
"""Characters that have no special meaning in bash."""
_SHORT_ESCAPES = {"\n": "\\n", "\t": "\\t", "\r": "\\r", "\\": "\\\\", "'": "\\'"}


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


def _is_displayable(char: str) -> bool:
    return char.isprintable() and (char.isascii() or supports_unicode())


def _ansi_c_quoted(char: str) -> str:
    """Return the character as it is written inside `$'...'`, which bash calls ANSI-C quoting."""
    if char in _SHORT_ESCAPES:
        return _SHORT_ESCAPES[char]
    if _is_displayable(char):
        return char
    return "".join(f"\\x{byte:02x}" for byte in char.encode("utf-8", "surrogateescape"))
