"""The background worker, which flushes what limiters keep in memory: one thread for all blocking
limiters of a process, and one task in each event loop for its asyncio limiters.

Both start when a limiter has something to flush for the first time. With nothing to flush, the
thread sleeps and the task ends. Everything that is pending is flushed when the interpreter exits,
and when a task is cancelled because its loop shuts down.
"""

from __future__ import annotations

import _thread
import asyncio
import atexit
import logging
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Awaitable, Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from importlib import import_module
from pathlib import Path
from types import FrameType
from typing import Any
from weakref import ref

from .._fork import register_after_fork, reset_process_state
from .._locks import PATCH_STATE, OneShotEvent, WakeUp, start_thread
from ..errors import ConfigurationError, DistwindowError, counted
from ..ring.clock import NEVER, SYSTEM, Clock
from .flush import FlushSource

LOG = logging.getLogger("distwindow")

EXIT_TIMEOUT_S = 3.0
"""The longest time, in seconds, that the end of a process waits for its counts to be sent."""
RETRY_EVERY_S = 0.02
"""Seconds between two attempts to flush at the end of a process."""
SETTLED_S = 5.0
"""Seconds without a failed flush after which flushing is said to work again. While the slots of a
cluster move, for example, flushes fail and succeed in turn.
"""

RAISED_BY_CALLBACKS = (
    Exception,
    SystemExit,
    KeyboardInterrupt,
    GeneratorExit,
    asyncio.CancelledError,
)
"""What an application's function may raise that distwindow calls, and that is logged instead of
raised: nothing of it may end a worker. (A cancellation of the task that calls it is raised where
that awaits, and never in a plain function.) Not here is what gevent raises in a greenlet from
outside, such as its `Timeout`.
"""

monotonic = SYSTEM.monotonic


class FlushJob:
    """One limiter, as the worker sees it. `flush(False)` sends what is due, `flush(True)` all that
    is pending.

    state             attribute        set by                    until
    active            -                the worker's `add`        the limiter is closed
    being flushed     `flush_done`     the worker's thread/task  the event is set
    being closed      `close_done`     `being_closed`            the event is set
    closed            `detached`       the worker's `detach`     the limiter is called again: its
                                                                 store may be the caller's, and open
    """

    __slots__ = (
        "__weakref__",
        "close_done",
        "closing_lock",
        "detached",
        "dropped_logged",
        "failure",
        "flush",
        "flush_done",
        "flush_task",
        "gave_up_at_exit",
        "has_sent",
        "logged_kinds",
        "loss_reported",
        "name",
        "settled_at",
        "store_is_away",
        "strategy",
    )  # fmt: skip

    def __init__(self, strategy: FlushSource, flush: Callable[[bool], Any], name: str) -> None:
        self.strategy = strategy
        self.flush = flush
        self.name = name
        """The limiter and its store, for log lines; without passwords."""
        self.failure: BaseException | None = None
        """Why the last flush failed; None after one that succeeded."""
        self.has_sent = True
        """False if the last flush had nothing to send, so that its success says nothing."""
        self.store_is_away = False
        """True if a server of the store was known to be away when the last flush ended."""
        self.logged_kinds: frozenset[type] = frozenset()
        """The kinds of failure that were logged since flushing has worked; empty while it does."""
        self.settled_at = NEVER
        """When flushing is said to work again, if no flush fails before (monotonic seconds)."""
        self.flush_done: OneShotEvent | None = None
        """Set when the flush that is under way has ended."""
        self.flush_task: asyncio.Task[None] | None = None
        """The flush that is under way in an event loop."""
        self.close_done: OneShotEvent | None = None
        """Set when the close that is under way has ended."""
        self.closing_lock = threading.Lock()
        """Held by the thread that closes a blocking limiter; other threads that close it wait."""
        self.detached = False
        """True once the limiter is closed: the worker skips it until it is called again."""
        self.gave_up_at_exit = False
        """True once the loop that flushed it has ended, or its loss was logged, with something
        unsent. Later steps of the same shutdown make one attempt each.
        """
        self.loss_reported = False
        """True once the loss of counts has been logged, so that it is logged only once."""
        self.dropped_logged = 0
        """How many of the counts that the strategy has dropped have been logged."""

    @property
    def next_due_at(self) -> float:
        """When the worker has to come (monotonic seconds): to flush, or to log that it works."""
        return min(self.strategy.next_due_at, self.settled_at)

    @property
    def has_unsent(self) -> bool:
        """True if there is anything that the store has not taken. Looks at all keys."""
        strategy = self.strategy
        if self.failure is not None and strategy.next_due_at < NEVER:
            return True
        return strategy.unacknowledged_counts() > 0 or strategy.unreturned_permits() > 0

    def needs_retry(self, final: bool) -> bool:
        """True if a shutdown that has just flushed this job has to flush it again. With `final`, no
        call is decided any more, so nothing may be pending either. The end of a process waits for
        no server that is known to be away, and for no mistake to be mended.
        """
        if self.gave_up_at_exit:
            return False
        if self.failure is None:
            return final and self.has_unsent
        return not self.store_is_away and not isinstance(self.failure, ConfigurationError)

    def record_flush(self, failure: BaseException | None) -> None:
        """Record how a flush ended. Log each kind of failure once, and when none came since."""
        self.failure = failure
        if failure is not None:
            self._log_failure(failure)
            return
        self.gave_up_at_exit = self.loss_reported = False
        if self.logged_kinds:
            now = monotonic()
            if self.has_sent and self.settled_at == NEVER:
                self.settled_at = now + SETTLED_S
            if now >= self.settled_at:
                self.settled_at, self.logged_kinds = NEVER, frozenset()
                self.log_recovery()

    def record_unexpected_error(self, exc: BaseException) -> None:
        """Record that a flush ended with an error that is not the store's."""
        self.failure = exc
        self.strategy.reschedule(monotonic())
        self._log_failure(exc)

    def _log_failure(self, failure: BaseException) -> None:
        self.settled_at = NEVER
        is_expected = isinstance(failure, DistwindowError)
        kind = DistwindowError if is_expected else type(failure)
        if kind not in self.logged_kinds:
            self.logged_kinds |= {kind}
            self.log_failure(failure, is_expected=is_expected)

    def log_failure(self, failure: BaseException, *, is_expected: bool) -> None:
        """Log that flushes have begun to fail, with the traceback of an unexpected error."""
        if is_expected:
            LOG.warning(
                "flushing the counts of %s failed: %s; %s%s",
                self.name, failure, self._kept_text(), self._dropped_text(),
            )  # fmt: skip
        else:
            LOG.error(
                "flushing the counts of %s failed with an unexpected error; %s%s",
                self.name, self._kept_text(), self._dropped_text(), exc_info=failure,
            )  # fmt: skip

    def log_recovery(self) -> None:
        """Log that flushes succeed again."""
        LOG.warning("the counts of %s can be flushed again%s", self.name, self._dropped_text())

    def record_close(self, failure: DistwindowError | None) -> None:
        """Record how the last flush of a closing limiter ended. Log what it could not send."""
        self.failure = failure
        if failure is not None and not self.loss_reported:
            self.loss_reported = True
            self.log_lost("the limiter was closed before", failure)

    def log_lost(self, when: str, why: object) -> None:
        """Log what will never be sent, if there is anything."""
        counts, permits = self.strategy.unacknowledged_counts(), self.strategy.unreturned_permits()
        if counts:
            were, they = ("was", "it") if counts == 1 else ("were", "they")
            LOG.warning(
                "%s of %s %s lost: %s %s could be sent (%s)%s",
                counted(counts, "count"), self.name, were, when, they, why, self._dropped_text(),
            )  # fmt: skip
        if permits:
            were, they = ("was", "it") if permits == 1 else ("were", "they")
            LOG.warning(
                "%s of %s %s not given back: %s %s could be sent (%s); %s until %s window ends",
                counted(permits, "unspent permit"), self.name, were, when, they, why,
                "it counts as used" if permits == 1 else "they count as used",
                "its" if permits == 1 else "their",
            )  # fmt: skip

    def _kept_text(self) -> str:
        counts, permits = self.strategy.unacknowledged_counts(), self.strategy.unreturned_permits()
        held = f" and {counted(permits, 'permit')} to give back" if permits else ""
        return f"{counted(counts, 'count')}{held} kept here; the next flush tries again"

    def _dropped_text(self) -> str:
        """Return the end of a log line: the counts that were dropped since the last log line."""
        number = self.strategy.dropped - self.dropped_logged
        self.dropped_logged = self.strategy.dropped
        if number <= 0:  # fewer than before: this is a forked child, which counts anew
            return ""
        return f"; {counted(number, 'count')} dropped, as windows ended or too many keys waited"

    @contextmanager
    def being_closed(self) -> Iterator[None]:
        """Mark the limiter as closing during the block: the end of the process waits for it."""
        done = self.close_done = OneShotEvent()
        try:
            yield
        finally:
            done.set()

    def wait_for_flush(self, seconds: float) -> None:
        """Wait until the flush that is under way has ended, for at most `seconds`."""
        flush_done = self.flush_done
        if flush_done is not None:
            flush_done.wait(seconds)


class FlushJobs:
    """The jobs of all limiters that are alive. The references are weak: a limiter is kept alive by
    its owner, and by a worker for as long as it has something to send.

    Each change of the dictionary is one call of a C function, because a signal handler may raise at
    any line, and the garbage collector may run in any thread.
    """

    def __init__(self) -> None:
        self._refs: dict[ref[FlushJob], None] = {}

    def add(self, job: FlushJob) -> None:
        """Add `job`. It is removed when it is collected."""
        self._refs[ref(job, self._refs.__delitem__)] = None

    def all(self) -> list[FlushJob]:
        """Return the jobs that are alive."""
        return [job for weak in self._refs.copy() if (job := weak()) is not None]

    def active(self) -> list[FlushJob]:
        """Return the jobs not closed, failing ones last: these may take until the deadline."""
        jobs = [job for job in self.all() if not job.detached]
        return sorted(jobs, key=lambda job: job.failure is not None)

    def wait_until_closed(self, deadline: float) -> None:
        """Wait until no close, which sends counts, goes on, or until `deadline` (monotonic)."""
        for job in self.all():
            if job.close_done is not None:
                job.close_done.wait(deadline - monotonic())


def report_lost(
    jobs: Iterable[FlushJob],
    when: str = "the process was ended before",
    why: object = "there was not enough time",
) -> None:
    """Log what the jobs have not sent when the process ends, once for each job."""
    for job in jobs:
        if job.has_unsent and not job.loss_reported:
            job.gave_up_at_exit = job.loss_reported = True
            job.log_lost(when, job.failure or why)


# --------------------------------------------------------------------------------------------------
#
# The threads that Python joins before a process ends: all that are not daemons.
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


# --------------------------------------------------------------------------------------------------
#
# The hooks that call the last flush of a process, one for each way in which it can end.
#
#   how the process ends                          what calls the flush
#   the interpreter exits                         `atexit`, which a forked child inherits
#   a child of multiprocessing or billiard ends   its finalizers; a forked one skips `atexit`
#   a child of Celery's prefork pool ends         the signal `worker_process_shutdown`
#
#   SIGTERM, after `exit_on_sigterm`              `atexit`; without it nothing
#
# The libraries are used only if the program has imported them.

REPEATS_IGNORED_S = 5.0
"""Seconds after a SIGTERM in which `exit_on_sigterm` ignores others, so that they do not interrupt
what is cleaned up. GNU `timeout`, for example, sends it twice.
"""


class ExitHooks:
    """Has `flush_at_exit` called when this process ends."""

    def __init__(
        self, flush_at_exit: Callable[[], None], flush_before_join: Callable[[], None]
    ) -> None:
        """`flush_before_join` is called where threads to be joined later may still be running."""
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
        # Children that billiard has forked end by `os._exit`, which ends their threads.
        if package == "multiprocessing" or sys.modules[package].get_start_method() == "spawn":
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


# --------------------------------------------------------------------------------------------------
#
# For programs inside uWSGI, which forks its workers after it has imported the application.
#
# It forks by C code that does not run the functions of `os.register_at_fork` (unless it is started
# with `--py-call-uwsgi-fork-hooks`): all workers would use the connections of the process that they
# were forked from, and read each other's replies. Therefore limiters begin anew in
# `uwsgi.post_fork_hook`, which uWSGI calls in each worker. No thread is started before the fork
# (`is_before_uwsgi_forks`).
#
# Older versions (2.0.26, not 2.0.31) run no threads of Python without `--enable-threads`.


class Uwsgi:
    """The hook that is called in forked workers of uWSGI."""

    def __init__(self) -> None:
        self._hooked = False

    def hook_fork(self) -> None:
        """Reset limiters in forked workers, by a hook that the first call in a process installs."""
        uwsgi = sys.modules.get("uwsgi")
        if uwsgi is None or self._hooked or not hasattr(uwsgi, "opt"):
            return
        self._hooked = True
        _hook(uwsgi)
        if not getattr(uwsgi, "has_threads", True):
            LOG.warning(
                "uWSGI runs no threads: what is counted in this process is flushed late, or lost. "
                "Start it with --enable-threads"
            )


def _hook(uwsgi: Any) -> None:
    try:
        # `uwsgidecorators` replaces the installed hook when it is imported. So it is imported
        # first, and the hook is added to its list.
        chain = import_module("uwsgidecorators").postfork_chain
    except Exception:  # it is not installed, or (a plain `Exception`) there is no master process
        uwsgi.post_fork_hook = _make_fork_hook(getattr(uwsgi, "post_fork_hook", None))
    else:
        chain.insert(0, _make_fork_hook(None))


def _make_fork_hook(before: Callable[[], Any] | None) -> Callable[[], None]:
    pid = os.getpid()

    def hook() -> None:
        if os.getpid() != pid:  # without a master this process becomes the first worker
            reset_process_state()
        if before is not None:
            before()

    return hook


UWSGI = Uwsgi()


# --------------------------------------------------------------------------------------------------
#
# The end of the process: before it, what its limiters have counted is sent.
#
# `flush_at_exit` sends it, in the thread that calls it: after EXIT_TIMEOUT_S no attempt is
# repeated. The hooks above call it. Threads that Python does not join go on:
#
#   the hook's thread    first flush ........ | SETTLE_S | last flush ......... | Python ends
#   calls of daemons     are decided          | wait, since no flush would send what they count
#
# No signal is handled here: SIGTERM ends a process at once unless the application or its server
# handles it, or calls `exit_on_sigterm`.

FIRST_FLUSH_TIMEOUT_S = 1.0
"""The part of EXIT_TIMEOUT_S, in seconds, during which calls are still decided."""
SETTLE_S = 0.01
"""Seconds in which calls that other threads have begun to decide are completed."""
POLL_S = 0.005
"""Seconds between two checks where nothing can wake the waiting thread."""


class FlushWorker:
    """Base class of the workers of the blocking limiters and of the asyncio limiters."""

    def __init__(self) -> None:
        self.jobs = FlushJobs()
        SHUTDOWN.add(self)
        self.after_fork()

    def after_fork(self) -> None:
        """Begin afresh in a forked child."""
        raise NotImplementedError  # each worker has threads or tasks of its own

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
        something due. Limiters whose clock is not the system's are flushed by `flush()` and
        `close()` only, because that clock may stand still.
        """
        job = job_type(strategy, flush, name)
        if clock is SYSTEM:
            strategy.wake = partial(self._wake, job)
            self.jobs.add(job)
            GEVENT_LISTENER.subscribe()
            UWSGI.hook_fork()
            SHUTDOWN.hook_exit()
        return job

    def _wake(self, job: FlushJob) -> None:
        """Have `job` flushed when it is due."""
        raise NotImplementedError  # each worker wakes up differently

    def flush_all(self, deadline: float, *, final: bool) -> None:
        """Send everything that is pending, until `deadline` (monotonic seconds). With `final`, no
        call is decided any more, and the flush is repeated until nothing is pending.
        """
        raise NotImplementedError  # each worker has limiters of one kind


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
        """Add `worker` to those that flush before the process ends."""
        self._workers.append(worker)

    def hook_exit(self) -> None:
        """Call `flush_at_exit` when this process exits, by each of the exit hooks."""
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
        """Block the calls of daemon threads from now on: they go on while Python exits, and no
        flush would send what they count. The thread that flushes goes on, too.
        """
        self.flushing_threads.add(_thread.get_ident())
        self._paused = True
        for worker in self._workers:
            for job in worker.jobs.active():
                job.strategy.pause_calls(self.hold_call)
        time.sleep(SETTLE_S)


SHUTDOWN = Shutdown()


# --------------------------------------------------------------------------------------------------
#
# For programs in which gevent patches the standard library after limiters were made, such as
# `gunicorn -k gevent --preload`.
#
# The locks, queues and thread-local data of these limiters are those of real threads: all greenlets
# would share one connection, and one that waits would stop the others. gevent publishes an event
# before it patches, and one after it:
#
#   will patch    everything that is pending is flushed, and leases are given back
#   did patch     limiters begin anew, as in a forked child
#
# gunicorn's workers are forked before they patch, so that they have nothing to send. If gevent is
# imported only after the limiters were made, the events are not subscribed to, and the limiters do
# not begin anew; `PATCH_STATE.check` then raises where one of them is to make a connection.


class GeventListener:
    """Subscribes to gevent's events, once in a process."""

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


GEVENT_LISTENER = GeventListener()


# --------------------------------------------------------------------------------------------------
#
# The worker of asyncio limiters: one task in each event loop.
#
# event                                 the task of the loop
# a limiter has something to send       is created, or its sleep is ended
# a flush is due                        flushes, and then sleeps until the next flush is due
# nothing is pending                    ends; the next `wake` creates another
# it is cancelled, as its loop ends     flushes everything, for at most EXIT_TIMEOUT_S, and ends
# `wake` after it was cancelled         is created only when the flush is due: the loop is about
#                                       to end, and nobody would cancel a task that sleeps
# its loop is closed without that       its jobs go to the task of the loop of the next `wake`; at
#                                       exit `flush_all` flushes them in a loop of its own

_STORE_FOLDER = Path(__file__).parents[1] / "stores"


class WorkerTasks(FlushWorker):
    """Flushes all asyncio limiters of this process, with one task in each event loop."""

    def after_fork(self) -> None:
        """Begin without tasks: the parent's event loops do not run in the child."""
        for job in self.jobs.all():
            job.flush_done = job.close_done = job.flush_task = None
        self._lock = threading.RLock()
        self._loop_workers: dict[asyncio.AbstractEventLoop, _LoopWorker] = {}

    async def detach(self, job: FlushJob) -> None:
        """Stop flushing the closing limiter of `job`, and wait for the flush under way."""
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
        """Flush `job` when it is due."""
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
            flushes = [_flush_until_sent(job, NEVER, final=True) for job in self.unsent]
            with suppress(asyncio.TimeoutError):
                await asyncio.wait_for(asyncio.gather(*flushes), EXIT_TIMEOUT_S)
            await _cancel_store_tasks()
            self._drop_idle()
            for job in self.unsent:
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

    def _drop_idle(self) -> None:
        self.unsent = {job for job in self.unsent if job.next_due_at < NEVER}


def _set_woken(woken: asyncio.Future[None]) -> None:
    if not woken.done():
        woken.set_result(None)


async def _flush_until_sent(job: FlushJob, deadline: float, *, final: bool) -> None:
    """Send everything that is pending in `job`, with as many attempts as there is time for until
    `deadline` (monotonic seconds), but only one if the store did not answer an earlier step.
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
    task = job.flush_task = asyncio.get_running_loop().create_task(_flush_in_task(job, everything))
    task.add_done_callback(lambda _: done.set())
    return task


async def _flush_in_task(job: FlushJob, everything: bool) -> None:
    try:
        flush: Awaitable[Exception | None] = job.flush(everything)
        job.record_flush(await flush)
    except (asyncio.CancelledError, GeneratorExit, KeyboardInterrupt, SystemExit):
        raise  # it is for this task, or was raised by a signal handler and is for the whole loop
    except BaseException as exc:
        job.record_unexpected_error(exc)


class _ExitLoop(asyncio.SelectorEventLoop):
    """An event loop that resolves host names itself: no thread can start while Python exits."""

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


# --------------------------------------------------------------------------------------------------
#
# The worker of blocking limiters: one thread.
#
# A signal handler may raise in a caller at any line of this file. Therefore callers only make
# single calls of C functions (see `_locks.py`), in an order that needs no undoing:
#
#   the caller was interrupted        the next caller that wakes the worker
#   before it started the thread      finds no thread, and starts one
#   after it started the thread       finds that the thread holds `_running_lock`, and starts no
#                                     other
#   before it woke the thread         wakes it; the worker then looks at all limiters, and not only
#                                     at the one that woke it
#
#   the thread       waits for a wake-up --> flushes every job that is due --> sleeps until the next
#                    job is due, or until the next wake-up


class WorkerThread(FlushWorker):
    """Flushes all blocking limiters of this process, in one thread."""

    def after_fork(self) -> None:
        """Begin without a thread, which no fork copies; the parent sends what it has counted."""
        for job in self.jobs.all():
            job.flush_done = job.close_done = None  # whatever was under way will never end here
            job.closing_lock = threading.Lock()
        self._wake_up = WakeUp()
        self._running_lock = threading.Lock()
        """Held by the thread for as long as it runs."""
        self._thread_ident: int | None = None
        self._unsent: set[FlushJob] = set()
        """Jobs with something to send, kept here as the application may drop their limiters."""

    def detach(self, job: FlushJob) -> None:
        """Stop flushing the closing limiter of `job`, and wait for the flush under way."""
        job.detached = True  # before looking for a flush that is under way, see `_run_job`
        self._unsent.discard(job)
        self.wait_for(job)

    def wait_for(self, job: FlushJob) -> None:
        """Wait until the flush of `job` that is under way has ended."""
        if _thread.get_ident() != self._thread_ident:
            job.wait_for_flush(EXIT_TIMEOUT_S)

    def flush_all(self, deadline: float, *, final: bool) -> None:
        """Send everything that is pending, in the calling thread, with as many attempts as there is
        time for until `deadline` (monotonic seconds). Without `final`, calls are still decided, and
        what they count meanwhile need not be sent.
        """
        jobs = self.jobs.active()
        for job in jobs:
            # Nothing would be counted twice (a ring takes each flush once), but what the worker is
            # just sending might not have arrived when this returns.
            job.wait_for_flush(min(EXIT_TIMEOUT_S / 6, deadline - monotonic()))
            _flush_job(job, everything=True)
        while monotonic() < deadline:
            late = [job for job in jobs if job.needs_retry(final)]
            if not late:
                return
            time.sleep(RETRY_EVERY_S)
            for job in late:
                _flush_job(job, everything=True)

    def _wake(self, job: FlushJob) -> None:
        job.detached = False  # the store of a closed limiter may be the caller's, and open
        self._unsent.add(job)
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
        running, wake_up = self._running_lock, self._wake_up
        if not running.acquire(False):  # another caller has just started one
            return
        self._thread_ident = _thread.get_ident()
        try:
            threading.current_thread().name = "distwindow"
            while True:
                next_due_at = self._flush_due()
                wake_up.sleep(None if next_due_at == NEVER else max(0.0, next_due_at - monotonic()))
                if self._wake_up is not wake_up:
                    return  # gevent has patched threads: the next `_wake` starts another one
        finally:
            if self._running_lock is running:
                self._thread_ident = None
            running.release()

    def _flush_due(self) -> float:
        """Flush what is due. Return when the next flush is due (monotonic seconds, or `NEVER`)."""
        next_due_at = NEVER
        for job in self.jobs.all():
            if job.detached:
                self._unsent.discard(job)
                continue
            SHUTDOWN.hold_call()  # as the process ends, its last flush is the only one
            if job.next_due_at <= monotonic():
                self._run_job(job)
            if job.next_due_at == NEVER:
                self._unsent.discard(job)
                if job.next_due_at == NEVER:  # it has not been set again since
                    continue
            self._unsent.add(job)
            next_due_at = min(next_due_at, job.next_due_at)
        return next_due_at

    def _run_job(self, job: FlushJob) -> None:
        done = job.flush_done = OneShotEvent()
        try:
            if not job.detached:  # `detach` may have looked before `flush_done` was set
                _flush_job(job, everything=False)
        except BaseException as exc:
            # No signal handler runs in this thread, and nothing may end it: what the application's
            # code raises in it (a log handler, a client of redis-py) is a failure of this flush.
            with suppress(BaseException):
                job.record_unexpected_error(exc)
        finally:
            done.set()


def _flush_job(job: FlushJob, *, everything: bool) -> None:
    try:
        job.record_flush(job.flush(everything))
    except Exception as exc:
        job.record_unexpected_error(exc)


register_after_fork(SHUTDOWN)
register_after_fork(GEVENT_LISTENER)
THREAD_WORKER = register_after_fork(WorkerThread())
TASK_WORKER = register_after_fork(WorkerTasks())
