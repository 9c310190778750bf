"""Notices a SIGTERM whose handler does not run, and sends it again.

CPython's own handler, in C, only sets a flag; the handler in Python runs when the main thread next
executes bytecode. A signal that comes after the main thread has last looked at the flag, and before
it blocks in a system call, interrupts nothing: the handler runs when that call returns, which may
be never. `multiprocessing.Pool` meets this often, as it sends SIGTERM to its workers just when they
are about to wait for the next task, and then waits for their end without a timeout.

    main thread    ...looks at the flag | blocks in sem_wait ............ EINTR | runs the handler
    SIGTERM                             ^ sets the flag, writes a byte     |
    watch thread   read(pipe) ..........| reads the byte, waits GRACE_S ---^ sends SIGTERM again

The byte is written by `signal.set_wakeup_fd`. Where somebody else has set that (asyncio does, for
`loop.add_signal_handler`), it is left alone: whoever did is woken by each signal.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress

from ..core.interrupts import start_thread
from .flush_job import monotonic

GRACE_S = 0.02
"""Seconds that the main thread has to run the handler before the signal is sent again."""
MAX_RESENDS = 50
"""How often it is sent again at most: each one can be missed in the same way."""
HANDLED_RECENTLY_S = 1.0
"""Seconds after a run of the handler in which no signal counts as missed."""


class SignalWatch:
    """The pipe that signals are written to, and the thread that reads it."""

    def __init__(self, waits_for_sigterm: Callable[[], bool]) -> None:
        """`waits_for_sigterm`: True while the handler is installed, and has not begun to end the
        process.
        """
        self._waits_for_sigterm = waits_for_sigterm
        self._handled_at = 0.0
        self._pipe: tuple[int, int] | None = None
        self._running_lock = threading.Lock()

    def after_fork(self) -> None:
        """Replace the pipe that the child shares with its parent. Threads are not inherited."""
        self._running_lock = threading.Lock()
        if self._pipe is not None:
            inherited, self._pipe = self._pipe, None
            with suppress(ValueError):
                current = signal.set_wakeup_fd(-1)
                if current != inherited[1]:
                    signal.set_wakeup_fd(current)
            for end in inherited:
                os.close(end)
            self.install()

    def install(self) -> None:
        """Have signals written to a pipe. Does nothing outside the main thread, where Python does
        not allow it, under gevent, whose loop runs the handlers, and where it is done already.
        """
        if self._pipe is not None or not hasattr(signal, "pthread_kill") or _gevent_has_patched():
            return
        reading, writing = os.pipe()
        os.set_blocking(writing, False)
        try:
            before = signal.set_wakeup_fd(writing, warn_on_full_buffer=False)
            if before != -1:
                signal.set_wakeup_fd(before)
        except ValueError:  # this is not the main thread
            before = 0
        if before == -1:
            self._pipe = reading, writing
        else:
            os.close(reading)
            os.close(writing)

    def on_handled(self) -> None:
        """Note that the handler in Python has run."""
        self._handled_at = monotonic()

    def start_in_child(self) -> None:
        """Start the thread if this is a child of multiprocessing, even if nothing is ever flushed
        here: its parent may wait for its end without a timeout. Elsewhere that would be too early,
        because a fork beside a running thread is deprecated.
        """
        process = sys.modules.get("multiprocessing.process")
        if process is not None and process.parent_process() is not None:
            self.start()

    def start(self) -> None:
        """Start the thread, where signals are written to the pipe and it is not running."""
        if self._pipe is not None and not self._running_lock.locked():
            start_thread(self._watch, self._pipe[0], self._running_lock)

    def _watch(self, reading: int, running: threading.Lock) -> None:
        if not running.acquire(False):  # started twice at the same time
            return
        threading.current_thread().name = "distwindow-signals"
        main = threading.main_thread().ident
        with suppress(OSError):  # closed
            while numbers := os.read(reading, 64):
                for _ in range(MAX_RESENDS if signal.SIGTERM in numbers else 0):
                    time.sleep(GRACE_S)
                    handled = monotonic() - self._handled_at < HANDLED_RECENTLY_S
                    if main is None or handled or not self._waits_for_sigterm():
                        break
                    signal.pthread_kill(main, signal.SIGTERM)


def _gevent_has_patched() -> bool:
    monkey = sys.modules.get("gevent.monkey")
    return monkey is not None and bool(monkey.is_module_patched("threading"))
