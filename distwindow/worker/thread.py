"""The worker of blocking limiters: one thread.

A signal handler may raise in a caller at any line of this file. Therefore callers only make single
calls of C functions (see `core/interrupts.py`), in an order in which nothing has to be undone:

    the caller was interrupted        the next caller that wakes the worker
    before it started the thread      finds no thread, and starts one
    after it started the thread       finds that the thread holds `_running_lock`, and starts no
                                      other
    before it woke the thread         wakes it; the worker then looks at all limiters, and not only
                                      at the one that woke it

    the thread       waits for a wake-up --> flushes every job that is due --> sleeps until the next
                     job is due, or until the next wake-up
"""

from __future__ import annotations

import _thread
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any

from ..consistency.key_state import NEVER
from ..core.clock import SYSTEM, Clock
from ..core.interrupts import PATCH_STATE, OneShotEvent, WakeUp, start_thread
from ..operations.flush_source import FlushSource
from .flush_job import (
    EXIT_TIMEOUT_S,
    RETRY_EVERY_S,
    FlushJob,
    FlushJobs,
    monotonic,
)
from .patching import GEVENT_LISTENER
from .shutdown import SHUTDOWN
from .uwsgi import UWSGI


class WorkerThread:
    """Flushes all blocking limiters of this process, in one thread."""

    def __init__(self) -> None:
        self.jobs = FlushJobs()
        SHUTDOWN.add(self)
        self.after_fork()

    def after_fork(self) -> None:
        """Begin without a thread: a fork copies only the thread that called it. What the parent has
        not sent is sent by the parent.
        """
        for job in self.jobs.all():
            job.flush_done = job.close_done = None  # whatever was under way will never end here
            job.closing_lock = threading.Lock()
        self._wake_up = WakeUp()
        self._running_lock = threading.Lock()
        """Held by the thread for as long as it runs."""
        self._thread_ident: int | None = None
        self._unsent: set[FlushJob] = set()
        """The jobs that have something to send. Kept here, because the application may have dropped
        their limiters.
        """

    def add_limiter(
        self,
        strategy: FlushSource,
        flush: Callable[[bool], Any],
        clock: Clock,
        *,
        name: str,
        job_type: type[FlushJob] = FlushJob,
    ) -> FlushJob:
        """Return a job whose `flush` is called whenever `strategy` has something due. Limiters
        whose clock is not the system's are flushed by `flush()` and `close()` only, because that
        clock may stand still.
        """
        job = job_type(strategy, flush, name)
        if clock is SYSTEM:
            strategy.wake = partial(self._wake, job)
            self.jobs.add(job)
            GEVENT_LISTENER.subscribe()
            UWSGI.hook_fork()
            SHUTDOWN.hook_exit()
        return job

    def detach(self, job: FlushJob) -> None:
        """Stop flushing the limiter of `job`, which is being closed, and wait for the flush that is
        under way.
        """
        job.detached = True  # before looking for a flush that is under way, see `_run_job`
        self._unsent.discard(job)
        self.wait_for(job)

    def wait_for(self, job: FlushJob) -> None:
        """Wait until the flush of `job` that is under way has ended."""
        if _thread.get_ident() != self._thread_ident:
            job.wait_for_flush(EXIT_TIMEOUT_S)

    def flush_all(self, deadline: float, *, final: bool) -> None:
        """Send everything that is pending, in the calling thread, with as many attempts as there is
        time for until `deadline` (monotonic seconds). Without `final`, calls are still decided, and
        what they count meanwhile need not be sent.
        """
        jobs = self.jobs.active()
        for job in jobs:
            # Nothing would be counted twice (a ring takes each flush once), but what the worker is
            # just sending might not have arrived when this returns.
            job.wait_for_flush(min(EXIT_TIMEOUT_S / 6, deadline - monotonic()))
            _flush_job(job, everything=True)
        while monotonic() < deadline:
            late = [job for job in jobs if job.needs_retry(final)]
            if not late:
                return
            time.sleep(RETRY_EVERY_S)
            for job in late:
                _flush_job(job, everything=True)

    def _wake(self, job: FlushJob) -> None:
        job.detached = False  # the store of a closed limiter may be the caller's, and open
        self._unsent.add(job)
        if not self._running_lock.locked():
            self._start()
        self._wake_up.wake()

    def _start(self) -> None:
        PATCH_STATE.check()
        SHUTDOWN.hook_exit()  # for what has been imported since
        # It starts none where Python is exiting (then `flush_all` flushes), or where uWSGI is about
        # to fork (then the next call in the worker starts one).
        start_thread(self._run)

    def _run(self) -> None:
        running, wake_up = self._running_lock, self._wake_up
        if not running.acquire(False):  # another caller has just started one
            return
        self._thread_ident = _thread.get_ident()
        try:
            threading.current_thread().name = "distwindow"
            while True:
                next_due_at = self._flush_due()
                wake_up.sleep(None if next_due_at == NEVER else max(0.0, next_due_at - monotonic()))
                if self._wake_up is not wake_up:
                    return  # gevent has patched threads: the next `_wake` starts another one
        finally:
            if self._running_lock is running:
                self._thread_ident = None
            running.release()

    def _flush_due(self) -> float:
        """Flush what is due. Return when the next flush is due (monotonic seconds, or `NEVER`)."""
        next_due_at = NEVER
        for job in self.jobs.all():
            if job.detached:
                self._unsent.discard(job)
                continue
            SHUTDOWN.hold_call()  # as the process ends, its last flush is the only one
            if job.next_due_at <= monotonic():
                self._run_job(job)
            if job.next_due_at == NEVER:
                self._unsent.discard(job)
                if job.next_due_at == NEVER:  # it has not been set again since
                    continue
            self._unsent.add(job)
            next_due_at = min(next_due_at, job.next_due_at)
        return next_due_at

    def _run_job(self, job: FlushJob) -> None:
        done = job.flush_done = OneShotEvent()
        try:
            if not job.detached:  # `detach` may have looked before `flush_done` was set
                _flush_job(job, everything=False)
        except BaseException as exc:
            # No signal handler runs in this thread, and nothing may end it: what the application's
            # code raises in it (a log handler, a client of redis-py) is a failure of this flush.
            with suppress(BaseException):
                job.record_unexpected_error(exc)
        finally:
            done.set()


def _flush_job(job: FlushJob, *, everything: bool) -> None:
    try:
        job.record_flush(job.flush(everything))
    except Exception as exc:
        job.record_unexpected_error(exc)
