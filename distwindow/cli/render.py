"""How things look: text that is safe for a terminal, numbers, durations and bars."""

from __future__ import annotations

import math
import os
import sys
from typing import TextIO

from rich.console import Console

PIPE_WIDTH = 160
"""Columns of text that goes into a pipe or a file, where no window sets them."""

_EIGHTHS = " ▏▎▍▌▋▊▉█"


class _Console(Console):
    def on_broken_pipe(self) -> None:
        raise  # rich calls this in an `except`, and would end with exit code 1


def console(file: TextIO | None = None) -> Console:
    """Where people look: colours on a terminal unless NO_COLOR, plain text in a pipe."""
    out = _Console(file=file, highlight=False, soft_wrap=True)
    if not out.is_terminal and not os.environ.get("COLUMNS"):
        out.width = PIPE_WIDTH
    return out


def is_window(out: Console) -> bool:
    """Is `out` a terminal's window, with a width and a height? `Console.is_terminal` only says
    whether to print colours: with FORCE_COLOR it is true of a pipe as well.
    """
    return out.is_terminal and out.file.isatty()


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
    encoding = sys.stdout.encoding if sys.stdout is not None else ""
    return (encoding or "").lower().replace("-", "") in ("utf8", "utf16", "utf8sig")
