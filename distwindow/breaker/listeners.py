"""Those who want to hear of changes of state."""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable

from ..callables import is_async_callable
from ..core.breaker_state import BreakerChange
from ..core.errors import ConfigurationError, short_repr
from ..core.interrupts import was_raised_by_signal_handler
from ..worker.flush_job import RAISED_BY_CALLBACKS

LOG = logging.getLogger("distwindow")

Listener = Callable[[BreakerChange], object]


class Listeners:
    """Calls each listener with each change once, in the order of the changes, in the thread that
    has learned of it: that of a call, or the worker's.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._listeners: list[Listener] = []
        self._waiting: deque[BreakerChange] = deque()
        self.after_fork()

    def after_fork(self) -> None:
        """Make a new lock, as another thread may have held it at the fork."""
        self._waiting.clear()
        self._delivering = threading.Lock()

    def add(self, listener: Listener) -> None:
        """Add a function of one `BreakerChange`. Raises `ConfigurationError` for anything else."""
        if not callable(listener):
            raise ConfigurationError(
                f"on_change({short_repr(listener)}): a listener is a function of one BreakerChange"
            )
        if is_async_callable(listener):
            raise ConfigurationError(
                f"on_change({short_repr(listener)}): a listener may not be asynchronous, as "
                "nothing would await it; have a plain function start a task"
            )
        self._listeners.append(listener)

    def tell(self, change: BreakerChange) -> None:
        """Have each listener called with this change. An error of a listener is logged."""
        self._waiting.append(change)
        # Again after the lock was released: a thread that found it held has only added a change.
        while self._waiting and self._delivering.acquire(blocking=False):
            try:
                while self._waiting:
                    self._deliver(self._waiting.popleft())
            finally:
                self._delivering.release()

    def _deliver(self, change: BreakerChange) -> None:
        LOG.info(
            "%s: %s is %s, it was %s",
            self._name, short_repr(change.key), change.state, change.previous,
        )  # fmt: skip
        for listener in list(self._listeners):
            try:
                listener(change)
            except RAISED_BY_CALLBACKS as exc:
                if was_raised_by_signal_handler(exc):
                    raise  # it is for the caller, and no error of the listener
                LOG.exception("a listener of %s has failed on %r: %r", self._name, change, listener)
