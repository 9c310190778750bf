"""A deadline over work that has none of its own: name look-ups, TLS, a client's whole start-up.

The work runs in a thread that the caller stops waiting for when time is up. What it still brings
then is handed to `discard`.
"""

from __future__ import annotations

import threading
from _thread import start_new_thread
from collections.abc import Callable
from typing import Any, Generic, TypeVar

T = TypeVar("T")


class OutOfTime(Exception):
    """The work goes on, unwanted."""


def within(seconds: float, work: Callable[[], T], discard: Callable[[T], Any]) -> T:
    """What `work` returns or raises, within `seconds`; raises `OutOfTime` after that."""
    job = Job(work, discard)
    done = False
    try:
        result = job.result(seconds)
        done = True
        return result
    finally:
        if not done:  # late, failed, or a signal handler raised here
            job.abandon()


class Job(Generic[T]):
    """Work in a thread of its own, that may be waited for more than once."""

    def __init__(self, work: Callable[[], T], discard: Callable[[T], Any]) -> None:
        self._work = work
        self._discard = discard
        self._lock = threading.Lock()
        self._results: list[T] = []
        self._failure: Exception | None = None
        self._wanted = True
        self.done = threading.Event()
        # Not a threading.Thread: a signal handler that raises in its start() leaves it half made.
        try:
            start_new_thread(self.run, ())
        except RuntimeError:  # Python is exiting, and starts no threads any more
            self.run()

    def run(self) -> None:
        try:
            self._results.append(self._work())
        except Exception as exc:
            self._failure = exc
        with self._lock:
            self.done.set()
            wanted = self._wanted
        if not wanted:
            self._throw_away()

    def abandon(self) -> None:
        with self._lock:
            self._wanted = False
            done = self.done.is_set()
        if done:
            self._throw_away()

    def result(self, seconds: float) -> T:
        """What the work returns or raises; `OutOfTime` when it is not done within `seconds`."""
        if not self.done.wait(max(0.0, seconds)):
            raise OutOfTime
        if self._failure is not None:
            raise self._failure
        return self._results[0]

    def _throw_away(self) -> None:
        for result in self._results:
            self._discard(result)
