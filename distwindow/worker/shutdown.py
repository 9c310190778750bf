"""The end of the process: before it, what its limiters have counted is sent.

When the process exits, `flush_at_exit` sends it, in the thread that calls it: after EXIT_TIMEOUT_S
no attempt is repeated. The hooks of `exit_hooks.py` call it.

At SIGTERM, where the default action would end the process at once, a handler starts a thread and
returns. The handler takes no lock, because the code that it interrupts may hold any lock, and needs
to go on in order to release it.

    main thread       calls are decided, slowly ... calls wait ...................| end
    signal handler    ^ starts the thread                                         ^ SIG_DFL
    shutdown thread   | first flush ..............| second flush, repeated until  | sends SIGTERM to
                      |                           | nothing is pending            | this process
                      0 s      at most FIRST_FLUSH_TIMEOUT_S       at most EXIT_TIMEOUT_S

    phase      calls of limiters    SIGTERM              next phase
    RUNNING    are decided          starts the thread    FLUSHING, at the first SIGTERM
    FLUSHING   are decided, slowly  is ignored           PAUSED, when everything has been sent once,
                                                         or after FIRST_FLUSH_TIMEOUT_S
    PAUSED     wait                 is ignored           ENDING, when nothing is pending, or after
                                                         EXIT_TIMEOUT_S
    ENDING     wait                 ends the process     RUNNING, if the process has survived: the
                                                         kernel does not end process 1 of a
                                                         container by the default action

`tests/unit/test_shutdown.py` compares this table with the code.

Calls wait from PAUSED on, because no flush would send what they count; they are not refused, and do
not raise. Only the main thread runs signal handlers; where it stays in C code for longer than
MAIN_THREAD_TIMEOUT_S, the shutdown thread restores the default action by itself. Calls are slow
during the first flush because each sleeps for CALL_DELAY_S: a thread that calls without a break
would leave the flush little time, and under gevent, where the shutdown thread is a greenlet, none.
uvicorn handles SIGTERM itself: see `uvicorn.py`.
"""

from __future__ import annotations

import _thread
import ctypes
import os
import signal
import threading
import time
from contextlib import suppress
from functools import partial
from types import FrameType
from typing import Protocol

from ..core.interrupts import OneShotEvent
from ..operations.flush_source import FlushSource
from .exit_hooks import ExitHooks
from .flush_job import EXIT_TIMEOUT_S, LOG, FlushJob, FlushJobs, job_names, monotonic, report_lost
from .joined_threads import call_after_joined_threads, is_joined_later, joined_threads
from .signal_watch import SignalWatch
from .uvicorn import UvicornHandler

MAIN_THREAD_TIMEOUT_S = 0.5
"""Seconds after which the main thread has to have run the handler that ends the process."""
FIRST_FLUSH_TIMEOUT_S = 1.0
"""The part of EXIT_TIMEOUT_S, in seconds, during which calls are still decided."""
SETTLE_S = 0.01
"""Seconds in which calls that other threads have begun to decide are completed."""
CALL_DELAY_S = 0.0002
"""Seconds that each call sleeps during the first flush."""
POLL_S = 0.005
"""Seconds between two checks where nothing can wake the waiting thread."""

RUNNING, FLUSHING, PAUSED, ENDING = range(4)


class FlushWorker(Protocol):
    """Flushes the blocking limiters, or the asyncio limiters."""

    jobs: FlushJobs

    def flush_all(self, deadline: float, *, final: bool) -> None:
        """Send everything that is pending, until `deadline` (monotonic seconds). With `final`, no
        call is decided any more, and the flush is repeated until nothing is pending.
        """
        ...


class Shutdown:
    """The end of this process: its phase, and the hooks and handlers that lead to it."""

    def __init__(self) -> None:
        self._workers: list[FlushWorker] = []
        self._signal_watch = SignalWatch(self._waits_for_sigterm)
        self._exit_hooks = ExitHooks(
            self.flush_at_exit, self.flush_before_join, self._signal_watch.start_in_child
        )
        self._uvicorn_handler = UvicornHandler(self._shut_down)
        self.after_fork()

    def after_fork(self) -> None:
        """Begin in phase RUNNING: a child does not end because its parent does."""
        self.phase = RUNNING
        self.flushing_threads: set[int] = set()
        """Identifiers of the threads that flush during the shutdown, and must not be paused."""
        self._sigterm_survived = OneShotEvent()
        self._exit_hooks.after_fork()
        self._signal_watch.after_fork()
        self._exit_began = False
        self._paused_for_exit = False
        self._joins_later = False
        """True if Python joins the threads that are not daemons after the hook has been called."""
        self._uvicorn_handler.after_fork()

    def add(self, worker: FlushWorker) -> None:
        """Have `worker` flush before the process ends."""
        self._workers.append(worker)

    def on_limiter_created(self, strategy: FlushSource, *, handle_sigterm: bool) -> None:
        """Install the hooks that a limiter needs. Pause its calls if the shutdown has begun."""
        self.hook_exit()
        if handle_sigterm and self._install_sigterm_handler():
            self._signal_watch.install()
            self._signal_watch.start_in_child()
        if self.phase != RUNNING:
            strategy.pause_calls(self.hold_call)

    def hook_exit(self) -> None:
        """Have `flush_at_exit` called when this process exits, by each hook of `exit_hooks.py`."""
        self._exit_hooks.install()

    def on_worker_started(self) -> None:
        """Install the hooks for what has been imported since, and watch for SIGTERM."""
        self.hook_exit()
        self._signal_watch.start()

    def hold_call(self) -> None:
        """Delay a call during the first flush. After that, block it until the process has ended, or
        has survived.
        """
        if self.phase == RUNNING and (
            not self._paused_for_exit or (self._joins_later and is_joined_later())
        ):
            return
        if _thread.get_ident() not in self.flushing_threads:
            time.sleep(CALL_DELAY_S)
            while self.phase >= PAUSED or self._paused_for_exit:
                time.sleep(POLL_S)

    def are_calls_paused(self) -> bool:
        """True once calls are paused for the last flush, after which the process ends."""
        return self.phase >= PAUSED or self._paused_for_exit

    def flush(self) -> None:
        """Send everything that is pending, while the process goes on."""
        for worker in self._workers:
            worker.flush_all(monotonic() + EXIT_TIMEOUT_S, final=True)

    def flush_at_exit(self) -> None:
        """Send everything that is pending, as the process exits. If SIGTERM has come before, wait
        for the shutdown thread, which sends it and ends the process.
        """
        self._exit_began = True
        until = monotonic() + EXIT_TIMEOUT_S + MAIN_THREAD_TIMEOUT_S
        while self.phase != RUNNING and monotonic() < until:
            time.sleep(POLL_S)
        began = monotonic()
        for worker in self._workers:
            worker.jobs.wait_until_closed(began + EXIT_TIMEOUT_S)
            worker.flush_all(began + FIRST_FLUSH_TIMEOUT_S, final=False)
        self._pause_daemon_threads()
        for worker in self._workers:
            # Beyond the deadline, which another worker's store may have used up, it is one attempt.
            worker.flush_all(began + EXIT_TIMEOUT_S, final=True)
            report_lost(worker.jobs.active())
        self._uvicorn_handler.end_process_if_blocked()

    def flush_before_join(self) -> None:
        """Send what is pending now, and everything else when the threads that Python joins have
        ended. Their calls are not paused: Python would wait for them without end.
        """
        self._joins_later = True
        if not joined_threads():
            self.flush_at_exit()
            return
        for worker in self._workers:  # a second KeyboardInterrupt ends the process without joining
            worker.flush_all(monotonic() + FIRST_FLUSH_TIMEOUT_S, final=False)
        if not call_after_joined_threads(self.flush_at_exit):
            LOG.warning(
                "no thread could be started for the last flush: what the threads of this process "
                "still count is lost unless a flush is due before they end"
            )

    # -- SIGTERM ----------------------------------------------------------------------------------

    def on_sigterm(self, number: int, frame: FrameType | None) -> None:
        """Handle SIGTERM, as the table at the head of this file says."""
        self._signal_watch.on_handled()
        if self.phase == ENDING:
            signal.signal(number, signal.SIG_DFL)
            signal.raise_signal(number)
            # The process has survived: it is process 1 of a container.
            signal.signal(number, self.on_sigterm)
            self._sigterm_survived.set()
        elif self.phase == RUNNING:
            self._start_shutdown(number)

    def _install_sigterm_handler(self) -> bool:
        """Install the handler where the default action (or uvicorn) would end the process, and
        where this is the main thread: Python lets no other thread install handlers. True if it has
        replaced the default action.
        """
        if threading.current_thread() is not threading.main_thread():
            return False
        handler = signal.getsignal(signal.SIGTERM)
        if handler is signal.SIG_DFL:
            signal.signal(signal.SIGTERM, self.on_sigterm)
            return True
        self._uvicorn_handler.wrap(handler)
        return False

    def _waits_for_sigterm(self) -> bool:
        return self.phase == RUNNING and signal.getsignal(signal.SIGTERM) == self.on_sigterm

    def _pause_daemon_threads(self) -> None:
        """Have the calls of daemon threads wait from now on: they go on while Python exits, and no
        flush would send what they count. The thread that flushes goes on, too.
        """
        self.flushing_threads.add(_thread.get_ident())
        self._paused_for_exit = True
        self._pause_calls()
        time.sleep(SETTLE_S)

    def _start_shutdown(self, number: int) -> None:
        self.phase = FLUSHING
        self._pause_calls()
        try:
            _thread.start_new_thread(self._flush_and_end, (number,))
        except RuntimeError as exc:
            if not self._exit_began:
                why = f"no thread could be started for that: {exc}"
                with suppress(Exception):  # whatever it is, the process has to end
                    report_lost(self._active_jobs(), "SIGTERM has ended the process before", why)
                self.phase = ENDING
                self.on_sigterm(number, None)
            # Otherwise Python is exiting, and `flush_at_exit` is running. The next SIGTERM ends the
            # process at once.
            self.phase = RUNNING
            signal.signal(number, signal.SIG_DFL)

    def _shut_down(self, number: int) -> None:
        """Flush in the calling thread, and end the process by this signal."""
        self.phase = FLUSHING
        self._pause_calls()
        self._flush_and_end(number)

    def _flush_and_end(self, number: int) -> None:
        """Send everything that is pending, and end the process."""
        try:
            self._send_all(monotonic())
        except Exception as exc:
            _log_unexpected(self._active_jobs())
            report_lost(self._active_jobs(), why=exc)
        finally:
            self.phase = ENDING
            os.kill(os.getpid(), number)
            self._sigterm_survived.wait(MAIN_THREAD_TIMEOUT_S)
            if os.getpid() != 1:
                _end_without_main_thread(number)
        self._sigterm_survived = OneShotEvent()
        self.phase = RUNNING
        for worker in self._workers:
            for job in worker.jobs.all():
                job.strategy.resume_calls()
                job.gave_up_at_exit = job.loss_reported = False

    def _send_all(self, began: float) -> None:
        """Run the phases FLUSHING and PAUSED of a shutdown that began at `began` (monotonic)."""
        first = self._flush_workers(began + FIRST_FLUSH_TIMEOUT_S, final=False)
        for worker in self._workers:
            worker.jobs.wait_until_closed(began + FIRST_FLUSH_TIMEOUT_S)
        self.phase = PAUSED
        deadline = began + EXIT_TIMEOUT_S
        # Wait for the exchanges of the first flush that are under way. Leases that are being given
        # back must not be given back twice, so the second flush does not send them again.
        for done in first:
            done.wait(deadline - monotonic())
        while True:
            time.sleep(SETTLE_S)
            self._flush_workers(deadline, final=True)
            jobs = self._active_jobs()
            if monotonic() >= deadline or not any(job.has_unsent for job in jobs):
                break
        report_lost(jobs)

    def _pause_calls(self) -> None:
        for job in self._active_jobs():
            job.strategy.pause_calls(self.hold_call)

    def _active_jobs(self) -> list[FlushJob]:
        return [job for worker in self._workers for job in worker.jobs.active()]

    def _flush_workers(self, deadline: float, *, final: bool) -> list[OneShotEvent]:
        """Have all workers flush at the same time, each in a thread of its own: a store that does
        not answer may block one beyond `deadline`. Return the events that are set when they have
        ended.
        """
        flushes: list[OneShotEvent] = []
        for worker in self._workers:
            if worker.jobs.active():
                done = OneShotEvent()
                flush = partial(self._flush_worker, worker, deadline, final, done)
                try:
                    _thread.start_new_thread(flush, ())
                except RuntimeError:  # the main thread is exiting: no thread can be started
                    flush()
                flushes.append(done)
        for done in flushes:
            done.wait(deadline - monotonic())
        return flushes

    def _flush_worker(
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


def _log_unexpected(jobs: list[FlushJob]) -> None:
    LOG.exception(
        "flushing the counts of %s at SIGTERM failed with an unexpected error; %d counts are not "
        "sent yet, and another line is logged if they are lost",
        job_names(jobs), sum(job.strategy.unacknowledged_counts() for job in jobs),
    )  # fmt: skip


def _end_without_main_thread(number: int) -> None:
    """End the process although the main thread does not run the handler. The default action is set
    through the C library, because Python lets only the main thread set it.
    """
    with suppress(Exception):
        # SIG_DFL is the null pointer.
        ctypes.CDLL(None).signal(number, None)
        os.kill(os.getpid(), number)
        time.sleep(POLL_S)
    os._exit(128 + number)
