"""The key states of one limiter: at most `max_keys`, and the least recently used is evicted first.

A key state that is evicted with counts that the store has not acknowledged is kept beside the
cache until they are. A key that is called again meanwhile gets the same key state back: two of them
would send their counts side by side, and the store takes the batches of a sender in order only.

    cached   -- evicted, all acknowledged --> dropped
    cached   -- evicted with counts --------> evicted
    evicted  -- on_all_acknowledged --------> dropped
    evicted  -- get_or_add(key) ------------> cached
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable
from typing import Generic, TypeVar, cast

from ..core.errors import closed_failure
from ..core.key import AnyKey
from .key_state import KeyState, StateName

S = TypeVar("S", bound=KeyState)


class KeyStateCache(Generic[S]):
    """Key states by name, in order of use. `on_evicted` is called with each that is evicted."""

    def __init__(self, max_keys: int, on_evicted: Callable[[S], object] | None = None) -> None:
        self.max_keys = max_keys
        self.closed = False
        """Nothing is counted any more."""
        self.on_evicted = on_evicted
        self._evicted_unacknowledged: dict[StateName, S] = {}
        """The evicted key states that are kept for their counts."""
        self.after_fork()

    def after_fork(self) -> None:
        """Start empty, with new locks: a thread of the parent may have held the old ones."""
        # Looked up now: gevent may have patched `threading` after this module was imported.
        self.counter_lock = threading.Lock()
        """Held while a call is counted."""
        # Re-entrant, as a signal handler may call the limiter that it has interrupted.
        self.state_lock = threading.RLock()
        """Held while key states are added, evicted and flushed."""
        self._states: OrderedDict[StateName, S] = OrderedDict()
        self._evicted_unacknowledged.clear()
        self._states_at_close: list[S] = []
        """The key states that `clear` has removed."""
        # Bound once, as the hot path calls both.
        self.get: Callable[[StateName], S | None] = self._states.get
        """Return the key state of a name, or None."""
        self.touch: Callable[[StateName], None] = self._states.move_to_end
        """Make it the most recently used one. Raises `KeyError` if it is not there."""

    def __len__(self) -> int:
        return len(self._states)

    def all(self) -> list[S]:
        """Return all key states, evicted ones with counts included."""
        with self.state_lock:
            return [*self._states.values(), *self._evicted_unacknowledged.values()]

    def all_including_cleared(self) -> list[S]:
        """Return all key states, and those that `clear` has removed."""
        return [*self.all(), *self._states_at_close]

    def get_or_add(self, name: StateName, new: Callable[[], S]) -> S:
        """Return the key state of `name`. If there is none, it is made by `new`, and the least
        recently used one is evicted where there are too many.
        """
        with self.state_lock:
            state = self._states.get(name)
            if state is not None:
                return state
            state = self._evicted_unacknowledged.get(name) or new()
            while len(self._states) >= self.max_keys:
                # A loop rather than `next(iter(...))`, which is two calls: another thread may use
                # a key between them, and the iterator raises then.
                for oldest_name in self._states:  # noqa: B007 - it is used after the loop
                    break
                oldest = self._evicted_unacknowledged[oldest_name] = self._states[oldest_name]
                del self._states[oldest_name]
                if self.on_evicted is not None:
                    self.on_evicted(oldest)
                if not oldest.has_unacknowledged():
                    self._evicted_unacknowledged.pop(oldest_name, None)
            self._states[name] = state
            self._evicted_unacknowledged.pop(name, None)
            return state

    def on_all_acknowledged(self, state: S) -> None:
        """Drop `state` if it was evicted, now that all of its counts are acknowledged."""
        if self._evicted_unacknowledged and self._evicted_unacknowledged.get(state.key) is state:
            self._evicted_unacknowledged.pop(state.key, None)

    def count_evicted_unacknowledged(self) -> int:
        """Return how many evicted key states are kept for their counts."""
        return len(self._evicted_unacknowledged)

    def drop(self, name: StateName) -> S | None:
        """Remove the key state of `name` and return it; None if there is none."""
        with self.state_lock:
            return self._states.pop(name, None) or self._evicted_unacknowledged.pop(name, None)

    def check_open(self) -> None:
        """Raise `ConfigurationError` if this is closed."""
        if self.closed:
            raise closed_failure()

    def is_current(self, state: S) -> bool:
        """True if `state` is the one that calls of its key find: not evicted, reset or closed."""
        return not self.closed and self.get(state.key) is state

    def pause(self, hold: Callable[[], object]) -> None:
        """Have `get` call `hold` first, which blocks calls while the process ends. A thread that
        holds `state_lock` is not blocked, as the last flush needs that lock.
        """
        states = self._states
        # `getattr`, because the type stubs of `RLock` do not have this method.
        owned: Callable[[], bool] = getattr(self.state_lock, "_is_owned")  # noqa: B009 - see above

        def get(name: StateName) -> S | None:
            if not owned():
                hold()
            return states.get(cast(AnyKey, name))

        self.get = get

    def clear(self) -> None:
        """Remove all key states. `all_including_cleared` still returns them."""
        self._states_at_close += self.all()
        with self.state_lock:
            self._states.clear()
            self._evicted_unacknowledged.clear()
