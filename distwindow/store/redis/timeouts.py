"""A deadline over work that has none of its own: name look-ups, TLS, a client's whole start-up.

The work runs in a thread that the caller stops waiting for when time is up. What it still brings
then is handed to `discard`.
"""

from __future__ import annotations

import threading
import traceback
from collections.abc import Callable
from typing import Any, Generic, TypeVar

from ...core.interrupts import OneShotEvent, start_thread

T = TypeVar("T")


class JobAbandoned(Exception):
    """Nobody wants the work any more, while somebody still waited for it."""


class JobTimeout(Exception):
    """The work goes on, unwanted."""


def run_within(seconds: float, work: Callable[[], T], discard: Callable[[T], Any]) -> T:
    """What `work` returns or raises, within `seconds`; raises `JobTimeout` after that."""
    job = BackgroundJob(work, discard)
    taken = False
    try:
        job.start()
        if not job.wait(seconds):
            raise JobTimeout
        if job.failure is not None:
            raise job.failure
        taken = True
        return job.result
    finally:
        if not taken:  # late, failed, or a signal handler raised here
            job.abandon()


class BackgroundJob(Generic[T]):
    """Work in a thread of its own, that may be waited for more than once.

    How it ended is a value (`failure`, `result`) and is not raised by `wait`: whatever comes out of
    `wait` was raised by a signal handler, and belongs to the application.
    """

    def __init__(self, work: Callable[[], T], discard: Callable[[T], Any]) -> None:
        self._work = work
        self._discard = discard
        self._lock = threading.Lock()
        self._results: list[T] = []
        self.failure: Exception | None = None
        """What the work has raised."""
        self._wanted = True
        self._started = False
        self._claim = threading.Lock()
        self._done = OneShotEvent()

    def start(self) -> None:
        """Once the job is kept somewhere, so that its result is not lost with an interrupted
        caller. Harmless when repeated.
        """
        if self._started:
            return
        if not start_thread(self._run):
            self._run()
        self._started = True

    def _run(self) -> None:
        if not self._claim.acquire(False):  # started twice, where a signal handler raised between
            return
        failure: Exception | None = None
        try:
            self._results.append(self._work())
        except Exception as exc:
            failure = exc
            _forget_locals(exc)
        with self._lock:
            wanted = self._wanted
            if wanted:
                self.failure = failure
                self._done.set()
        if not wanted:
            self._throw_away()

    def abandon(self) -> None:
        with self._lock:
            self._wanted = False
            done = self._done.is_set
            if not done:
                self.failure = JobAbandoned("the limiter was closed")
                self._done.set()
        if done:
            self._throw_away()

    def wait(self, seconds: float) -> bool:
        """Is the work done, within `seconds`?"""
        return self._done.wait(seconds)

    @property
    def result(self) -> T:
        """What the work has returned, once it is done and has not failed."""
        return self._results[0]

    def _throw_away(self) -> None:
        for result in self._results:
            self._discard(result)


def _forget_locals(exc: BaseException) -> None:
    """Have what the failed work held destroyed here: in the waiting thread a signal handler might
    raise inside a destructor, and Python drops what is raised there.
    """
    link: BaseException | None = exc
    while link is not None:
        traceback.clear_frames(link.__traceback__)
        link = link.__cause__ or link.__context__
