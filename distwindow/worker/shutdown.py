"""How a process ends: what its limiters have counted is sent before.

At exit, `flush_at_exit` sends it, in the thread that runs it, for at most EXIT_TIMEOUT_S. It is
called by `atexit`, and where processes end without that: by the finalizers of multiprocessing and
billiard, and by Celery's signal `worker_process_shutdown`.

At SIGTERM, where that would end the process on the spot, a handler starts a thread and returns. It
takes no lock: the code that it interrupts may hold any, and goes on.

    main thread      calls are decided, slowly ... calls wait .....................| end
    handler          ^ starts the thread                                           ^ SIG_DFL
    ending thread    | flush all ................| pause, flush all, until nothing | SIGTERM to the
                     |                           | is left                         | own process
                     0 s      at most FIRST_FLUSH_S                at most EXIT_TIMEOUT_S

    phase      calls of limiters   a SIGTERM            goes on to
    RUNNING    are decided         starts the thread    FLUSHING, with the first SIGTERM
    FLUSHING   are decided, slowly is ignored           FROZEN, when all was sent once, or after
                                                        FIRST_FLUSH_S
    FROZEN     wait                is ignored           ENDING, when nothing is left to send
    ENDING     wait                ends the process     RUNNING, if the process has survived: the
                                                        kernel keeps process 1 of a container

Calls wait, rather than being refused or raising: whatever they returned would be a count that
nobody sends. The handler is run by the main thread only; where that sits in C code for longer than
MAIN_THREAD_TIMEOUT_S, the ending thread restores the default action by itself. Calls are slow
during the first flush because each sleeps for YIELD_S: a thread that does nothing but call would
leave the flush little time, and under gevent, where the ending thread is a greenlet, none at all.

uvicorn replaces the handler, and when it has shut down restores the default action and raises
SIGTERM at once. A limiter made while uvicorn's handler is in force puts a handler around that one,
which blocks SIGTERM in the main thread and watches, in a thread, for the default action to be
restored. From then on it is as above, and SIGTERM ends the process once everything is sent.
"""

from __future__ import annotations

import _thread
import atexit
import ctypes
import os
import signal
import sys
import threading
import time
from _thread import interrupt_main
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from types import FrameType
from typing import Any, Protocol

from ..core.interrupts import OneShotEvent
from ..operations.strategy import Strategy
from .flush_job import EXIT_TIMEOUT_S, LOG, FlushJob, FlushJobs, monotonic, names_of, report_lost

MAIN_THREAD_TIMEOUT_S = 0.5
"""Seconds that the main thread has to run the handler that ends the process."""
FIRST_FLUSH_S = 1.0
"""Seconds of EXIT_TIMEOUT_S in which calls go on being decided."""
PAUSE_S = 0.01
"""Seconds in which calls that are just being decided by other threads come to their end."""
YIELD_S = 0.0002
"""Seconds that each call sleeps during the first flush."""
POLL_S = 0.005
"""Seconds between two looks at what is waited for."""

RUNNING, FLUSHING, FROZEN, ENDING = range(4)

Handler = Callable[[int, "FrameType | None"], Any]


class FlushWorker(Protocol):
    """Flushes the limiters of one kind."""

    jobs: FlushJobs

    def flush_all(self, deadline: float, *, final: bool) -> None:
        """Send everything there is, until `deadline` (monotonic seconds). With `final` nobody
        counts any more, and it is sent until nothing is left.
        """
        ...


class Shutdown:
    """The end of this process."""

    def __init__(self) -> None:
        self._workers: list[FlushWorker] = []
        self._at_exit = False
        """`flush_at_exit` is registered with `atexit`, which a forked child inherits."""
        self._masked = False
        """SIGTERM is blocked in the main thread."""
        self._rehooked: set[str] = set()
        """Modules that call `_hook_exit_again` as a child begins."""
        self.after_fork()

    def after_fork(self) -> None:
        """The child is not ending, whatever its parent does."""
        self.phase = RUNNING
        self.flushing_threads: set[int] = set()
        """Threads that flush, and must not wait for the end. By identifier."""
        self._survived = OneShotEvent()
        self._watching = False
        self._hooked: set[str] = set()
        self._exiting = False
        if self._masked:
            self._masked = False
            signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})

    def add(self, worker: FlushWorker) -> None:
        """Have `worker` flush before the process ends."""
        self._workers.append(worker)

    def on_limiter_created(self, strategy: Strategy, *, handle_sigterm: bool) -> None:
        """A limiter has been made."""
        if not self._at_exit:
            self._at_exit = True
            atexit.register(self.flush_at_exit)
        self.hook_exit()
        if handle_sigterm:
            install_sigterm_handler()
        if self.phase != RUNNING:
            strategy.pause_calls(self.pause)

    def hook_exit(self) -> None:
        """Have `flush_at_exit` called in processes that end without `atexit`, by what is imported.
        In each process anew: as a child begins, multiprocessing forgets all finalizers, also those
        of the child itself ("forkserver" and "spawn" import the main module before that). Then it
        runs what is registered for after a fork.
        """
        for name in ("multiprocessing.util", "billiard.util"):
            if name in sys.modules and name not in self._hooked:
                util = sys.modules[name]
                util.Finalize(None, self.flush_at_exit, exitpriority=100)
                self._hooked.add(name)
                if name not in self._rehooked:  # this, a child inherits
                    self._rehooked.add(name)
                    util.register_after_fork(self, Shutdown._hook_exit_again)
        name = "celery.signals"
        if name in sys.modules and name not in self._hooked:
            sys.modules[name].worker_process_shutdown.connect(
                self._celery_child_ends, weak=False, dispatch_uid="distwindow"
            )
            self._hooked.add(name)

    def _hook_exit_again(self) -> None:
        self._hooked.clear()
        self.hook_exit()

    def pause(self) -> None:
        """Slow a call down during the first flush; after that have it wait until the process has
        ended, or has survived.
        """
        if self.phase != RUNNING and _thread.get_ident() not in self.flushing_threads:
            time.sleep(YIELD_S)
            while self.phase >= FROZEN:
                time.sleep(POLL_S)

    def flush(self) -> None:
        """Send everything there is, while the process goes on."""
        for worker in self._workers:
            worker.flush_all(monotonic() + EXIT_TIMEOUT_S, final=True)

    def flush_at_exit(self) -> None:
        """Send everything there is, as the process ends in order. Where SIGTERM has come before,
        the ending thread does that, and ends the process.
        """
        self._exiting = True
        until = monotonic() + EXIT_TIMEOUT_S + MAIN_THREAD_TIMEOUT_S
        while self.phase != RUNNING and monotonic() < until:
            time.sleep(POLL_S)
        for worker in self._workers:
            deadline = monotonic() + EXIT_TIMEOUT_S
            worker.jobs.wait_until_closed(deadline)
            worker.flush_all(deadline, final=True)
            report_lost(worker.jobs.active())
        if self._masked and threading.current_thread() is threading.main_thread():
            # The main thread has come here before the watching thread looked again: SIGTERM ends
            # the process now, as uvicorn has meant it to.
            self._masked = False
            signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})

    def _celery_child_ends(self, **_: Any) -> None:
        self.flush_at_exit()

    # -- SIGTERM ----------------------------------------------------------------------------------

    def on_sigterm(self, number: int, frame: FrameType | None) -> None:
        """The handler."""
        if self.phase == ENDING:
            signal.signal(number, signal.SIG_DFL)
            signal.raise_signal(number)
            # Still here.
            signal.signal(number, self.on_sigterm)
            self._survived.set()
        elif self.phase == RUNNING:
            self._begin(number)

    def on_uvicorns_sigterm(self, handler: Handler, number: int, frame: FrameType | None) -> None:
        """The handler, where uvicorn's was in force."""
        handler(number, frame)
        if not self._watching:
            self._watching = True
            with suppress(RuntimeError):  # no thread can be started: it ends as without us
                # Before SIGTERM is blocked here, as threads inherit that.
                _thread.start_new_thread(self._watch, (number, signal.getsignal(number)))
                self._masked = True
                signal.pthread_sigmask(signal.SIG_BLOCK, {number})

    def _begin(self, number: int) -> None:
        self.phase = FLUSHING
        self._freeze()
        try:
            _thread.start_new_thread(self._end, (number,))
        except RuntimeError as exc:
            if not self._exiting:
                why = f"no thread could be started for that: {exc}"
                with suppress(Exception):  # whatever it is, the process has to end
                    report_lost(self._open(), "SIGTERM has ended the process before", why)
                self.phase = ENDING
                self.on_sigterm(number, None)
            # Else Python is exiting, and flushes already. The next SIGTERM ends it at once.
            self.phase = RUNNING
            signal.signal(number, signal.SIG_DFL)

    def _watch(self, number: int, handler: Any) -> None:
        """Wait for uvicorn to restore the action that it found."""
        while (action := signal.getsignal(number)) == handler:
            time.sleep(POLL_S)
        if action == signal.SIG_DFL:
            self.phase = FLUSHING
            self._freeze()
            self._end(number)
        else:  # somebody else's handler, which would not see the signal that is blocked
            interrupt_main(signal.Signals(number))

    def _end(self, number: int) -> None:
        """Send everything, and end the process."""
        try:
            self._send_all(monotonic())
        except Exception as exc:
            _log_unexpected(self._open())
            report_lost(self._open(), why=exc)
        finally:
            self.phase = ENDING
            os.kill(os.getpid(), number)
            self._survived.wait(MAIN_THREAD_TIMEOUT_S)
            if os.getpid() != 1:
                _end_without_main_thread(number)
        self._survived = OneShotEvent()
        self.phase = RUNNING
        for worker in self._workers:
            for job in worker.jobs.all():
                job.strategy.resume_calls()
                job.given_up = job.loss_reported = False

    def _send_all(self, began: float) -> None:
        first = self._flush(began + FIRST_FLUSH_S, final=False)
        for worker in self._workers:
            worker.jobs.wait_until_closed(began + FIRST_FLUSH_S)
        self.phase = FROZEN
        deadline = began + EXIT_TIMEOUT_S
        # What is on its way goes on: leases that are being given back must not be given back twice,
        # so nobody would send them again.
        for done in first:
            done.wait(deadline - monotonic())
        while True:
            time.sleep(PAUSE_S)
            self._flush(deadline, final=True)
            jobs = self._open()
            if monotonic() >= deadline or not any(job.is_left for job in jobs):
                break
        report_lost(jobs)

    def _freeze(self) -> None:
        for job in self._open():
            job.strategy.pause_calls(self.pause)

    def _open(self) -> list[FlushJob]:
        return [job for worker in self._workers for job in worker.jobs.active()]

    def _flush(self, deadline: float, *, final: bool) -> list[OneShotEvent]:
        """Have all workers flush at the same time, each in a thread: a store that does not answer
        may keep one beyond `deadline`. Returns what is set when they have done.
        """
        flushes: list[OneShotEvent] = []
        for worker in self._workers:
            if worker.jobs.active():
                done = OneShotEvent()
                flush = partial(self._flush_one, worker, deadline, final, done)
                try:
                    _thread.start_new_thread(flush, ())
                except RuntimeError:  # the main thread is exiting, and no thread starts any more
                    flush()
                flushes.append(done)
        for done in flushes:
            done.wait(deadline - monotonic())
        return flushes

    def _flush_one(
        self, worker: FlushWorker, deadline: float, final: bool, done: OneShotEvent
    ) -> None:
        ident = _thread.get_ident()
        self.flushing_threads.add(ident)
        try:
            worker.flush_all(deadline, final=final)
        except Exception:
            _log_unexpected(worker.jobs.active())
        finally:
            self.flushing_threads.discard(ident)
            done.set()


SHUTDOWN = Shutdown()


def install_sigterm_handler() -> None:
    """Handle SIGTERM, where that would end the process on the spot and it can be handled."""
    if threading.current_thread() is not threading.main_thread():
        return
    handler = signal.getsignal(signal.SIGTERM)
    if handler is signal.SIG_DFL:
        signal.signal(signal.SIGTERM, SHUTDOWN.on_sigterm)
    elif callable(handler) and _is_uvicorns(handler) and hasattr(signal, "pthread_sigmask"):
        uvicorns = handler
        signal.signal(
            signal.SIGTERM,
            lambda number, frame: SHUTDOWN.on_uvicorns_sigterm(uvicorns, number, frame),
        )


def _is_uvicorns(handler: Handler) -> bool:
    return str(getattr(handler, "__module__", "")).startswith("uvicorn.")


def _log_unexpected(jobs: list[FlushJob]) -> None:
    LOG.exception(
        "sending the counts of %s at SIGTERM failed with an unexpected error; %d counts are left, "
        "which another line reports where they are lost",
        names_of(jobs), sum(job.strategy.unsent_counts() for job in jobs),
    )  # fmt: skip


def _end_without_main_thread(number: int) -> None:
    """Only the main thread may set a signal's action through Python, and it does not come to it."""
    with suppress(Exception):
        # SIG_DFL is the null pointer.
        ctypes.CDLL(None).signal(number, None)
        os.kill(os.getpid(), number)
        time.sleep(POLL_S)
    os._exit(128 + number)
