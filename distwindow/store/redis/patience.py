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
    job = _Job(work, discard)
    # Not a threading.Thread: a signal handler that raises inside its start() leaves it half made.
    start_new_thread(job.run, ())
    in_time = False
    try:
        in_time = job.done.wait(max(0.0, seconds))
    finally:
        if not in_time:  # late, or a signal handler raised here
            job.abandon()
    if not in_time:
        raise OutOfTime
    return job.result()


class _Job(Generic[T]):
    def __init__(self, work: Callable[[], T], discard: Callable[[T], Any]) -> None:
        self._work = work
        self._discard = discard
        self._lock = threading.Lock()
        self._results: list[T] = []
        self._failure: Exception | None = None
        self._wanted = True
        self.done = threading.Event()

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

    def result(self) -> T:
        if self._failure is not None:
            raise self._failure
        return self._results[0]

    def _throw_away(self) -> None:
        for result in self._results:
            self._discard(result)
