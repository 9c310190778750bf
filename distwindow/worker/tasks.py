"""The worker of asyncio limiters: one task in each event loop.

event                                 the task of the loop
a limiter has something to send       is created, or its sleep is ended
a flush is due                        flushes, and then sleeps until the next flush is due
nothing is pending                    ends; the next `wake` creates another
it is cancelled, as its loop ends     flushes everything, for at most EXIT_TIMEOUT_S, and ends
`wake` after it was cancelled         is created only when the flush is due: the loop is about
                                      to end, and nobody would cancel a task that sleeps
its loop is closed without that       its jobs go to the task of the loop of the next `wake`; at
                                      exit `flush_all` flushes them in a loop of its own
"""

from __future__ import annotations

import _thread
import asyncio
import socket
import threading
from collections.abc import Awaitable, Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

from ..consistency.key_state import NEVER
from ..core.clock import SYSTEM, Clock
from ..core.interrupts import OneShotEvent
from ..operations.flush_source import FlushSource
from .flush_job import (
    EXIT_TIMEOUT_S,
    LOG,
    RETRY_EVERY_S,
    FlushJob,
    FlushJobs,
    job_names,
    monotonic,
)
from .patching import GEVENT_LISTENER
from .shutdown import SHUTDOWN
from .uwsgi import UWSGI

_STORE_FOLDER = Path(__file__).parents[1] / "store"


class WorkerTasks:
    """Flushes all asyncio limiters of this process, with one task in each event loop."""

    def __init__(self) -> None:
        self.jobs = FlushJobs()
        SHUTDOWN.add(self)
        self.after_fork()

    def after_fork(self) -> None:
        """Begin without tasks: the parent's event loops do not run in the child."""
        for job in self.jobs.all():
            job.flush_done = job.close_done = job.flush_task = None
        self._lock = threading.RLock()
        self._loop_workers: dict[asyncio.AbstractEventLoop, _LoopWorker] = {}

    def add_limiter(
        self,
        strategy: FlushSource,
        flush: Callable[[bool], Any],
        clock: Clock,
        *,
        name: str,
        job_type: type[FlushJob] = FlushJob,
    ) -> FlushJob:
        """Return a job whose `flush` is awaited whenever `strategy` has something due. Limiters
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

    async def detach(self, job: FlushJob) -> None:
        """Stop flushing the limiter of `job`, which is being closed, and wait for the flush that is
        under way.
        """
        job.detached = True
        with self._lock:
            for worker in self._loop_workers.values():
                worker.unsent.discard(job)
        await self.wait_for(job)

    async def wait_for(self, job: FlushJob) -> None:
        """Wait until the flush of `job` that is under way in this loop has ended."""
        task = job.flush_task
        if task is not None and task.get_loop() is asyncio.get_running_loop():
            await asyncio.wait([task], timeout=EXIT_TIMEOUT_S)

    def flush_all(self, deadline: float, *, final: bool) -> None:
        """Send everything that is pending, in a new event loop; see `WorkerThread.flush_all`."""
        jobs = self.jobs.active()
        if not any(job.has_unsent for job in jobs):
            return
        try:
            asyncio.get_running_loop()
        except RuntimeError:
            _flush_in_new_loop(jobs, deadline, final)
            return
        done = OneShotEvent()

        def flush() -> None:
            SHUTDOWN.flushing_threads.add(_thread.get_ident())
            try:
                _flush_in_new_loop(jobs, deadline, final)
            finally:
                SHUTDOWN.flushing_threads.discard(_thread.get_ident())
                done.set()

        _thread.start_new_thread(flush, ())
        done.wait(deadline - monotonic())

    def _wake(self, job: FlushJob) -> None:
        job.detached = False
        try:
            loop = asyncio.get_running_loop()
        except RuntimeError:  # called outside a loop: the limiter's next call wakes it
            return
        if isinstance(loop, _ExitLoop):  # `flush_all` is sending it already
            return
        with self._lock:
            for closed in [other for other in self._loop_workers if other.is_closed()]:
                if self._loop_workers[closed].unsent:
                    self._worker(loop).unsent |= self._loop_workers[closed].unsent
                del self._loop_workers[closed]
            self._worker(loop).wake(job)
        SHUTDOWN.hook_exit()  # for what has been imported since

    def _worker(self, loop: asyncio.AbstractEventLoop) -> _LoopWorker:
        return self._loop_workers.setdefault(loop, _LoopWorker(loop))


class _LoopWorker:
    """The task of one loop, and the jobs that it flushes."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.unsent: set[FlushJob] = set()
        self._loop = loop
        self._task: asyncio.Task[None] | None = None
        self._woken: asyncio.Future[None] | None = None
        """The future that the task awaits while it sleeps; else None."""
        self._cancelled = False

    def wake(self, job: FlushJob) -> None:
        """Have `job` flushed when it is due."""
        self.unsent.add(job)
        if self._woken is not None:
            _set_woken(self._woken)
        if self._task is not None and not self._task.done():
            return
        if self._cancelled:
            self._start_later(job.next_due_at - monotonic())
        else:
            self._start()

    def _start_later(self, seconds: float) -> None:
        """Create the task when the flush is due, and not now: the loop is ending, and nobody would
        cancel another task that sleeps. Should the loop go on, the task is created in time.
        """
        self._loop.call_later(max(0.0, seconds), self._start)

    def _start(self) -> None:
        if self._task is None or self._task.done():
            self._task = self._loop.create_task(self._run(), name="distwindow")

    async def _run(self) -> None:
        # A signal handler may have raised in `_start` after it created a task and before it stored
        # it in `_task`, so that a second task was created.
        this_task = asyncio.current_task()
        if self._task is not None and self._task is not this_task and not self._task.done():
            return
        self._task = this_task
        try:
            while self.unsent:
                now = monotonic()
                next_due_at = min(job.next_due_at for job in self.unsent)
                if next_due_at == NEVER:  # another flush has sent it
                    self.unsent.clear()
                elif next_due_at > now and self._cancelled:
                    self._start_later(next_due_at - now)
                    return
                elif next_due_at > now:
                    await self._sleep(next_due_at - now)
                else:
                    due = [job for job in self.unsent if job.next_due_at <= now]
                    # Whatever the code of an application raises in a flush, this task goes on:
                    # only a cancellation of its own is raised here.
                    await asyncio.gather(
                        *(_start_flush(job, everything=False) for job in due),
                        return_exceptions=True,
                    )
                    self._drop_idle()
        except asyncio.CancelledError:
            # The loop is shutting down, and runs until all its tasks have ended.
            self._cancelled = True
            with suppress(asyncio.TimeoutError):
                await asyncio.wait_for(_flush_all_jobs(self.unsent), EXIT_TIMEOUT_S)
            await _cancel_store_tasks()
            self._drop_idle()
            for job in self.unsent:
                job.gave_up_at_exit = job.strategy.next_due_at < NEVER
            raise

    async def _sleep(self, seconds: float) -> None:
        """Sleep until woken or until `seconds` have passed, without creating another task, as
        `asyncio.wait_for(event.wait(), seconds)` would.
        """
        woken = self._woken = self._loop.create_future()
        timer = self._loop.call_later(seconds, _set_woken, woken)
        try:
            await woken
        finally:
            timer.cancel()
            self._woken = None

    def _drop_idle(self) -> None:
        self.unsent = {job for job in self.unsent if job.next_due_at < NEVER}


def _set_woken(woken: asyncio.Future[None]) -> None:
    if not woken.done():
        woken.set_result(None)


async def _flush_all_jobs(jobs: set[FlushJob]) -> None:
    await asyncio.gather(*(_flush_until_sent(job, NEVER, final=True) for job in list(jobs)))


async def _flush_until_sent(job: FlushJob, deadline: float, *, final: bool) -> None:
    """Send everything that is pending in `job`, with as many attempts as there is time for until
    `deadline` (monotonic seconds), but only one if the store did not answer an earlier step of the
    shutdown.
    """
    await _start_flush(job, everything=True)
    while job.needs_retry(final) and monotonic() < deadline:
        await asyncio.sleep(RETRY_EVERY_S)
        await _start_flush(job, everything=True)


def _start_flush(job: FlushJob, *, everything: bool) -> asyncio.Task[None]:
    """Create the task of one flush. `flush_done` is set here, and not in the task, so that a caller
    who looks before the loop has started the task waits for it, too.
    """
    done = job.flush_done = OneShotEvent()
    task = job.flush_task = asyncio.get_running_loop().create_task(_flush_job(job, everything))
    task.add_done_callback(lambda _: done.set())
    return task


async def _flush_job(job: FlushJob, everything: bool) -> None:
    try:
        flush: Awaitable[Exception | None] = job.flush(everything)
        job.record_flush(await flush)
    except (asyncio.CancelledError, GeneratorExit, KeyboardInterrupt, SystemExit):
        raise  # it is for this task, or was raised by a signal handler and is for the whole loop
    except BaseException as exc:
        job.record_unexpected_error(exc)


class _ExitLoop(asyncio.SelectorEventLoop):
    """An event loop that resolves host names in the thread that runs it, because no thread can be
    started while Python is exiting.
    """

    async def getaddrinfo(self, host: Any, port: Any, **how: Any) -> Any:
        return socket.getaddrinfo(host, port, **how)


def _flush_in_new_loop(jobs: list[FlushJob], deadline: float, final: bool) -> None:
    if not final:  # with `final`, the tasks of other loops will not run any more
        for job in jobs:
            # Nothing would be counted twice (a ring takes each flush once), but what another loop
            # is just sending might not have arrived when this returns.
            job.wait_for_flush(min(EXIT_TIMEOUT_S / 6, deadline - monotonic()))
    loop = _ExitLoop()
    try:
        with suppress(asyncio.TimeoutError):
            loop.run_until_complete(_flush_until_deadline(jobs, deadline, final))
        loop.run_until_complete(_cancel_store_tasks())
        # End the connections of the stores, as `asyncio.run` does: otherwise Python warns of them
        # when the loop is closed.
        loop.run_until_complete(loop.shutdown_asyncgens())
    except Exception as exc:
        LOG.warning(
            "flushing the counts of %s failed with an unexpected error as the process ends: %r; "
            "%d counts are left",
            job_names(jobs), exc, sum(job.strategy.unacknowledged_counts() for job in jobs),
        )  # fmt: skip
    finally:
        loop.close()


async def _flush_until_deadline(jobs: list[FlushJob], deadline: float, final: bool) -> None:
    flushes = asyncio.gather(*(_flush_until_sent(job, deadline, final=final) for job in jobs))
    # The first of the two flushes of a shutdown is not cancelled at its deadline: no attempt begins
    # after it, but what has been sent may still arrive.
    seconds = deadline - monotonic() if final else EXIT_TIMEOUT_S
    await asyncio.wait_for(flushes, max(RETRY_EVERY_S, seconds))


async def _cancel_store_tasks() -> None:
    """Cancel the tasks of Redis connections, which would log errors when their loop is closed."""
    tasks = [task for task in asyncio.all_tasks() if _is_store_task(task)]
    for task in tasks:
        task.cancel()
    if tasks:
        await asyncio.wait(tasks, timeout=RETRY_EVERY_S)


def _is_store_task(task: asyncio.Task[Any]) -> bool:
    code = getattr(task.get_coro(), "cr_code", None)
    return code is not None and str(_STORE_FOLDER) in code.co_filename
