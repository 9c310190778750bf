"""The end of the process: before it, what its limiters have counted is sent.

`flush_at_exit` sends it, in the thread that calls it: after EXIT_TIMEOUT_S no attempt is repeated.
The hooks of `exit_hooks.py` call it. Meanwhile the threads that Python does not join go on:

    the hook's thread    first flush ........ | SETTLE_S | last flush ......... | Python ends
    calls of daemons     are decided          | wait, since no flush would send what they count

No signal is handled here: SIGTERM ends a process at once unless the application or its server
handles it, or calls `exit_on_sigterm`.
"""

from __future__ import annotations

import _thread
import time
from typing import Protocol

from .exit_hooks import ExitHooks
from .flush_job import EXIT_TIMEOUT_S, LOG, FlushJobs, monotonic, report_lost
from .joined_threads import call_after_joined_threads, is_joined_later, joined_threads

FIRST_FLUSH_TIMEOUT_S = 1.0
"""The part of EXIT_TIMEOUT_S, in seconds, during which calls are still decided."""
SETTLE_S = 0.01
"""Seconds in which calls that other threads have begun to decide are completed."""
POLL_S = 0.005
"""Seconds between two checks where nothing can wake the waiting thread."""


class FlushWorker(Protocol):
    """Flushes the blocking limiters, or the asyncio limiters."""

    jobs: FlushJobs

    def flush_all(self, deadline: float, *, final: bool) -> None:
        """Send everything that is pending, until `deadline` (monotonic seconds). With `final`, no
        call is decided any more, and the flush is repeated until nothing is pending.
        """
        ...


class Shutdown:
    """The end of this process, and the hooks that lead to it."""

    def __init__(self) -> None:
        self._workers: list[FlushWorker] = []
        self._exit_hooks = ExitHooks(self.flush_at_exit, self.flush_before_join)
        self.after_fork()

    def after_fork(self) -> None:
        """Begin anew: a child does not end because its parent does."""
        self._paused = False
        self.flushing_threads: set[int] = set()
        """Identifiers of the threads that flush as the process ends, and must not be paused."""
        self._joins_later = False
        """True if Python joins the threads that are not daemons after the hook has been called."""
        self._exit_hooks.after_fork()

    def add(self, worker: FlushWorker) -> None:
        """Have `worker` flush before the process ends."""
        self._workers.append(worker)

    def hook_exit(self) -> None:
        """Have `flush_at_exit` called when this process exits, by each hook of `exit_hooks.py`."""
        self._exit_hooks.install()

    def hold_call(self) -> None:
        """Block a call that is made once calls are paused, until the process has ended."""
        if not self._paused or (self._joins_later and is_joined_later()):
            return
        while self._paused and _thread.get_ident() not in self.flushing_threads:
            time.sleep(POLL_S)

    def are_calls_paused(self) -> bool:
        """True once calls are paused for the last flush, after which the process ends."""
        return self._paused

    def flush(self) -> None:
        """Send everything that is pending, while the process goes on."""
        for worker in self._workers:
            worker.flush_all(monotonic() + EXIT_TIMEOUT_S, final=True)

    def flush_at_exit(self) -> None:
        """Send everything that is pending, as the process exits."""
        began = monotonic()
        for worker in self._workers:
            worker.jobs.wait_until_closed(began + EXIT_TIMEOUT_S)
            worker.flush_all(began + FIRST_FLUSH_TIMEOUT_S, final=False)
        self._pause_daemon_threads()
        for worker in self._workers:
            # Beyond the deadline, which another worker's store may have used up, it is one attempt.
            worker.flush_all(began + EXIT_TIMEOUT_S, final=True)
            report_lost(worker.jobs.active())

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

    def _pause_daemon_threads(self) -> None:
        """Have the calls of daemon threads wait from now on: they go on while Python exits, and no
        flush would send what they count. The thread that flushes goes on, too.
        """
        self.flushing_threads.add(_thread.get_ident())
        self._paused = True
        for worker in self._workers:
            for job in worker.jobs.active():
                job.strategy.pause_calls(self.hold_call)
        time.sleep(SETTLE_S)


SHUTDOWN = Shutdown()
