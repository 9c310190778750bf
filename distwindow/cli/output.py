"""Standard output whose write errors are distinguishable from the store's, which may be `OSError`
as well.
"""

from __future__ import annotations

import io
import os
import sys
from contextlib import suppress
from typing import TYPE_CHECKING, TextIO

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
    """Prepare stdout to raise `OutputError`, and stdout and stderr to escape characters that they
    cannot encode: a key may contain any character.
    """
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
    """Point the descriptor of `stream` to /dev/null, so that the flush at exit does not fail again
    on what is still buffered.
    """
    with suppress(OSError, ValueError, AttributeError):  # in tests it is not a file
        devnull = os.open(os.devnull, os.O_WRONLY)
        os.dup2(devnull, stream.fileno())  # type: ignore[union-attr]  # the error is suppressed
