"""The connections of a blocking store: one for each thread and node.

a thread's first call to a node   takes over an idle connection, or makes a new one
its later calls                   use that connection
a call by a signal handler        uses connections of its own, which it closes at its end
the thread ends                   its connections become idle, and new threads take them over
the limiter is closed             all are closed, and no thread gets one any more
the process forks                 the child has none of them; those of the parent stay open
"""

from __future__ import annotations

import queue
import threading
import weakref
from collections.abc import Mapping

from ....core.clock import Clock
from ....core.errors import closed_failure
from ....core.interrupts import PATCH_STATE
from ..topology import Node
from .connection import BlockingConnection

_MAX_IDLE = 16
"""The most connections of ended threads that are kept for new threads."""
_FEW_THREADS = 12
"""The most threads that make their calls side by side. Sharing calls halves the throughput of 8
threads, and doubles that of 100 (docs/decisions/0009-threads-share-calls.md). The main thread and
the worker's thread may be two of them.
"""


class _ThreadLifetime:
    """Referred to by one thread alone, so that it is destroyed when the thread ends.

    The store notices that by the callback of a weak reference, which is a C function here. A
    destructor would be Python code, and Python drops what a signal handler raises in a destructor.
    """

    __slots__ = ("__weakref__",)


class ThreadState:
    """What the store keeps for the current thread: see `_new_thread_state`."""

    def __init__(self) -> None:
        self.call_in_progress = False
        """True while a call is being made."""
        self.connections: dict[Node, BlockingConnection] = {}
        """The connections of the call that is being made."""
        self.thread_connections = self.connections
        """The connections of the thread. `connections` is another dict in a call by a signal
        handler.
        """
        self.only_connection: BlockingConnection | None = None
        """The connection that every call takes if there is only one server."""
        self.lifetime: _ThreadLifetime | None = None


def _new_thread_state() -> ThreadState:
    """Return an object that has the attributes of `ThreadState` for each thread. Its class is made
    here, because gevent may have patched `threading.local` since this module was imported: then it
    has them for each greenlet.
    """
    kind = type("LocalThreadState", (ThreadState, threading.local), {})
    state: ThreadState = kind()
    return state


class ThreadConnections:
    """The connections of all threads."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._closed = False
        self._reset()

    def _reset(self) -> None:
        # Re-entrant, because a signal handler may call the limiter that it has interrupted.
        self._lock = threading.RLock()
        self.this_thread = _new_thread_state()
        self._by_thread: dict[weakref.ref[_ThreadLifetime], dict[Node, BlockingConnection]] = {}
        self._ended_threads: queue.SimpleQueue[weakref.ref[_ThreadLifetime]] = queue.SimpleQueue()
        """The tokens of threads that have ended."""
        self._idle: list[BlockingConnection] = []
        """Connections of ended threads."""
        self.has_many_threads = False
        """True while more than `_FEW_THREADS` threads have connections: then they share calls."""
        self._finalizer = weakref.finalize(self, _close_all, self._by_thread, self._idle)
        self._finalizer.atexit = False

    def after_fork(self) -> None:
        """Start without connections, and with a lock that no thread holds."""
        self._finalizer()  # closes the descriptors of this process only
        self._reset()

    def check_open(self) -> None:
        """Raise `ConfigurationError` after `close`."""
        if self._closed:
            raise closed_failure()

    def connection_to(self, node: Node, *, only_server: bool) -> BlockingConnection:
        """The current thread's connection to `node`; not opened yet if it is new. If `node` is the
        only server, later calls find it as `only_connection`.
        """
        this_thread = self.this_thread
        connection = this_thread.connections.get(node)
        if connection is None:
            PATCH_STATE.check()
            with self._lock:
                self.check_open()
                if this_thread.lifetime is None:
                    token = _ThreadLifetime()
                    self._by_thread[weakref.ref(token, self._ended_threads.put)] = (
                        this_thread.thread_connections
                    )
                    this_thread.lifetime = token
                connection = this_thread.connections[node] = self._idle_connection_to(
                    node
                ) or BlockingConnection(node, self._clock)
                self.has_many_threads = len(self._by_thread) > _FEW_THREADS
            if only_server:
                this_thread.only_connection = connection
        return connection

    def restore(
        self, connections: dict[Node, BlockingConnection], only: BlockingConnection | None
    ) -> None:
        """Give the interrupted call its connections back at the end of a call by a signal handler,
        and close those that the handler's call has opened.
        """
        this_thread = self.this_thread
        opened = this_thread.connections
        this_thread.connections, this_thread.only_connection = connections, only
        for connection in opened.values():
            connection.close()

    def close(self) -> None:
        """Close every connection; `check_open` and `connection_to` raise from now on."""
        with self._lock:
            self._closed = True
            # Each thread has to ask for its connection again, and is refused.
            self.this_thread = _new_thread_state()
        _close_all(self._by_thread, self._idle)
        self._finalizer.detach()

    def _idle_connection_to(self, node: Node) -> BlockingConnection | None:
        """Take an idle connection to `node`, if there is one. Under the lock."""
        while not self._ended_threads.empty():
            # In this order no connection is lost if a signal handler raises: at worst it stays in
            # `_by_thread`, and is closed with the limiter.
            token = self._ended_threads.get()
            self._idle += self._by_thread.get(token, {}).values()
            self._by_thread.pop(token, None)
            while len(self._idle) > _MAX_IDLE:
                self._idle[0].close()
                self._idle.pop(0)
        for connection in self._idle:
            if connection.node is node:
                self._idle.remove(connection)
                return connection
        return None


def _close_all(
    by_thread: Mapping[weakref.ref[_ThreadLifetime], dict[Node, BlockingConnection]],
    idle: list[BlockingConnection],
) -> None:
    """Close every connection, because the limiter is closed or has been garbage-collected."""
    for connections in list(by_thread.values()):
        for connection in list(connections.values()):
            connection.close()
    for connection in idle:
        connection.close()
