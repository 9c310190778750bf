"""The background worker, which runs timers: it flushes what limiters keep in memory, and samples
the machine. One thread runs those of all blocking limiters of a process, and one task in each event
loop those of its asyncio limiters.

Both start when a timer is due for the first time. With nothing due, the thread sleeps and the task
ends. Everything that is pending is flushed when the interpreter exits, and when a task is cancelled
because its loop shuts down.
"""

from __future__ import annotations

import _thread
import asyncio
import inspect
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

from ..ring.clock import NEVER, SYSTEM, Clock
from ..support.fork import register_after_fork
from ..support.locks import PATCH_STATE, OneShotEvent, WakeUp, start_thread
from .flush import FlushSource
from .flush_job import FlushJob, FlushJobs
from .shutdown import EXIT_TIMEOUT_S, GEVENT_LISTENER, SHUTDOWN, UWSGI
from .timers import LOG, Timer, Timers, monotonic

RETRY_EVERY_S = 0.02
"""Seconds between two attempts to flush at the end of a process."""
_STORE_FOLDER = Path(__file__).parents[1] / "stores"


class FlushWorker:
    """Base class of the workers of the blocking limiters and of the asyncio limiters."""

    def __init__(self) -> None:
        self.jobs = FlushJobs()
        SHUTDOWN.add(self)
        self.after_fork()

    def after_fork(self) -> None:
        """Begin afresh in a forked child, without what the parent runs; it sends its own counts."""
        for job in self.jobs.all():
            job.after_fork()

    def add_timer(self, timer: Timer, clock: Clock) -> None:
        """Run `timer` whenever it is due. Where `clock` is not the system's, only `flush()` and
        `close()` do so, because that clock may stand still.
        """
        if clock is SYSTEM:
            timer.wake = partial(self._wake, timer)
            hook_process()

    def add_limiter(
        self,
        strategy: FlushSource,
        flush: Callable[[bool], Any],
        clock: Clock,
        *,
        name: str,
        job_type: type[FlushJob] = FlushJob,
    ) -> FlushJob:
        """Return a job whose `flush` is called, and awaited in a loop, whenever `strategy` has
        something due, and at the end of the process; see `add_timer`.
        """
        SHUTDOWN.hold_call()  # a thread may count for the first time as the process ends
        job = job_type(strategy, flush, name)
        if clock is SYSTEM:
            self.jobs.add(job)
        self.add_timer(job, clock)
        return job

    def _wake(self, timer: Timer) -> object:
        """Run `timer` when it is due. Return False if nobody will: the next call has to wake."""
        raise NotImplementedError  # each worker wakes up differently


class WorkerThread(FlushWorker):
    """Runs the timers of all blocking limiters of this process, in one thread. The thread takes
    what it was woken for, runs what is due, and sleeps until the next timer is due or it is woken.

    A signal handler may raise in a caller at any line of this file. Therefore callers only make
    single calls of C functions (see `support/locks.py`), in an order that needs no undoing, and
    only the thread moves timers from `_woken` to its heap:

      the caller                       the thread
      lowers the timer's `due_at`
      adds the timer to `_woken`       removes it from `_woken`, and reads `due_at` after that
      starts the thread, or wakes it   looks at `_woken` after it was woken, and before it sleeps

      the caller was interrupted       then
      before it added to `_woken`      the source has its next caller wake the thread
                                       (`FlushSource.wake`)
      before it started the thread     the next caller, of whatever timer, finds no thread, and
                                       starts one
      after it started the thread      the next caller finds that the thread holds `_running_lock`,
                                       and starts no other
      before it woke the thread        the next caller wakes it, for all timers in `_woken`
    """

    def after_fork(self) -> None:
        super().after_fork()
        self._wake_up = WakeUp()
        self._running_lock = threading.Lock()
        """Held by the thread for as long as it runs."""
        self._thread_ident: int | None = None
        self._woken: set[Timer] = set()
        """What the thread was woken for. Each change is one call of a C function."""
        self._timers = Timers()

    def detach(self, timer: Timer) -> None:
        """Stop running `timer`, which is being closed, and wait for the run under way."""
        timer.detached = True  # before looking for a run that is under way, see `_run_timer`
        self._woken.discard(timer)
        self._timers.discard(timer)
        self.wait_for(timer)

    def wait_for(self, timer: Timer) -> None:
        if _thread.get_ident() != self._thread_ident:
            timer.wait_for_run(EXIT_TIMEOUT_S)

    def flush_all(self, deadline: float, *, final: bool) -> None:
        """Send everything that is pending, in the calling thread, with as many attempts as there is
        time for until `deadline` (monotonic seconds). Without `final`, calls are still decided, and
        what they count meanwhile need not be sent.
        """
        jobs = self.jobs.active()
        for job in jobs:
            # Nothing would be counted twice (a ring takes each flush once), but what the worker is
            # just sending might not have arrived when this returns.
            job.wait_for_run(min(EXIT_TIMEOUT_S / 6, deadline - monotonic()))
            _flush_job(job)
        while monotonic() < deadline:
            late = [job for job in jobs if job.needs_retry(final)]
            if not late:
                return
            time.sleep(RETRY_EVERY_S)
            for job in late:
                _flush_job(job)

    def _wake(self, timer: Timer) -> None:
        timer.detached = False  # the store of a closed limiter may be the caller's, and open
        self._woken.add(timer)
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
        running, wake_up, woken = self._running_lock, self._wake_up, self._woken
        timers = self._timers
        if not running.acquire(False):  # another caller has just started one
            return
        self._thread_ident = _thread.get_ident()
        try:
            threading.current_thread().name = "distwindow"
            while True:
                self._run_due(woken, timers)
                due_at = timers.next_due_at
                wake_up.sleep(None if due_at == NEVER else max(0.0, due_at - monotonic()))
                if self._wake_up is not wake_up:
                    return  # gevent has patched threads: the next `_wake` starts another one
        finally:
            if self._running_lock is running:
                self._thread_ident = None
            running.release()

    def _run_due(self, woken: set[Timer], timers: Timers) -> None:
        for timer in list(woken):
            woken.discard(timer)
            timers.add(timer)
        due = timers.take_due(monotonic())
        for timer in due:
            SHUTDOWN.hold_call()  # as the process ends, its last flush is the only one
            self._run_timer(timer)
        timers.requeue(due)

    def _run_timer(self, timer: Timer) -> None:
        done = timer.run_done = OneShotEvent()
        try:
            if not timer.detached:  # `detach` may have looked before `run_done` was set
                timer.record(timer.run())
        except BaseException as exc:
            # No signal handler runs in this thread, and nothing may end it: what the application's
            # code raises in it (a log handler, a client of redis-py) is a failure of this run.
            with suppress(BaseException):
                timer.record_unexpected_error(exc)
        finally:
            done.set()


def _flush_job(job: FlushJob) -> None:
    try:
        job.record(job.flush(True))
    except Exception as exc:
        job.record_unexpected_error(exc)


class WorkerTasks(FlushWorker):
    """Runs the timers of all asyncio limiters of this process, with one task in each event loop.

    event                               the task of the loop
    a timer is woken for                is created, or its sleep is ended
    a timer is due                      runs it, and then sleeps until the next is due
    no timer is queued                  ends; the next `wake` creates another
    it is cancelled, as its loop ends   flushes everything, for at most EXIT_TIMEOUT_S, and ends
    `wake` after it was cancelled       is created only when the timer is due: the loop is about
                                        to end, and nobody would cancel a task that sleeps
    its loop is closed without that     its timers go to the task of the loop of the next `wake`;
                                        at exit `flush_all` flushes them in a loop of its own
    `wake` in a thread without a loop   is woken, or created, in a loop that is not closed
    """

    def after_fork(self) -> None:
        super().after_fork()
        self._lock = threading.RLock()
        self._loop_workers: dict[asyncio.AbstractEventLoop, _LoopWorker] = {}

    async def detach(self, timer: Timer) -> None:
        """Stop running `timer`, which is being closed, and wait for the run under way."""
        timer.detached = True
        with self._lock:
            for worker in self._loop_workers.values():
                worker.timers.discard(timer)
        await self.wait_for(timer)

    async def wait_for(self, timer: Timer) -> None:
        """Wait until the run of `timer` that is under way in this loop has ended."""
        task = timer.task
        if task is not None and task.get_loop() is asyncio.get_running_loop():
            await asyncio.wait([task], timeout=EXIT_TIMEOUT_S)

    def flush_all(self, deadline: float, *, final: bool) -> None:
        """Send everything that is pending, in a new event loop; see `WorkerThread.flush_all`."""
        jobs = self.jobs.active()
        if not any(job.has_unsent or job.strategy.has_untold for job in jobs):
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

    def _wake(self, timer: Timer) -> bool:
        timer.detached = False
        try:
            loop = asyncio.get_running_loop()
        except RuntimeError:
            return self._wake_from_outside(timer)
        if isinstance(loop, _ExitLoop):  # `flush_all` is sending it already
            return True
        with self._lock:
            for closed in [other for other in self._loop_workers if other.is_closed()]:
                for left in self._loop_workers[closed].timers:
                    self._worker(loop).timers.add(left)
                del self._loop_workers[closed]
            self._worker(loop).wake(timer)
        SHUTDOWN.hook_exit()  # for what has been imported since
        return True

    def _wake_from_outside(self, timer: Timer) -> bool:
        """Wake the task of a loop from where none runs, best one that has `timer`. Return False
        where all loops are closed.
        """
        with self._lock:
            workers = sorted(
                self._loop_workers.items(),
                key=lambda item: (not item[0].is_running(), timer not in item[1].timers),
            )
        for loop, _ in workers:
            with suppress(RuntimeError):  # it is closed
                loop.call_soon_threadsafe(self._wake_unless_closed, timer)
                return True
        return False

    def _wake_unless_closed(self, timer: Timer) -> None:
        if not timer.detached:  # it may have been closed since
            self._wake(timer)

    def _worker(self, loop: asyncio.AbstractEventLoop) -> _LoopWorker:
        return self._loop_workers.setdefault(loop, _LoopWorker(loop))


class _LoopWorker:
    """The task of one loop, and the timers that it runs."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.timers = Timers()
        self._loop = loop
        self._task: asyncio.Task[None] | None = None
        self._woken: asyncio.Future[None] | None = None
        """The future that the task awaits while it sleeps; else None."""
        self._cancelled = False

    def wake(self, timer: Timer) -> None:
        self.timers.add(timer)
        if self._woken is not None:
            _set_woken(self._woken)
        if self._task is not None and not self._task.done():
            return
        if self._cancelled:
            self._start_later(timer.next_due_at - monotonic())
        else:
            self._start()

    def _start_later(self, seconds: float) -> None:
        """Create the task when a timer is due, and not now: the loop is ending, and nobody would
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
        # One may also have ended the task before this, when it had taken timers out of the heap.
        self.timers = Timers(self.timers)
        try:
            while self.timers:
                now = monotonic()
                if due := self.timers.take_due(now):
                    # Whatever the code of an application raises in a run, this task goes on: only a
                    # cancellation of its own is raised here.
                    await asyncio.gather(
                        *(_start_run(timer, timer.run) for timer in due), return_exceptions=True
                    )
                    self.timers.requeue(due)
                elif self._cancelled:
                    self._start_later(self.timers.next_due_at - now)
                    return
                else:
                    await self._sleep(self.timers.next_due_at - now)
        except asyncio.CancelledError:
            # The loop is shutting down, and runs until all its tasks have ended.
            self._cancelled = True
            jobs = [timer for timer in self.timers if isinstance(timer, FlushJob)]
            flushes = [_flush_until_sent(job, NEVER, final=True) for job in jobs]
            with suppress(asyncio.TimeoutError):
                await asyncio.wait_for(asyncio.gather(*flushes), EXIT_TIMEOUT_S)
            await _cancel_store_tasks()
            self.timers = Timers(self.timers)
            for job in jobs:
                job.gave_up_at_exit = job.strategy.next_due_at < NEVER
            raise

    async def _sleep(self, seconds: float) -> None:
        """Sleep for `seconds` or until woken, without another task, as `asyncio.wait_for` makes."""
        woken = self._woken = self._loop.create_future()
        timer = self._loop.call_later(seconds, _set_woken, woken)
        try:
            await woken
        finally:
            timer.cancel()
            self._woken = None


def _set_woken(woken: asyncio.Future[None]) -> None:
    if not woken.done():
        woken.set_result(None)


async def _flush_until_sent(job: FlushJob, deadline: float, *, final: bool) -> None:
    """Send everything that is pending in `job`, with as many attempts as there is time for until
    `deadline` (monotonic seconds), but only one if the store did not answer an earlier step.
    """
    await _start_run(job, partial(job.flush, True))
    while job.needs_retry(final) and monotonic() < deadline:
        await asyncio.sleep(RETRY_EVERY_S)
        await _start_run(job, partial(job.flush, True))


def _start_run(timer: Timer, run: Callable[[], Any]) -> asyncio.Task[None]:
    """Create the task of one run. `run_done` is set here, and not in the task, so that a caller
    who looks before the loop has started the task waits for it, too.
    """
    done = timer.run_done = OneShotEvent()
    task = timer.task = asyncio.get_running_loop().create_task(_run_in_task(timer, run))
    task.add_done_callback(lambda _: done.set())
    return task


async def _run_in_task(timer: Timer, run: Callable[[], Any]) -> None:
    try:
        failure = run()
        timer.record(await failure if inspect.isawaitable(failure) else failure)
    except (asyncio.CancelledError, GeneratorExit, KeyboardInterrupt, SystemExit):
        raise  # it is for this task, or was raised by a signal handler and is for the whole loop
    except BaseException as exc:
        timer.record_unexpected_error(exc)


class _ExitLoop(asyncio.SelectorEventLoop):
    """An event loop that resolves host names itself: no thread can start while Python exits."""

    async def getaddrinfo(self, host: Any, port: Any, **how: Any) -> Any:
        return socket.getaddrinfo(host, port, **how)


def _flush_in_new_loop(jobs: list[FlushJob], deadline: float, final: bool) -> None:
    if not final:  # with `final`, the tasks of other loops will not run any more
        for job in jobs:
            # Nothing would be counted twice (a ring takes each flush once), but what another loop
            # is just sending might not have arrived when this returns.
            job.wait_for_run(min(EXIT_TIMEOUT_S / 6, deadline - monotonic()))
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
            ", ".join(job.name for job in jobs), exc,
            sum(job.strategy.unacknowledged_counts() for job in jobs),
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


def hook_process() -> None:
    """Learn of what concerns the workers: a patched library, a fork by uWSGI, the process's end."""
    GEVENT_LISTENER.subscribe()
    UWSGI.hook_fork()
    SHUTDOWN.hook_exit()


THREAD_WORKER = register_after_fork(WorkerThread())
TASK_WORKER = register_after_fork(WorkerTasks())
