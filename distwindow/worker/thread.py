"""The worker of blocking limiters: one thread.

A caller may be interrupted by a signal handler's exception anywhere in here. So callers only take
single steps in C (see `core/interrupts.py`), in an order that leaves nothing to undo:

    caller interrupted                       what the next wake-up finds
    before the thread was started            no thread: it starts one
    after that                               `_running` is held by the thread: it starts no other
    before the wake-up was sent              the worker looks at all limiters, not only at the one
                                             that woke it
"""

from __future__ import annotations

import _thread
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import Any

from ..consistency.in_process import InProcess
from ..consistency.key_state import NEVER
from ..core.clock import SYSTEM, Clock
from ..core.interrupts import PATCHES, OneShotEvent, WakeUp, start_thread
from ..operations.strategy import Strategy
from .flush_job import EXIT_TIMEOUT_S, RETRY_EVERY_S, FlushJob, FlushJobs, monotonic
from .patching import PATCHING
from .shutdown import SHUTDOWN
from .uwsgi import UWSGI


class WorkerThread:
    """The one for blocking limiters."""

    def __init__(self) -> None:
        self.jobs = FlushJobs()
        SHUTDOWN.add(self)
        self.after_fork()

    def after_fork(self) -> None:
        """Threads stay in the parent, and what they had to do does, too."""
        for job in self.jobs.all():
            job.running = job.closing = None  # nobody will ever have done with it here
            job.closing_lock = threading.Lock()
        self._wake_up = WakeUp()
        self._running = threading.Lock()
        """Held by the thread for as long as it lives."""
        self._ident: int | None = None
        self._unsent: set[FlushJob] = set()
        """Those that have something to send, kept alive although their owners may have gone."""

    def add(
        self,
        strategy: Strategy,
        flush: Callable[[bool], Any],
        clock: Clock,
        *,
        name: str,
        handle_sigterm: bool,
    ) -> FlushJob:
        """From now on `work` is called when `near` says so. Not where time is moved by hand."""
        job = FlushJob(strategy, flush, name)
        if clock is SYSTEM and not isinstance(strategy, InProcess):
            strategy.wake = partial(self._wake, job)
            self.jobs.add(job)
            PATCHING.watch()
            UWSGI.hook_fork()
            SHUTDOWN.on_limiter_created(strategy, handle_sigterm=handle_sigterm)
        return job

    def detach(self, job: FlushJob) -> None:
        """It is being closed: leave it alone, once what is under way has been done."""
        job.detached = True  # before looking for what is under way, see `_work_for`
        self._unsent.discard(job)
        self.wait_for(job)

    def wait_for(self, job: FlushJob) -> None:
        """Until what is under way has been done."""
        if _thread.get_ident() != self._ident:
            job.wait(EXIT_TIMEOUT_S)

    def flush_all(self, deadline: float, *, final: bool) -> None:
        """Send everything there is, in this thread; as often as it takes until `deadline`. Without
        `final` callers go on counting, and what they count meanwhile is left.
        """
        jobs = self.jobs.active()
        for job in jobs:
            # Beside the worker nothing is counted twice, but what it is sending may not be there.
            job.wait(min(EXIT_TIMEOUT_S / 6, deadline - monotonic()))
            _flush_job(job, last=True)
        while monotonic() < deadline:
            late = [
                job for job in jobs if not job.given_up and (job.failure or (final and job.is_left))
            ]
            if not late:
                return
            time.sleep(RETRY_EVERY_S)
            for job in late:
                _flush_job(job, last=True)

    def _wake(self, job: FlushJob) -> None:
        job.detached = False  # the store of a closed limiter may be the caller's, and open
        self._unsent.add(job)
        if not self._running.locked():
            self._start()
        self._wake_up.wake()

    def _start(self) -> None:
        PATCHES.check()
        SHUTDOWN.hook_exit()
        start_thread(self._run)  # where Python is exiting, `flush_all` does without

    def _run(self) -> None:
        running, wake_up = self._running, self._wake_up
        if not running.acquire(False):  # another caller has started one just before
            return
        self._ident = _thread.get_ident()
        try:
            threading.current_thread().name = "distwindow"
            while True:
                soonest = self._flush_due()
                wake_up.sleep(None if soonest == NEVER else max(0.0, soonest - monotonic()))
                if self._wake_up is not wake_up:  # gevent has patched: another thread is to come
                    return
        finally:
            if self._running is running:
                self._ident = None
            running.release()

    def _flush_due(self) -> float:
        """Do what is due; when is there something to do again?"""
        soonest = NEVER
        for job in self.jobs.all():
            strategy = job.strategy
            if job.detached:
                self._unsent.discard(job)
                continue
            SHUTDOWN.pause()  # the ending thread flushes now
            if strategy.next_due_at <= monotonic():
                self._run_job(job)
            if strategy.next_due_at == NEVER:
                self._unsent.discard(job)
                if strategy.next_due_at == NEVER:  # it was not set again in between
                    continue
            self._unsent.add(job)
            soonest = min(soonest, strategy.next_due_at)
        return soonest

    def _run_job(self, job: FlushJob) -> None:
        done = job.running = OneShotEvent()
        try:
            if not job.detached:  # else who closes it may not have seen us
                _flush_job(job, last=False)
        finally:
            done.set()


def _flush_job(job: FlushJob, *, last: bool) -> None:
    try:
        job.log_transition(job.flush(last))
    except Exception as exc:
        job.failed(exc)
