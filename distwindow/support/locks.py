"""Events that keep working when a signal handler raises (Ctrl-C, Celery's soft time limit).

CPython runs signal handlers in the main thread, and only at four places: when a Python function
begins, when a loop jumps back, after a call has returned, and inside a function in C that waits
(`get`, `acquire`, `sleep`, `recv`), which then raises. So

    with LOCK:              is safe if LOCK is a C lock (threading.Lock, RLock): an exception inside
        ...                 releases it
    a = b; c.d = e          cannot be interrupted in between
    queue.put(None)         completes before it can be interrupted
    function_in_python()    may be interrupted before its first line

Other threads get the interpreter's lock (GIL) at the same three places only, so what a handler can
not interrupt is atomic for threads, too, as `SWITCHES_ONLY_AT_CALLS` says.

threading.Event, Condition and Semaphore are written in Python: an exception between their lines
leaves their inner lock held for ever. The classes here therefore wait and wake by one call of
`queue.SimpleQueue`, which is written in C and holds no lock that an exception could leave held.

gevent replaces `queue.SimpleQueue`, locks and threads by its own when it patches the standard
library. What may be patched later is looked up in its module at each use, here and wherever
objects of these kinds are made; `PatchState` says whether objects made before are still in use.
"""

from __future__ import annotations

import _thread
import os
import queue
import signal
import sys
import threading
from collections.abc import Callable
from functools import partial
from queue import Empty
from typing import TYPE_CHECKING, Any, TypeVar

from ..errors import ConfigurationError
from .fork import FORK_WAIT

if TYPE_CHECKING:
    from queue import SimpleQueue


T = TypeVar("T")

SWITCHES_ONLY_AT_CALLS = sys.implementation.name == "cpython" and bool(
    getattr(sys, "_is_gil_enabled", lambda: True)()
)
"""True if lines without a call or a loop are atomic for threads, so that they need no lock: a lock
takes a third of the time of a call that is decided in this process. False for interpreters other
than CPython, and without the GIL. (A debugger that traces lines in Python calls its function
between two lines, so other threads may run there, and signal handlers, too.)
"""

_QUEUE_AT_IMPORT = queue.SimpleQueue


def check_patched_before_import() -> None:
    """Raise `ConfigurationError` if eventlet has patched the standard library after this module
    imported its queue: a wait would then stop every green thread, including the one waited for.
    """
    patcher = sys.modules.get("eventlet.patcher")
    if (
        patcher is not None
        and patcher.is_monkey_patched("thread")
        and _QUEUE_AT_IMPORT is not queue.SimpleQueue
    ):
        raise ConfigurationError(
            "eventlet.monkey_patch() was called after distwindow was imported, so a call would "
            "stop all green threads; call it before the first import of distwindow"
        )


def check_patched_whole() -> None:
    """Raise `ConfigurationError` if gevent has patched a part of what a call needs: greenlets would
    share what belongs to one thread, or stop each other.
    """
    monkey = sys.modules.get("gevent.monkey")
    if monkey is None:
        return
    missing = [name for name in _PATCHED_MODULES if not monkey.is_module_patched(name)]
    if missing and len(missing) < len(_PATCHED_MODULES):
        raise ConfigurationError(
            f"gevent has patched only a part of the standard library: {', '.join(missing)} is "
            "missing; call gevent.monkey.patch_all() without leaving these out"
        )


_PATCHED_MODULES = ("threading", "queue", "socket", "select", "time")


class PatchState:
    """Remembers whether the objects in use were made before gevent patched the standard library.
    Such locks and queues block all greenlets, and such thread-local data is one connection for all.
    """

    def __init__(self) -> None:
        self._queue_in_use: object = queue.SimpleQueue

    def reset(self) -> None:
        """From now on everything is made with the standard library as it is now."""
        self._queue_in_use = queue.SimpleQueue

    @property
    def is_outdated(self) -> bool:
        return self._queue_in_use is not queue.SimpleQueue

    def check(self) -> None:
        """Raise `ConfigurationError` where the library was patched since. Called where a
        connection or the worker's thread is to be made: seldom, but by each greenlet.
        """
        if self.is_outdated:
            patch = "gevent.monkey.patch_all()"
            if "gevent.monkey" not in sys.modules:
                patch = "eventlet.monkey_patch()"
            raise ConfigurationError(
                f"{patch} was called after a limiter was made, and a call could stop all green "
                "threads; call it in the first lines of the program, before that"
            )


PATCH_STATE = PatchState()


_LIBRARIES = (
    "distwindow", "_thread", "threading", "queue", "socket", "ssl", "redis", "hiredis", "gevent",
    "eventlet",
)  # fmt: skip
"""Packages in which an error that distwindow handles may be raised."""


def is_interruption(exc: BaseException) -> bool:
    """True if a signal handler raised `exc`, an `OSError` that came out of a connection.

    `signal.alarm` with `TimeoutError` is common; such an exception is the application's and must
    reach it. The innermost frame of the traceback is the handler's own, so its module decides.
    """
    trace = exc.__traceback__
    module = "distwindow"
    while trace is not None:
        module = str(trace.tb_frame.f_globals.get("__name__", ""))
        trace = trace.tb_next
    return module.partition(".")[0] not in _LIBRARIES


def was_raised_by_signal_handler(exc: BaseException) -> bool:
    """True if a Python function that handles a signal is among the frames of `exc`, or if `exc` may
    be that of Python's own handler of Ctrl-C, which has no frame.

    This is for errors of an application's code that distwindow calls, where `is_interruption` would
    be true for each. It takes some microseconds.
    """
    if isinstance(exc, KeyboardInterrupt) and (
        threading.current_thread() is threading.main_thread()
        and signal.getsignal(signal.SIGINT) is signal.default_int_handler
    ):
        return True
    handlers = [signal.getsignal(number) for number in signal.valid_signals()]
    codes = {_code_of(handler) for handler in handlers if callable(handler)}
    trace = exc.__traceback__
    while trace is not None:
        if trace.tb_frame.f_code in codes:
            return True
        trace = trace.tb_next
    return False


def _code_of(function: Any) -> Any:
    if not hasattr(function, "__code__"):  # a method has that of its function
        function = vars(type(function)).get("__call__")
    return getattr(function, "__code__", None)


def take_token(tokens: SimpleQueue[None], seconds: float | None) -> bool:
    """Wait for a token up to `seconds` (None: no end) and take it. False if none came.

    The first look, which does not wait, takes the queue's inner lock. CPython would otherwise take
    it in `get`, compute anew how long to wait, and wait for ever if the time is over by then.
    """
    try:
        tokens.get(False)
    except Empty:
        if seconds is not None and seconds <= 0:
            return False
        try:
            tokens.get(True, seconds)
        except Empty:
            return False
    return True


class OneShotEvent:
    """An event that is set once, and that any number of threads wait for.

    The queue holds a token once the event is set. A waiter takes it and puts it back for the next
    waiter, in a `finally`, so that an interrupted waiter puts it back, too.
    """

    __slots__ = ("_tokens", "is_set")

    def __init__(self) -> None:
        self.is_set = False
        self._tokens: SimpleQueue[None] = queue.SimpleQueue()

    def set(self) -> None:
        """Wake all waiters; later ones do not wait. May be called again."""
        self.is_set = True
        self._tokens.put(None)

    def wait(self, seconds: float) -> bool:
        """Wait until the event is set or `seconds` have passed. True if it is set."""
        if not self.is_set:
            try:
                take_token(self._tokens, seconds)
            finally:
                if self.is_set:
                    self._tokens.put(None)
        return self.is_set


class WakeUp:
    """Lets one thread sleep until another wakes it. A wake-up before the sleep ends it at once."""

    __slots__ = ("_tokens", "wake")

    def __init__(self) -> None:
        self._tokens: SimpleQueue[None] = queue.SimpleQueue()
        self.wake: Callable[[], None] = partial(self._tokens.put, None)
        """Wake the sleeper, or end its next sleep at once. One call into C, see above."""

    def sleep(self, seconds: float | None) -> bool:
        """Sleep until woken or `seconds` have passed (None: no end). True if woken."""
        if not take_token(self._tokens, seconds):
            return False
        while not self._tokens.empty():  # `wake` may have been called several times
            self._tokens.get()
        return True


def is_before_uwsgi_forks() -> bool:
    """True in the process from which uWSGI will fork its workers. uWSGI forks without taking the
    interpreter's lock: a child that is forked while a thread holds it would wait for it for ever.
    """
    uwsgi = sys.modules.get("uwsgi")
    if uwsgi is None or not hasattr(uwsgi, "worker_id"):
        return False
    return uwsgi.worker_id() == 0 and uwsgi.masterpid() in (0, os.getpid())


def start_thread(function: Callable[..., object], *arguments: Any) -> bool:
    """Start a thread. False if Python is exiting and starts no more threads, or if uWSGI is about
    to fork.

    Not a `threading.Thread`: its `start` waits for an Event, and an exception there would leave the
    thread half started.
    """
    if is_before_uwsgi_forks():
        return False
    try:
        _thread.start_new_thread(
            FORK_WAIT.run_thread, (_thread.get_native_id(), function, arguments)
        )
    except RuntimeError as exc:
        if exc.__traceback__ is not None and exc.__traceback__.tb_next is not None:
            raise  # by a signal handler: `start_new_thread` itself has no frame
        return False
    return True


def run_to_completion(function: Callable[[], T]) -> T:
    """Call `function` in a thread of its own, wait, and return its result or raise its error.

    For work that must not be left half done: a signal handler's exception ends the wait alone.
    """
    finished = OneShotEvent()
    results: list[T] = []
    failures: list[BaseException] = []

    def call() -> None:
        try:
            results.append(function())
        except BaseException as exc:  # raised again in the thread that waits
            failures.append(exc)
        finally:
            finished.set()

    if not start_thread(call):
        return function()
    while not finished.is_set:
        finished.wait(_CHECK_EVERY_S)
    if failures:
        raise failures[0]
    return results[0]


_CHECK_EVERY_S = 60.0
"""Seconds of one wait in `run_to_completion`, which has no timeout of its own."""
