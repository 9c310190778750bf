"""The cells of one limiter: at most so many, and the one that was used longest ago goes first."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable
from typing import Any, Generic, TypeVar

from .key_state import KeyState

C = TypeVar("C", bound=KeyState)


class KeyStateCache(Generic[C]):
    """KeyStateCache by key, in order of use. `evicted` is told of each that has to go."""

    def __init__(self, max_keys: int, evicted: Callable[[C], object]) -> None:
        self.max_keys = max_keys
        self._on_evicted = evicted
        self._evicted_unsent: dict[Any, C] = {}
        """Gone from the cache, but with something still to tell. A key that comes back gets this
        cell again: what it tells must stay in order.
        """
        self.clear()

    def empty(self) -> None:
        """Forget everything."""
        with self.state_lock:
            self._states.clear()
            self._evicted_unsent.clear()

    def clear(self) -> None:
        """Begin anew, with locks that nobody holds: after a fork, another thread held them."""
        self.counter_lock = threading.Lock()
        self.state_lock = threading.RLock()
        self._states: OrderedDict[Any, C] = OrderedDict()
        self._evicted_unsent.clear()
        self.get = self._states.get
        self.touch = self._states.move_to_end

    def __len__(self) -> int:
        return len(self._states)

    def all(self) -> list[C]:
        """Every cell there is, those that are leaving too."""
        with self.state_lock:
            return [*self._states.values(), *self._evicted_unsent.values()]

    def add(self, key: Any, new: Callable[[], C]) -> C:
        """The cell of `key`, made if it is not there; the least used one may have to go for it."""
        with self.state_lock:
            state = self._states.get(key)
            if state is not None:
                return state
            state = self._evicted_unsent.get(key) or new()
            while len(self._states) >= self.max_keys:
                # No call: `next(iter(...))` fails where another thread uses a key in between.
                for oldest_key in self._states:  # noqa: B007
                    break
                # In both for a moment, so that a signal handler that raises loses nothing.
                oldest = self._evicted_unsent[oldest_key] = self._states[oldest_key]
                del self._states[oldest_key]
                self._on_evicted(oldest)
                if not oldest.has_counts():
                    self._evicted_unsent.pop(oldest_key, None)
            self._states[key] = state
            self._evicted_unsent.pop(key, None)
            return state

    def on_all_sent(self, state: C) -> None:
        """It has nothing more to tell; one that was leaving may go."""
        if self._evicted_unsent and self._evicted_unsent.get(state.key) is state:
            self._evicted_unsent.pop(state.key, None)

    def count_evicted_unsent(self) -> int:
        """How many are kept only because they have something to tell."""
        return len(self._evicted_unsent)

    def drop(self, key: Any) -> C | None:
        """Take the cell of `key` out."""
        with self.state_lock:
            return self._states.pop(key, None) or self._evicted_unsent.pop(key, None)
