"""The hooks that call the last flush of a process, one for each way in which it can end.

    how the process ends                          what calls the flush
    the interpreter exits                         `atexit`, which a forked child inherits
    a child of multiprocessing or billiard ends   its finalizers; a forked one skips `atexit`
    a child of Celery's prefork pool ends         the signal `worker_process_shutdown`

The libraries are used only if the program has imported them.
"""

from __future__ import annotations

import atexit
import sys
from collections.abc import Callable
from typing import Any

from .joined_threads import are_joined_in_child


class ExitHooks:
    """Has `flush_at_exit` called when this process ends."""

    def __init__(
        self,
        flush_at_exit: Callable[[], None],
        flush_before_join: Callable[[], None],
        on_child_start: Callable[[], None],
    ) -> None:
        """`flush_before_join` is called instead of `flush_at_exit` where threads that are not
        daemons may still be running, and are joined later. `on_child_start` is called when a child
        of multiprocessing or billiard begins.
        """
        self._flush_at_exit = flush_at_exit
        self._flush_before_join = flush_before_join
        self._on_child_start = on_child_start
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
        self._on_child_start()

    def _flush_in_finalizer(self, package: str) -> None:
        if are_joined_in_child(package):
            self._flush_before_join()
        else:
            self._flush_at_exit()

    def _on_celery_child_exit(self, **_: Any) -> None:
        self._flush_at_exit()
