"""Counters in a file that outlive whoever counts: what calls have returned, by key.

A slot is raised by one assignment without a call: no signal handler gets between.
"""

from __future__ import annotations

import mmap
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from typing_extensions import Self

WIDTH = 8


class SharedCounts:
    """`rows` of `keys` counters. A row belongs to one thread or loop: two would lose counts."""

    def __init__(self, path: Path, rows: int, keys: int) -> None:
        self.path, self.rows, self.keys = path, rows, keys
        with path.open("r+b") as file:
            self._map = mmap.mmap(file.fileno(), rows * keys * WIDTH)
        self._slots = memoryview(self._map).cast("q")

    @classmethod
    def made(cls, rows: int, keys: int) -> Self:
        """In a new file."""
        with tempfile.NamedTemporaryFile(prefix="distwindow-attack-", delete=False) as file:
            file.write(bytes(rows * keys * WIDTH))
        return cls(Path(file.name), rows, keys)

    def row(self, number: int) -> memoryview:
        """The counters of one thread or loop: `row[i] = row[i] + 1`."""
        return self._slots[number * self.keys : (number + 1) * self.keys]

    def sums(self) -> list[int]:
        """For each key what all rows have counted."""
        slots = self._slots.tolist()
        return [sum(slots[key :: self.keys]) for key in range(self.keys)]

    def total(self) -> int:
        return sum(self._slots.tolist())

    def remove(self) -> None:
        """In the parent, when all is read."""
        self.path.unlink(missing_ok=True)
