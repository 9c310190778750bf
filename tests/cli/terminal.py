"""Runs a command on a terminal of a given size, and reads its output."""

from __future__ import annotations

import os
import re
import signal
import struct
import subprocess
import sys
from types import TracebackType
from typing import TYPE_CHECKING

from tests.interruptions import restore_sigint
from tests.servers.wait import until

if TYPE_CHECKING:
    from typing_extensions import Self

_CONTROL = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")


class Terminal:
    """A process of `distwindow` whose three streams are one pseudo-terminal."""

    def __init__(self, *arguments: str, columns: int, rows: int = 24) -> None:
        import fcntl
        import pty
        import termios

        self._ours, theirs = pty.openpty()
        fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))
        self.process = subprocess.Popen(
            [sys.executable, "-m", "distwindow", *arguments],
            stdin=theirs,
            stdout=theirs,
            stderr=theirs,
            preexec_fn=restore_sigint,
            # The size is that of the terminal; pytest-xdist sets these for its workers.
            env={
                **{name: os.environ[name] for name in os.environ.keys() - {"LINES", "COLUMNS"}},
                "TERM": "xterm",
                "NO_COLOR": "1",
                "PYTHONIOENCODING": "utf-8",
            },
        )
        os.close(theirs)
        os.set_blocking(self._ours, False)
        self._written = b""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        exc: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait(10)
        os.close(self._ours)

    @property
    def text(self) -> str:
        """The output so far, without control sequences."""
        try:
            while part := os.read(self._ours, 65536):
                self._written += part
        except OSError:  # nothing to read now, or the process has closed the terminal
            pass
        return _CONTROL.sub("", self._written.decode().replace("\r\n", "\n"))

    def lines(self) -> list[str]:
        """Wait for the end with exit code 0, and return the lines of the output."""
        until(lambda: (self.text, self.process.poll())[1] is not None, what="the end", timeout=30)
        assert self.process.returncode == 0, self.text
        return self.text.splitlines()

    def shows(self, *patterns: str) -> None:
        """Wait until the output since the last call matches each pattern."""
        begin = getattr(self, "_seen", 0)
        for pattern in patterns:
            until(
                # mypy cannot infer a lambda whose parameter has a default.
                lambda pattern=pattern: re.search(pattern, self.text[begin:]),  # type: ignore[misc]
                what=f"{pattern!r} in {self.text[begin:]!r}",
                timeout=30,
            )
        self._seen = len(self.text)

    def interrupt(self) -> int:
        """Send Ctrl-C, and return the exit code."""
        self.process.send_signal(signal.SIGINT)
        until(lambda: (self.text, self.process.poll())[1] is not None, what="the end", timeout=30)
        return self.process.returncode
