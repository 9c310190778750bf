"""Standard output whose errors can be told from those of the store, which may be `OSError` too."""

from __future__ import annotations

import io
import os
import sys
from contextlib import suppress
from typing import Any, TextIO


class OutputError(OSError):
    """Standard output cannot be written."""


class _Descriptor(io.FileIO):
    def write(self, data: Any) -> Any:
        try:
            return super().write(data)
        except BrokenPipeError:  # whoever read has enough: no error for people
            raise
        except OSError as exc:
            raise OutputError(exc.errno, exc.strerror) from exc


def prepare_output() -> None:
    """Have stdout raise `OutputError`, and have stdout and stderr escape what they cannot encode:
    a key may hold any character.
    """
    if sys.stdout is None:  # how Python has it when the descriptor was closed: `distwindow >&-`
        raise OutputError("standard output is closed")
    if isinstance(sys.stdout, io.TextIOWrapper):
        raw = _Descriptor(sys.stdout.fileno(), "wb", closefd=False)
        sys.stdout = io.TextIOWrapper(
            io.BufferedWriter(raw),
            encoding=sys.stdout.encoding,
            errors="backslashreplace",
            line_buffering=sys.stdout.line_buffering or sys.stdout.write_through,
        )
    if isinstance(sys.stderr, io.TextIOWrapper):
        sys.stderr.reconfigure(errors="backslashreplace")


def discard(stream: TextIO | None) -> None:
    """What is buffered for `stream` must not fail once more at exit."""
    with suppress(OSError, ValueError, AttributeError):  # it is no file, in a test
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())  # type: ignore[union-attr]
