"""Timeouts for work that has none of its own: name look-ups, TLS, the whole start of a client.

The work runs in another thread, and the caller stops waiting for it when the time is over. A result
that comes later is passed to `discard`.

    wanted, running     `wait` waits
    wanted, done        `result` or `failure` is set
    abandoned, running  `failure` is `JobAbandoned`; the result will be discarded
    abandoned, done     the result has been discarded
"""

from __future__ import annotations

import threading
import traceback
from collections.abc import Callable
from typing import Any, Generic, TypeVar

from ..._fork_wait import FORK_WAIT
from ...core.interrupts import OneShotEvent, start_thread

T = TypeVar("T")


class JobAbandoned(Exception):
    """The failure of a job that was abandoned while a caller waited for it."""


class JobTimeout(Exception):
    """The time is over. The work goes on, and its result will be discarded."""


def run_within(seconds: float, work: Callable[[], T], discard: Callable[[T], Any]) -> T:
    """Return what `work` returns, or raise what it raises; raise `JobTimeout` after `seconds`."""
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
        if not taken:  # too late, failed, or interrupted by a signal handler
            job.abandon()


class BackgroundJob(Generic[T]):
    """Work in a thread of its own. It may be waited for more than once.

    How it ended is a value (`failure`, `result`) and is not raised by `wait`. So an exception that
    `wait` raises came from a signal handler, and belongs to the application.
    """

    def __init__(self, work: Callable[[], T], discard: Callable[[T], Any]) -> None:
        self._work = work
        self._discard = discard
        self._lock = threading.Lock()
        self._results: list[T] = []
        self.failure: Exception | None = None
        """What the work has raised, or `JobAbandoned`."""
        self._wanted = True
        self._started = False
        self._run_lock = threading.Lock()
        self._done = OneShotEvent()

    def start(self) -> None:
        """Start the work. Idempotent. The job has to be stored somewhere before: otherwise the
        result would be lost with a caller that is interrupted here.
        """
        if self._started:
            return
        if not start_thread(self._run):
            self._run()
        self._started = True

    def _run(self) -> None:
        # `start` starts a second thread if a signal handler raised before `_started` was set.
        if not self._run_lock.acquire(False):
            return
        failure: Exception | None = None
        try:
            with FORK_WAIT.connecting():
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
            self._discard_results()

    def abandon(self) -> None:
        """Discard the result, now or when it comes, and end all waits."""
        with self._lock:
            self._wanted = False
            done = self._done.is_set
            if not done:
                self.failure = JobAbandoned("the limiter was closed")
                self._done.set()
        if done:
            self._discard_results()

    def wait(self, seconds: float) -> bool:
        """Wait up to `seconds`; True if the job has ended."""
        return self._done.wait(seconds)

    @property
    def result(self) -> T:
        """What the work has returned. Only after the job has ended without `failure`."""
        return self._results[0]

    def _discard_results(self) -> None:
        for result in self._results:
            self._discard(result)


def _forget_locals(exc: BaseException) -> None:
    """Destroy the local variables of the failed work here. In the waiting thread, a signal handler
    might raise inside a destructor, and Python drops what is raised there.
    """
    link: BaseException | None = exc
    while link is not None:
        traceback.clear_frames(link.__traceback__)
        link = link.__cause__ or link.__context__
