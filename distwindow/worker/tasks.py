"""The workers of awaiting limiters: one task in each event loop."""

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

from ..consistency.in_process import InProcess
from ..consistency.key_state import NEVER
from ..core.clock import SYSTEM, Clock
from ..core.interrupts import OneShotEvent
from ..operations.strategy import Strategy
from .flush_job import EXIT_TIMEOUT_S, LOG, RETRY_EVERY_S, FlushJob, FlushJobs, monotonic, names_of
from .shutdown import POLL_S, RUNNING, SHUTDOWN

_STORES = Path(__file__).parents[1] / "store"


class WorkerTasks:
    """The ones for awaiting limiters, one in each event loop."""

    def __init__(self) -> None:
        self.jobs = FlushJobs()
        SHUTDOWN.add(self)
        self.after_fork()

    def after_fork(self) -> None:
        """Loops stay in the parent."""
        for job in self.jobs.all():
            job.running = job.closing = job.task = None
        self._lock = threading.RLock()
        self._workers: dict[asyncio.AbstractEventLoop, _LoopWorker] = {}

    def add(
        self,
        strategy: Strategy,
        flush: Callable[[bool], Any],
        clock: Clock,
        *,
        name: str,
        handle_sigterm: bool,
    ) -> FlushJob:
        """From now on `work` is awaited when `near` says so. Not where time is moved by hand."""
        job = FlushJob(strategy, flush, name)
        if clock is SYSTEM and not isinstance(strategy, InProcess):
            strategy.wake = partial(self._wake, job)
            self.jobs.add(job)
            SHUTDOWN.on_limiter_created(strategy, handle_sigterm=handle_sigterm)
        return job

    async def detach(self, job: FlushJob) -> None:
        """It is being closed: leave it alone, once what is under way has been done."""
        job.detached = True
        with self._lock:
            for worker in self._workers.values():
                worker.busy.discard(job)
        await self.wait_for(job)

    async def wait_for(self, job: FlushJob) -> None:
        """Until what is under way in this loop has been done."""
        task = job.task
        if task is not None and task.get_loop() is asyncio.get_running_loop():
            await asyncio.wait([task], timeout=EXIT_TIMEOUT_S)

    def flush_all(self, deadline: float, *, final: bool) -> None:
        """Send everything there is, in a loop of its own; see `Thread.flush_all`."""
        jobs = self.jobs.active()
        if not any(job.is_left for job in jobs):
            return
        try:
            asyncio.get_running_loop()
        except RuntimeError:
            _flush(jobs, deadline, final)
            return
        done = OneShotEvent()

        def flush() -> None:
            try:
                _flush(jobs, deadline, final)
            finally:
                done.set()

        _thread.start_new_thread(flush, ())
        done.wait(deadline - monotonic())

    def _wake(self, job: FlushJob) -> None:
        job.detached = False
        try:
            loop = asyncio.get_running_loop()
        except RuntimeError:  # not out of a call: the next one wakes it
            return
        if isinstance(loop, _ExitLoop):  # `flush_all` sends it
            return
        with self._lock:
            for closed in [other for other in self._workers if other.is_closed()]:
                if self._workers[closed].busy:
                    self._worker(loop).busy |= self._workers[closed].busy
                del self._workers[closed]
            self._worker(loop).wake(job)
        SHUTDOWN.hook_exit()

    def _worker(self, loop: asyncio.AbstractEventLoop) -> _LoopWorker:
        return self._workers.setdefault(loop, _LoopWorker(loop))


class _LoopWorker:
    """The task of one loop."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.busy: set[FlushJob] = set()
        self._loop = loop
        self._task: asyncio.Task[None] | None = None
        self._woken: asyncio.Future[None] | None = None
        """What the task waits for; None while it works."""
        self._cancelled = False

    def wake(self, job: FlushJob) -> None:
        self.busy.add(job)
        if self._woken is not None:
            _opened(self._woken)
        if self._task is not None and not self._task.done():
            return
        if self._cancelled:
            self._start_later(job.strategy.next_due_at - monotonic())
        else:
            self._start()

    def _start_later(self, seconds: float) -> None:
        """The loop is ending, and nobody would end another task that waits. If it goes on after
        all, there is a task when there is something to do.
        """
        self._loop.call_later(max(0.0, seconds), self._start)

    def _start(self) -> None:
        if self._task is None or self._task.done():
            self._task = self._loop.create_task(self._run(), name="distwindow")

    async def _run(self) -> None:
        # An exception out of a signal handler may have kept `_start` from noting the task, so that
        # another one was started.
        mine = asyncio.current_task()
        if self._task is not None and self._task is not mine and not self._task.done():
            return
        self._task = mine
        try:
            while self.busy:
                # The ending thread flushes now. What this loop collected would be stuck in it, as
                # soon as a call has the loop wait for the end.
                while SHUTDOWN.phase != RUNNING:  # noqa: ASYNC110 - another thread sets it
                    await asyncio.sleep(POLL_S)
                now = monotonic()
                soonest = min(job.strategy.next_due_at for job in self.busy)
                if soonest == NEVER:  # somebody else has carried it
                    self.busy.clear()
                elif soonest > now and self._cancelled:
                    self._start_later(soonest - now)
                    return
                elif soonest > now:
                    await self._sleep(soonest - now)
                else:
                    due = [job for job in self.busy if job.strategy.next_due_at <= now]
                    await asyncio.gather(*(_start_flush(job, last=False) for job in due))
                    self._rest()
        except asyncio.CancelledError:
            # The loop is shutting down, and runs on until its tasks have ended.
            self._cancelled = True
            with suppress(asyncio.TimeoutError):
                await asyncio.wait_for(_flush_all_jobs(self.busy), EXIT_TIMEOUT_S)
            await _end_stores_tasks()
            self._rest()
            for job in self.busy:
                job.given_up = True
            raise

    async def _sleep(self, seconds: float) -> None:
        """Until woken, without a task more, as `asyncio.wait_for` would make one."""
        woken = self._woken = self._loop.create_future()
        timer = self._loop.call_later(seconds, _opened, woken)
        try:
            await woken
        finally:
            timer.cancel()
            self._woken = None

    def _rest(self) -> None:
        self.busy = {job for job in self.busy if job.strategy.next_due_at < NEVER}


def _opened(woken: asyncio.Future[None]) -> None:
    if not woken.done():
        woken.set_result(None)


async def _flush_all_jobs(jobs: set[FlushJob]) -> None:
    await asyncio.gather(*(_flush_until_sent(job, NEVER, final=True) for job in list(jobs)))


async def _flush_until_sent(job: FlushJob, deadline: float, *, final: bool) -> None:
    """Send everything that `agent` has; as often as it takes, but a store that was waited for in
    vain by one end of this process is not waited for by the next.
    """
    await _start_flush(job, last=True)
    while (job.failure or (final and job.is_left)) and not job.given_up and monotonic() < deadline:
        await asyncio.sleep(RETRY_EVERY_S)
        await _start_flush(job, last=True)


def _start_flush(job: FlushJob, *, last: bool) -> asyncio.Task[None]:
    """At work from now on, and not only once the loop comes to it."""
    done = job.running = OneShotEvent()
    task = job.task = asyncio.get_running_loop().create_task(_flush_job(job, last))
    task.add_done_callback(lambda _: done.set())
    return task


async def _flush_job(job: FlushJob, last: bool) -> None:
    try:
        flush: Awaitable[Exception | None] = job.flush(last)
        job.log_transition(await flush)
    except Exception as exc:
        job.failed(exc)


class _ExitLoop(asyncio.SelectorEventLoop):
    """A loop that looks names up by itself: no thread can be started once Python is exiting."""

    async def getaddrinfo(self, host: Any, port: Any, **how: Any) -> Any:
        return socket.getaddrinfo(host, port, **how)


def _flush(jobs: list[FlushJob], deadline: float, final: bool) -> None:
    if not final:  # else the tasks of other loops have stopped for good
        for job in jobs:
            # Nothing is counted twice beside such a task, but what it sends may not be there yet.
            job.wait(min(EXIT_TIMEOUT_S / 6, deadline - monotonic()))
    loop = _ExitLoop()
    try:
        with suppress(asyncio.TimeoutError):
            loop.run_until_complete(_flush_in_loop(jobs, deadline, final))
        loop.run_until_complete(_end_stores_tasks())
        # Ends the stores' connections, as `asyncio.run` does; else closing the loop warns of them.
        loop.run_until_complete(loop.shutdown_asyncgens())
    except Exception as exc:
        LOG.warning(
            "flushing the counts of %s failed with an unexpected error as the process ends: %r; "
            "%d counts are left",
            names_of(jobs), exc, sum(job.strategy.unsent_counts() for job in jobs),
        )  # fmt: skip
    finally:
        loop.close()


async def _flush_in_loop(jobs: list[FlushJob], deadline: float, final: bool) -> None:
    flushes = asyncio.gather(*(_flush_until_sent(job, deadline, final=final) for job in jobs))
    # The first of two flushes is not broken off at its deadline: nothing is begun after that, but
    # what is on its way may arrive.
    seconds = deadline - monotonic() if final else EXIT_TIMEOUT_S
    await asyncio.wait_for(flushes, max(RETRY_EVERY_S, seconds))


async def _end_stores_tasks() -> None:
    """They would complain of a loop that is closed under them."""
    tasks = [task for task in asyncio.all_tasks() if _is_stores(task)]
    for task in tasks:
        task.cancel()
    if tasks:
        await asyncio.wait(tasks, timeout=RETRY_EVERY_S)


def _is_stores(task: asyncio.Task[Any]) -> bool:
    code = getattr(task.get_coro(), "cr_code", None)
    return code is not None and str(_STORES) in code.co_filename
