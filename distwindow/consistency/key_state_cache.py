"""The cells of one limiter: at most so many, and the one that was used longest ago goes first."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from threading import Lock, RLock
from typing import Any, Generic, TypeVar

from .key_state import Cell

C = TypeVar("C", bound=Cell)


class Cells(Generic[C]):
    """Cells by key, in order of use. `evicted` is told of each that has to go."""

    def __init__(self, most: int, evicted: Callable[[C], object]) -> None:
        self.most = most
        self._evicted = evicted
        self._leaving: dict[Any, C] = {}
        """Gone from the cache, but with something still to tell. A key that comes back gets this
        cell again: what it tells must stay in order.
        """
        self.clear()

    def empty(self) -> None:
        """Forget everything."""
        with self.slow:
            self._cells.clear()
            self._leaving.clear()

    def clear(self) -> None:
        """Begin anew, with locks that nobody holds: after a fork, another thread held them."""
        self.lock = Lock()
        self.slow = RLock()
        self._cells: OrderedDict[Any, C] = OrderedDict()
        self._leaving.clear()
        self.get = self._cells.get
        self.used = self._cells.move_to_end

    def __len__(self) -> int:
        return len(self._cells)

    def all(self) -> list[C]:
        """Every cell there is, those that are leaving too."""
        with self.slow:
            return [*self._cells.values(), *self._leaving.values()]

    def add(self, key: Any, new: Callable[[], C]) -> C:
        """The cell of `key`, made if it is not there; the least used one may have to go for it."""
        with self.slow:
            cell = self._cells.get(key)
            if cell is not None:
                return cell
            cell = self._leaving.get(key) or new()
            while len(self._cells) >= self.most:
                # No call: `next(iter(...))` fails where another thread uses a key in between.
                for gone in self._cells:  # noqa: B007
                    break
                # In both for a moment, so that a signal handler that raises loses nothing.
                oldest = self._leaving[gone] = self._cells[gone]
                del self._cells[gone]
                self._evicted(oldest)
                if not oldest.counted():
                    self._leaving.pop(gone, None)
            self._cells[key] = cell
            self._leaving.pop(key, None)
            return cell

    def settled(self, cell: C) -> None:
        """It has nothing more to tell; one that was leaving may go."""
        if self._leaving and self._leaving.get(cell.key) is cell:
            self._leaving.pop(cell.key, None)

    def leaving(self) -> int:
        """How many are kept only because they have something to tell."""
        return len(self._leaving)

    def drop(self, key: Any) -> C | None:
        """Take the cell of `key` out."""
        with self.slow:
            return self._cells.pop(key, None) or self._leaving.pop(key, None)
