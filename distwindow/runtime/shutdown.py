"""How a process ends: what its limiters have counted is sent before, whatever ends it.

how the process ends                          what calls the last flush
the interpreter exits                         `atexit`, which a forked child inherits
a child of multiprocessing or billiard ends   its finalizers; a forked one skips `atexit`
a child of Celery's prefork pool ends         the signal `worker_process_shutdown`
SIGTERM, after `exit_on_sigterm`              `atexit`; without it nothing

gevent and uWSGI make one process into another: before gevent patches the standard library
everything is sent, and after that, or in a worker that uWSGI has forked, limiters begin anew.
"""

from __future__ import annotations

import _thread
import atexit
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from importlib import import_module
from types import FrameType
from typing import Any

from ..ring.clock import SYSTEM
from ..support.fork import register_after_fork, reset_process_state
from ..support.locks import PATCH_STATE
from .flush_job import report_lost
from .timers import LOG, monotonic

EXIT_TIMEOUT_S = 3.0
"""The longest time, in seconds, that the end of a process waits for its counts to be sent."""
FIRST_FLUSH_TIMEOUT_S = 1.0
"""The part of EXIT_TIMEOUT_S, in seconds, during which calls are still decided."""
SETTLE_S = 0.01
"""Seconds in which calls that other threads have begun to decide are completed."""
POLL_S = 0.005
"""Seconds between two checks where nothing can wake the waiting thread."""
REPEATS_IGNORED_S = 5.0
"""Seconds after a SIGTERM in which `exit_on_sigterm` ignores others, so that they do not interrupt
what is cleaned up. GNU `timeout`, for example, sends it twice.
"""


class Shutdown:
    """The end of this process, and the hooks that lead to it.

    `flush_at_exit` sends what is pending, in the thread that calls it: after EXIT_TIMEOUT_S no
    attempt is repeated. Threads that Python does not join go on:

      the hook's thread    first flush ........ | SETTLE_S | last flush ......... | Python ends
      calls of daemons     are decided          | wait, since no flush would send what they count

    No signal is handled here: SIGTERM ends a process at once unless the application or its server
    handles it, or calls `exit_on_sigterm`.
    """

    def __init__(self) -> None:
        self._workers: list[Any] = []
        self._atexit_registered = False
        self._registered_after_fork: set[str] = set()
        """Modules that call `_hook_exit_again` when a child begins. Children inherit this."""
        self.after_fork()

    def after_fork(self) -> None:
        """Begin anew: a child does not end because its parent does."""
        self._paused = False
        self.flushing_threads: set[int] = set()
        """Identifiers of the threads that flush as the process ends, and must not be paused."""
        self._joins_later = False
        """True if Python joins the threads that are not daemons after the hook has been called."""
        self._hooked: set[str] = set()
        """Modules that call the flush in this process."""

    def add(self, worker: Any) -> None:
        """Add a `FlushWorker` to those that flush before the process ends."""
        self._workers.append(worker)

    def hook_exit(self) -> None:
        """Call `flush_at_exit` when this process exits, by the hooks of Python and of the libraries
        that are imported, as far as they are not installed yet.

        Each process has to do so itself: when a child begins, multiprocessing drops all finalizers,
        also those of the child ("forkserver" and "spawn" import the main module before that). Then
        it calls what is registered for the time after a fork.
        """
        if not self._atexit_registered:
            self._atexit_registered = True
            atexit.register(self.flush_at_exit)
        for package in ("multiprocessing", "billiard"):
            name = f"{package}.util"
            if name in sys.modules and name not in self._hooked:
                util = sys.modules[name]
                util.Finalize(None, self._flush_in_finalizer, (package,), exitpriority=100)
                self._hooked.add(name)
                if name not in self._registered_after_fork:
                    self._registered_after_fork.add(name)
                    util.register_after_fork(self, Shutdown._hook_exit_again)
        name = "celery.signals"
        if name in sys.modules and name not in self._hooked:
            sys.modules[name].worker_process_shutdown.connect(
                self._on_celery_child_exit, weak=False, dispatch_uid="distwindow"
            )
            self._hooked.add(name)

    def flush_before_others(self) -> None:
        """Flush before what others have registered until now for the end of the process."""
        if self._atexit_registered:
            atexit.unregister(self.flush_at_exit)
            atexit.register(self.flush_at_exit)

    def _hook_exit_again(self) -> None:
        self._hooked.clear()
        self.hook_exit()

    def _flush_in_finalizer(self, package: str) -> None:
        # Children that billiard has forked end by `os._exit`, which ends their threads.
        if package == "multiprocessing" or sys.modules[package].get_start_method() == "spawn":
            self.flush_before_join()
        else:
            self.flush_at_exit()

    def _on_celery_child_exit(self, **_: Any) -> None:
        self.flush_at_exit()

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
        """Block the calls of daemon threads from now on: they go on while Python exits, and no
        flush would send what they count. The thread that flushes goes on, too.
        """
        self.flushing_threads.add(_thread.get_ident())
        self._paused = True
        for worker in self._workers:
            for job in worker.jobs.active():
                job.strategy.pause_calls(self.hold_call)
        time.sleep(SETTLE_S)


# The threads that Python joins before a process ends are all that are not daemons.
#
# A script's `atexit` functions run when they have ended. The finalizers of a child of
# multiprocessing run before Python joins them, while they may still call limiters:
#
#   main thread    target returns | finalizers | joins the threads ................ | os._exit
#   other threads  call limiters .................................. end |           |
#   last flush                                 | is waiting for them .. | is sent   |
#
# So the last flush is sent by one more thread, which waits for the others. Python joins it, too.
# The finalizers cannot wait for them: later finalizers, or the functions by which Python ends
# executors, may be what makes these threads end.


def joined_threads() -> list[threading.Thread]:
    """Return the threads, besides the caller's, that Python has yet to join."""
    main = threading.main_thread()
    if not main.is_alive():  # they have been joined
        return []
    here = (main, threading.current_thread())
    return [one for one in threading.enumerate() if not one.daemon and one not in here]


def is_joined_later() -> bool:
    """True if Python has yet to join the calling thread."""
    main, current = threading.main_thread(), threading.current_thread()
    return main.is_alive() and current is not main and not current.daemon


def call_after_joined_threads(function: Callable[[], None]) -> bool:
    """Call `function` when the threads that Python joins have ended, and again if others have been
    started and have ended meanwhile. False if no thread could be started for that.
    """

    def wait_and_call() -> None:
        while threads := joined_threads():
            for one in threads:
                one.join()
            function()

    try:
        threading.Thread(target=wait_and_call, name="distwindow-exit", daemon=False).start()
    except RuntimeError:
        return False
    return True


def exit_on_sigterm() -> None:
    """Make SIGTERM raise `SystemExit(143)` in the main thread, as if `sys.exit` was called there:
    `with` and `finally` blocks end, the threads that are not daemons are waited for, and what was
    counted is sent. For scripts; 143 is 128 + 15, as a shell shows the end by SIGTERM.

    Repeated signals are ignored for 5 s. A forked child has the default action again, and may call
    this itself. To call it twice is to call it once. Raises `RuntimeError` in any other thread than
    the main one, under gevent, which has a function for this, and where something else handles
    SIGTERM, such as a server, and goes on to do so.
    """
    global _is_reset_after_fork
    if threading.current_thread() is not threading.main_thread():
        raise RuntimeError(
            "exit_on_sigterm() was called outside the main thread, and Python lets only that set "
            "signal handlers; call it where the program begins"
        )
    monkey = sys.modules.get("gevent.monkey")
    if monkey is not None and monkey.is_module_patched("threading"):
        raise RuntimeError(
            "exit_on_sigterm() would raise in any greenlet, and gevent may lose that; write "
            "gevent.signal_handler(signal.SIGTERM, sys.exit, 143)"
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


class Uwsgi:
    """The hook that is called in workers of uWSGI, which forks them after it has imported the
    application.

    It forks by C code that does not run the functions of `os.register_at_fork` (unless it is
    started with `--py-call-uwsgi-fork-hooks`): all workers would use the connections of the process
    that they were forked from, and read each other's replies. Therefore limiters begin anew in
    `uwsgi.post_fork_hook`, which uWSGI calls in each worker. No thread is started before the fork
    (`is_before_uwsgi_forks`).

    Older versions (2.0.26, not 2.0.31) run no threads of Python without `--enable-threads`.
    """

    def __init__(self) -> None:
        self._hooked = False

    def hook_fork(self) -> None:
        """Reset limiters in forked workers, by a hook that the first call in a process installs."""
        uwsgi: Any = sys.modules.get("uwsgi")
        if uwsgi is None or self._hooked or not hasattr(uwsgi, "opt"):
            return
        self._hooked = True
        try:
            # `uwsgidecorators` replaces the installed hook when it is imported. So it is imported
            # first, and the hook is added to its list.
            chain = import_module("uwsgidecorators").postfork_chain
        except Exception:  # it is not installed, or (a plain `Exception`) there is no master
            uwsgi.post_fork_hook = _make_fork_hook(getattr(uwsgi, "post_fork_hook", None))
        else:
            chain.insert(0, _make_fork_hook(None))
        if not getattr(uwsgi, "has_threads", True):
            LOG.warning(
                "uWSGI runs no threads: what is counted in this process is flushed late, or lost. "
                "Start it with --enable-threads"
            )


def _make_fork_hook(before: Callable[[], Any] | None) -> Callable[[], None]:
    pid = os.getpid()

    def hook() -> None:
        if os.getpid() != pid:  # without a master this process becomes the first worker
            reset_process_state()
        if before is not None:
            before()

    return hook


class GeventListener:
    """Subscribes to gevent's events, once in a process, for programs in which it patches the
    standard library after limiters were made, such as `gunicorn -k gevent --preload`.

    The locks, queues and thread-local data of these limiters are those of real threads: all
    greenlets would share one connection, and one that waits would stop the others. gevent publishes
    an event before it patches, and one after it:

      will patch    everything that is pending is flushed, and leases are given back
      did patch     limiters begin anew, as in a forked child

    gunicorn's workers are forked before they patch, so that they have nothing to send. If gevent is
    imported only after the limiters were made, the events are not subscribed to, and the limiters
    do not begin anew; `PATCH_STATE.check` then raises where one of them is to make a connection.
    """

    def __init__(self) -> None:
        self._subscribed = False
        self._limiter_made = False
        """True once a limiter has been made."""

    def after_fork(self) -> None:
        """Subscribe if gevent was imported after the last limiter was made. A child inherits a
        subscription that its parent has.
        """
        if self._limiter_made:
            self.subscribe()

    def subscribe(self) -> None:
        """Subscribe to the events of gevent, if it is imported. Called when a limiter is made."""
        self._limiter_made = True
        if "gevent" in sys.modules and not self._subscribed:
            self._subscribed = True
            # gevent itself imports this only when it patches.
            import_module("gevent.events").subscribers.append(_on_event)


def _on_event(event: object) -> None:
    kind = type(event)
    if not kind.__module__.startswith("gevent."):
        return
    if kind.__name__ == "GeventWillPatchAllEvent":
        SHUTDOWN.flush()
    elif kind.__name__ == "GeventDidPatchAllEvent" and PATCH_STATE.is_outdated:
        reset_process_state()
        PATCH_STATE.reset()


SHUTDOWN = register_after_fork(Shutdown())
UWSGI = Uwsgi()
GEVENT_LISTENER = register_after_fork(GeventListener())
