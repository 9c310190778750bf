"""The hooks that call the last flush of a process, one for each way in which it can end.

    how the process ends                          what calls the flush
    the interpreter exits                         `atexit`, which a forked child inherits
    a child of multiprocessing or billiard ends   its finalizers; a forked one skips `atexit`
    a child of Celery's prefork pool ends         the signal `worker_process_shutdown`

    SIGTERM, after `exit_on_sigterm`              `atexit`; without it nothing

The libraries are used only if the program has imported them.
"""

from __future__ import annotations

import atexit
import os
import signal
import sys
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any

from ..core.clock import SYSTEM
from .joined_threads import are_joined_in_child

REPEATS_IGNORED_S = 5.0
"""Seconds after a SIGTERM in which `exit_on_sigterm` ignores others, so that they do not interrupt
what is cleaned up. GNU `timeout`, for example, sends it twice.
"""


class ExitHooks:
    """Has `flush_at_exit` called when this process ends."""

    def __init__(
        self, flush_at_exit: Callable[[], None], flush_before_join: Callable[[], None]
    ) -> None:
        """`flush_before_join` is called instead of `flush_at_exit` where threads that are not
        daemons may still be running, and are joined later.
        """
        self._flush_at_exit = flush_at_exit
        self._flush_before_join = flush_before_join
        self._atexit_registered = False
        self._hooked: set[str] = set()
        """Modules that call the flush in this process."""
        self._registered_after_fork: set[str] = set()
        """Modules that call `_install_again` when a child begins. Children inherit this."""

    def after_fork(self) -> None:
        """Forget the hooks that a child does not inherit."""
        self._hooked = set()

    def install(self) -> None:
        """Install the hooks that are not installed yet, for the libraries that are imported.

        Each process has to do so itself: when a child begins, multiprocessing drops all finalizers,
        also those of the child ("forkserver" and "spawn" import the main module before that). Then
        it calls what is registered for the time after a fork.
        """
        if not self._atexit_registered:
            self._atexit_registered = True
            atexit.register(self._flush_at_exit)
        for package in ("multiprocessing", "billiard"):
            name = f"{package}.util"
            if name in sys.modules and name not in self._hooked:
                util = sys.modules[name]
                util.Finalize(None, self._flush_in_finalizer, (package,), exitpriority=100)
                self._hooked.add(name)
                if name not in self._registered_after_fork:
                    self._registered_after_fork.add(name)
                    util.register_after_fork(self, ExitHooks._install_again)
        name = "celery.signals"
        if name in sys.modules and name not in self._hooked:
            sys.modules[name].worker_process_shutdown.connect(
                self._on_celery_child_exit, weak=False, dispatch_uid="distwindow"
            )
            self._hooked.add(name)

    def _install_again(self) -> None:
        self._hooked.clear()
        self.install()

    def _flush_in_finalizer(self, package: str) -> None:
        if are_joined_in_child(package):
            self._flush_before_join()
        else:
            self._flush_at_exit()

    def _on_celery_child_exit(self, **_: Any) -> None:
        self._flush_at_exit()


def exit_on_sigterm() -> None:
    """Make SIGTERM raise `SystemExit(143)` in the main thread, as if `sys.exit` was called there:
    `with` and `finally` blocks end, the threads that are not daemons are waited for, and what was
    counted is sent. For scripts; 143 is 128 + 15, as a shell shows the end by SIGTERM.

    Repeated signals are ignored for 5 s. A forked child has the default action again, and may call
    this itself. To call it twice is to call it once. Raises `RuntimeError` in any other thread than
    the main one, and where something else handles SIGTERM, such as a server, and goes on to do so.
    """
    global _is_reset_after_fork
    if threading.current_thread() is not threading.main_thread():
        raise RuntimeError(
            "exit_on_sigterm() was called outside the main thread, and Python lets only that set "
            "signal handlers; call it where the program begins"
        )
    handler = signal.getsignal(signal.SIGTERM)
    if handler not in (signal.SIG_DFL, _exit_on_first):
        raise RuntimeError(
            f"exit_on_sigterm() found that SIGTERM is handled already (by {handler!r}), and has "
            "changed nothing; have that handler call sys.exit(), or close() of what you use"
        )
    if not _is_reset_after_fork and hasattr(os, "register_at_fork"):
        os.register_at_fork(after_in_child=_restore_default_action)
        _is_reset_after_fork = True
    signal.signal(signal.SIGTERM, _exit_on_first)


_is_reset_after_fork = False
_last_sigterm_at = float("-inf")


def _exit_on_first(number: int, frame: FrameType | None) -> None:
    global _last_sigterm_at
    now = SYSTEM.monotonic()
    if now - _last_sigterm_at >= REPEATS_IGNORED_S:
        _last_sigterm_at = now
        raise SystemExit(128 + number)


def _restore_default_action() -> None:
    # A pool ends its workers by SIGTERM, and waits for them without a timeout. A handler in Python
    # does not run while the worker waits in C code, if the signal came just before that.
    if signal.getsignal(signal.SIGTERM) is _exit_on_first:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
