"""Text for terminals and pipes: escaped text, numbers, durations and bars."""

from __future__ import annotations

import math
import os
import sys
from typing import TextIO

from rich.console import Console

PIPE_WIDTH = 160
"""Columns of text that goes into a pipe or a file, which has no width of its own."""

_PARTIAL_BLOCKS = " ▏▎▍▌▋▊▉█"
"""Blocks of 0 to 8 eighths of a character."""


class _Console(Console):
    def on_broken_pipe(self) -> None:
        # rich calls this while it handles the BrokenPipeError; its own version exits with code 1.
        raise


def make_console(file: TextIO | None = None) -> Console:
    """Return a console for the output of a command: with colours on a terminal unless NO_COLOR is
    set, plain text into a pipe.
    """
    console = _Console(file=file, highlight=False, soft_wrap=True)
    if not console.is_terminal and not os.environ.get("COLUMNS"):
        console.width = PIPE_WIDTH
    return console


def has_size(console: Console) -> bool:
    """True if `console` writes to a terminal, which has a width and a height.

    `Console.is_terminal` only tells whether to print colours: with FORCE_COLOR it is true for a
    pipe as well.
    """
    return console.is_terminal and console.file.isatty()


def printable(text: str) -> str:
    """Return `text` with every character escaped that could move a terminal's cursor or change the
    direction of writing.
    """
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
