"""A time of day that a test steps, of one server.

```python
with SteppedClock() as clock, Standalone(env=clock.env) as server:
    clock.step(3600)     # the server's time of day is an hour ahead from now on
```
The server is started with a small library before its own (LD_PRELOAD), which a C compiler makes.
"""

from __future__ import annotations

import shutil
import struct
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from tests.servers.binary import NoServer

if TYPE_CHECKING:
    from typing_extensions import Self

SOURCE = Path(__file__).with_name("stepped_clock.c")


class SteppedClock:
    """`env`: what a server needs in its environment. `offset_s`: how far it is ahead now."""

    def __init__(self) -> None:
        self.offset_s = 0.0
        self.env: dict[str, str] = {}
        self._folder: Path | None = None

    @staticmethod
    def compiler() -> str | None:
        """Return the C compiler; None where there is none, and so no clock that can be stepped."""
        if not sys.platform.startswith("linux"):
            return None
        return shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")

    def step(self, seconds: float) -> None:
        """Set the time of day forward, or back."""
        assert self._folder is not None
        self.offset_s += seconds
        with (self._folder / "offset").open("r+b") as file:
            file.write(struct.pack("=q", int(self.offset_s * 1e9)))

    def __enter__(self) -> Self:
        compiler = self.compiler()
        if compiler is None:
            raise NoServer("a clock is stepped on Linux, with a C compiler (apt-get install gcc)")
        self._folder = Path(tempfile.mkdtemp(prefix="distwindow-clock-"))
        library = self._folder / "stepped_clock.so"
        subprocess.run(
            [compiler, "-shared", "-fPIC", "-O1", "-o", library, SOURCE], check=True, timeout=60
        )
        (self._folder / "offset").write_bytes(bytes(8))
        self.env = {
            "LD_PRELOAD": str(library),
            "DISTWINDOW_CLOCK_OFFSET": str(self._folder / "offset"),
        }
        return self

    def __exit__(self, *_: object) -> None:
        assert self._folder is not None
        for file in (self._folder / "stepped_clock.so", self._folder / "offset"):
            file.unlink()
        self._folder.rmdir()
