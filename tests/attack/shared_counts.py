"""Counters in a file, by key, of what calls have returned: they remain when the process is killed.

A counter is raised by one assignment without a call, so that no signal handler can interrupt it.
"""

from __future__ import annotations

import mmap
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from typing_extensions import Self

SLOT_BYTES = 8


class SharedCounts:
    """`rows` of `keys` counters. A row belongs to one thread or loop, because two would overwrite
    each other's counts.
    """

    def __init__(self, path: Path, rows: int, keys: int) -> None:
        self.path, self.rows, self.keys = path, rows, keys
        with path.open("r+b") as file:
            self._map = mmap.mmap(file.fileno(), rows * keys * SLOT_BYTES)
        self._slots = memoryview(self._map).cast("q")

    @classmethod
    def create(cls, rows: int, keys: int) -> Self:
        """Make the counters in a new file."""
        with tempfile.NamedTemporaryFile(prefix="distwindow-attack-", delete=False) as file:
            file.write(bytes(rows * keys * SLOT_BYTES))
        return cls(Path(file.name), rows, keys)

    def row(self, number: int) -> memoryview:
        """Return the counters of one thread or loop, used as `row[i] = row[i] + 1`."""
        return self._slots[number * self.keys : (number + 1) * self.keys]

    def sums(self) -> list[int]:
        """Return for each key what all rows have counted."""
        slots = self._slots.tolist()
        return [sum(slots[key :: self.keys]) for key in range(self.keys)]

    def total(self) -> int:
        return sum(self._slots.tolist())

    def remove(self) -> None:
        """Remove the file; called by the parent when it has read the counts."""
        self.path.unlink(missing_ok=True)
