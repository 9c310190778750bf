"""Events that stay right when a signal handler raises: Ctrl-C, Celery's soft time limit.

CPython runs signal handlers in the main thread, and only at three places: when a Python function
begins, when a loop goes back, and after a call has returned. So

    with LOCK:              is safe where LOCK is a C lock (threading.Lock, RLock): whoever is
        ...                 interrupted inside leaves it unlocked
    a = b; c.d = e          is never interrupted in between
    queue.put(None)         is done, and only then interrupted
    function_in_python()    may be interrupted before its first line

threading.Event, Condition and Semaphore are written in Python: an exception between their lines
leaves their inner lock held for ever. What waits or wakes here does so by one call of
`queue.SimpleQueue`, which is written in C and takes no lock that could stay behind.

gevent replaces `queue.SimpleQueue`, locks and threads by its own when it patches the standard
library. What may be patched later is looked up in its module at each use, here and wherever
objects of these kinds are made; `PatchState` says whether objects made before are still in use.
"""

from __future__ import annotations

import _thread
import os
import queue
import sys
from collections.abc import Callable
from functools import partial
from queue import Empty
from typing import TYPE_CHECKING, Any, TypeVar

from .errors import ConfigurationError

if TYPE_CHECKING:
    from queue import SimpleQueue

T = TypeVar("T")

_AT_IMPORT = queue.SimpleQueue


def check_patched_before_import() -> None:
    """Raise `ConfigurationError` where eventlet has patched the standard library after this module
    took its queue from it: a wait would then stop every green thread, also the one waited for.
    """
    patcher = sys.modules.get("eventlet.patcher")
    if (
        patcher is not None
        and patcher.is_monkey_patched("thread")
        and _AT_IMPORT is not queue.SimpleQueue
    ):
        raise ConfigurationError(
            "eventlet.monkey_patch() was called after distwindow was imported, and a call would "
            "stop all green threads; call it before the first import of distwindow"
        )


class PatchState:
    """Which standard library the locks, queues and thread-local data that are in use were made
    with: before or after gevent has patched it. Those made before would stop all greenlets, and
    give each of them the same connection.
    """

    def __init__(self) -> None:
        self._made_with: object = queue.SimpleQueue

    def begin_anew(self) -> None:
        """Everything is made anew."""
        self._made_with = queue.SimpleQueue

    @property
    def is_stale(self) -> bool:
        """Has the standard library been patched since?"""
        return self._made_with is not queue.SimpleQueue

    def check(self) -> None:
        """Raise `ConfigurationError` where the library was patched since. Called where a
        connection or the worker's thread is to be made: seldom, but by each greenlet.
        """
        if self.is_stale:
            patch = "gevent.monkey.patch_all()"
            if "gevent.monkey" not in sys.modules:
                patch = "eventlet.monkey_patch()"
            raise ConfigurationError(
                f"{patch} was called after a limiter was made, and a call could stop all green "
                "threads; call it in the first lines of the program, before that"
            )


PATCHES = PatchState()


_OURS = (
    "distwindow", "_thread", "threading", "queue", "socket", "ssl", "redis", "hiredis", "gevent",
    "eventlet",
)  # fmt: skip
"""Packages whose code may stand at the end of the traceback of an error that is handled here."""


def is_interruption(exc: BaseException) -> bool:
    """Was this exception raised by a signal handler, and not by the code that is being tried?
    Handlers may raise what that code raises, too (`signal.alarm` and `TimeoutError` is a common
    pair), and then it belongs to the application.

    The handler's own frame is the innermost of the traceback, so its module tells.
    """
    trace = exc.__traceback__
    module = "distwindow"
    while trace is not None:
        module = str(trace.tb_frame.f_globals.get("__name__", ""))
        trace = trace.tb_next
    return module.partition(".")[0] not in _OURS


class OneShotEvent:
    """Set once, waited for by any number of threads.

    The queue holds a token once the event is set. A waiter takes it and puts it back, so that the
    next waiter finds it; in a `finally`, so that an interrupted waiter does so, too.
    """

    __slots__ = ("_tokens", "is_set")

    def __init__(self) -> None:
        self.is_set = False
        self._tokens: SimpleQueue[None] = queue.SimpleQueue()

    def set(self) -> None:
        """Wake all waiters, now and later. Harmless when repeated."""
        self.is_set = True
        self._tokens.put(None)

    def wait(self, seconds: float) -> bool:
        """Until it is set, or `seconds` have passed; is it set?"""
        if not self.is_set:
            try:
                self._tokens.get(True, max(0.0, seconds))
            except Empty as exc:
                if is_interruption(exc):
                    raise
            finally:
                if self.is_set:
                    self._tokens.put(None)
        return self.is_set


class WakeUp:
    """What one thread sleeps on, and others wake it by. A wake-up that comes early is kept."""

    __slots__ = ("_tokens", "wake")

    def __init__(self) -> None:
        self._tokens: SimpleQueue[None] = queue.SimpleQueue()
        self.wake: Callable[[], None] = partial(self._tokens.put, None)
        """Wake the sleeper, or end its next sleep at once. One call of C, as above."""

    def sleep(self, seconds: float | None) -> bool:
        """Until woken, or `seconds` (None: endless) have passed; was it woken?"""
        try:
            self._tokens.get(True, seconds)
        except Empty as exc:
            if is_interruption(exc):
                raise
            return False
        while not self._tokens.empty():  # several may have called at once
            self._tokens.get()
        return True


def is_before_uwsgi_forks() -> bool:
    """Is this the process from which uWSGI will fork its workers? It does so in C, whoever holds
    the interpreter's lock: a child that is forked while a thread has it would wait for it for ever.
    """
    uwsgi = sys.modules.get("uwsgi")
    if uwsgi is None or not hasattr(uwsgi, "worker_id"):
        return False
    return uwsgi.worker_id() == 0 and uwsgi.masterpid() in (0, os.getpid())


def start_thread(function: Callable[..., object], *arguments: Any) -> bool:
    """Start a thread; False where Python is exiting, and starts none any more, and where uWSGI is
    about to fork.

    Not a `threading.Thread`, whose `start` waits for an Event: an exception leaves that half done.
    """
    if is_before_uwsgi_forks():
        return False
    try:
        _thread.start_new_thread(function, arguments)
    except RuntimeError as exc:
        if exc.__traceback__ is not None and exc.__traceback__.tb_next is not None:
            raise  # out of a signal handler: `start_new_thread` has no frame
        return False
    return True


def complete_in_thread(function: Callable[[], T]) -> T:
    """Call `function` in a thread of its own and wait for it, for what must not be left half done:
    a signal handler's exception ends the wait, and the call goes on to its end.
    """
    done = OneShotEvent()
    results: list[T] = []
    failures: list[BaseException] = []

    def call() -> None:
        try:
            results.append(function())
        except BaseException as exc:
            failures.append(exc)
        finally:
            done.set()

    if not start_thread(call):
        return function()
    while not done.is_set:
        done.wait(_LOOK_EVERY_S)
    if failures:
        raise failures[0]
    return results[0]


_LOOK_EVERY_S = 60.0
