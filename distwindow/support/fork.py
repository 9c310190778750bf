"""Support for `fork`: what it waits for, and the objects that start afresh in the child.

It waits for threads of this package that connect, and for threads that are about to end. OpenSSL
and the C library have locks for the whole process, and a fork copies them as they are. A lock that
another thread holds at that moment is held in the child for ever, because the child does not have
that thread: it could never open a TLS connection. Such locks are held

    by a thread that connects     now and then, until it is connected
    by a thread that ends         after it has left Python: OpenSSL frees what it kept for the
                                  thread, under a lock that each new thread has to take for its
                                  first TLS connection

When a thread that connects has returned the connection, it still has to end. So a program that
forks right after its first call would fork at that moment.

    the thread            `_connecting`   `_ending`     a fork by another thread
    runs, and connects    it is there     -             waits
    runs                  -               -             does not wait: it holds no such lock
    has left Python       -               it is there   waits
    is gone               -               removed       does not wait

Nothing here takes a lock, so a fork cannot copy one that is held, and a signal handler that forks
may interrupt everything: each line is a single operation of a dict. uWSGI calls none of this when
it forks, and for that reason no threads are started before (see `locks.py`).
"""

from __future__ import annotations

import os
import weakref
from _thread import get_native_id
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from time import monotonic, sleep
from typing import Any, TypeVar

T = TypeVar("T")

forks = 0
"""How many forks lie between the process that has imported this module and this one. What was begun
under another number belongs to another process."""


def _count_fork() -> None:
    global forks
    forks += 1


_registered: weakref.WeakSet[Any] = weakref.WeakSet()


def register_after_fork(owner: T) -> T:
    """Call `owner.after_fork()` in forked children, for as long as `owner` lives."""
    _registered.add(owner)
    return owner


def reset_process_state() -> None:
    """Reset connections, counts and locks, as in a forked child."""
    for owner in list(_registered):
        owner.after_fork()


MAX_WAIT_S = 0.1
"""Seconds that a fork waits at most. Connecting over a slow network takes longer, but most of that
time the thread waits for the network, and holds no lock.
"""
_LONGEST_CONNECT_S = 1.0
"""Seconds after which a fork does not wait for a connection that is still not there: the server
does not answer, or the event loop that should go on was stopped.
"""
_CHECK_EVERY_S = 0.0002
"""Seconds between two checks of the threads that a fork waits for."""
_LONGEST_END_S = 1.0
"""Seconds after which a thread that has left Python is taken to be gone, its number reused."""
_USUAL_END_S = 0.005
"""The same, for systems that do not list the threads of a process under `/proc`."""


class ForkWait:
    """The threads for which a fork waits. `threads_directory` has a file for each live thread."""

    def __init__(self, threads_directory: str = "/proc/self/task") -> None:
        self._directory = threads_directory if Path(threads_directory).is_dir() else None
        self._longest_end_s = _LONGEST_END_S if self._directory else _USUAL_END_S
        self._connecting: dict[object, tuple[int, float]] = {}
        """The system's number of each thread that connects, and since when (monotonic seconds), by
        a token for each connection: tasks and greenlets share a thread.
        """
        self._ending: dict[int, float] = {}
        """When each thread has left Python (monotonic seconds), by the system's number of it. In
        the order of these times."""

    @contextmanager
    def connecting(self) -> Iterator[None]:
        """Delay forks by other threads while the current one connects. Tasks may wait within it."""
        token = object()
        self._connecting[token] = get_native_id(), monotonic()
        try:
            yield
        finally:
            self._connecting.pop(token, None)

    def run_thread(
        self, starter: int, function: Callable[..., object], arguments: tuple[Any, ...]
    ) -> None:
        """Call `function` as the whole work of a new thread, and have forks wait for its end.
        `starter` is the system's number of the thread that has started it.
        """
        try:
            function(*arguments)
        finally:
            thread = get_native_id()
            if thread != starter:  # a greenlet runs in the thread that has started it
                self._drop_ended(2)  # more than come, so that there are never many
                self._ending.pop(thread, None)
                self._ending[thread] = monotonic()

    def wait(self) -> None:
        """Wait until no other thread connects or ends, for `MAX_WAIT_S` at most. To be called
        before a fork. What a signal handler raises here ends the wait; Python reports it
        (`sys.unraisablehook`) and forks, as with all functions that are called at a fork.
        """
        if not self._connecting and not self._ending:
            return
        deadline = monotonic() + MAX_WAIT_S
        while self._has_to_wait() and monotonic() < deadline:
            sleep(_CHECK_EVERY_S)

    def after_fork(self) -> None:
        """In a forked child, which has none of these threads."""
        self._connecting.clear()
        self._ending.clear()

    def _has_to_wait(self) -> bool:
        self._drop_ended(len(self._ending))
        this_thread = get_native_id()
        longest_ago = monotonic() - _LONGEST_CONNECT_S
        for thread, began_at in list(self._connecting.values()):
            if thread != this_thread and began_at >= longest_ago:
                return True
        return any(thread != this_thread for thread in list(self._ending))

    def _drop_ended(self, most: int) -> None:
        """Forget those of the first `most` threads that are gone."""
        if not self._ending:
            return
        longest_ago = monotonic() - self._longest_end_s
        for thread, left_python_at in list(self._ending.items())[:most]:
            if left_python_at < longest_ago or (
                self._directory and not os.access(f"{self._directory}/{thread}", os.F_OK)
            ):
                self._ending.pop(thread, None)


FORK_WAIT = ForkWait()
"""The one of this process."""

if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_count_fork)
    os.register_at_fork(before=FORK_WAIT.wait, after_in_child=FORK_WAIT.after_fork)
    os.register_at_fork(after_in_child=reset_process_state)
