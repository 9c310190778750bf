"""The blocking Redis store: a connection for each thread and node, calls of one key shared by many
threads.

A call goes through `attempt`, `_make_call` and one exchange on the thread's connection; where there
are many threads, or the thread has no connection yet, `CallSharing.call` is between the first two.
Whatever is not the short reply on an open connection goes through `execute_once`.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Generator, Iterator, Sequence
from typing import Any, TypeVar

from ...._fork_wait import FORK_WAIT
from ....core.clock import Clock
from ....core.decision import Decision, Source
from ....core.errors import DistwindowError, StoreTimeout
from ....core.interrupts import start_thread
from ....protocol.commands import Acquire
from ....protocol.decisions import decision_of
from ....protocol.frames import Command
from ..attempts import NoReply, RawReply, Request, execute_once
from ..call_share import CallShare, decision_of_share, short_reply
from ..outcome import is_unknown, no_reply_failure, timed_out
from ..timeouts import JobTimeout, run_within
from ..topology import CallSettings, ClusterTopology, Node, SingleServer, Topology
from .call_sharing import CallSharing
from .connection import BlockingConnection
from .thread_connections import ThreadConnections

Reply = TypeVar("Reply")
T = TypeVar("T")

_MAX_PIPELINE = 256
"""Commands of an exchange that are written at once: all of them have to be answered in time."""


class RedisStore:
    """A Redis server, primary or cluster. Safe to share between threads; survives `fork`.

    `find_topology` may connect (to read a cluster's map), so it is called with the first command,
    and again if it failed.
    """

    source: Source = "store"

    def __init__(self, find_topology: Callable[[], Topology], settings: CallSettings) -> None:
        self.clock: Clock = settings.clock
        self._monotonic = settings.clock.monotonic
        self._timeout = settings.timeout
        self._find_topology = find_topology
        self._settings = settings
        self.unknown_total = 0
        self._connections = ThreadConnections(self.clock)
        self._reset()

    def _reset(self) -> None:
        # Re-entrant, because a signal handler may call the limiter that it has interrupted.
        self._lock = threading.RLock()
        self._topology: Topology | None = None
        self._call_sharing = CallSharing(self._timeout, self._monotonic)

    def after_fork(self) -> None:
        """In a forked child: start without connections, and with locks that no thread holds."""
        self._connections.after_fork()
        self._reset()

    def attempt(self, command: Acquire, deadline: float | None = None) -> Decision:
        this_thread = self._connections.this_thread
        if this_thread.call_in_progress:
            return decision_of(command, self._execute_nested(command), "store")
        try:
            this_thread.call_in_progress = True
            began = self._monotonic()
            if deadline is None:
                deadline = began + self._timeout
            if this_thread.connections and not self._connections.has_many_threads:
                share = self._make_call(command, began, deadline)
            else:
                # Also a thread's first calls, so that threads that begin at the same time do not
                # all connect at once, which may take longer than the timeout.
                share = self._call_sharing.call(command, began, deadline, self._make_call)
            return decision_of_share(command, share)
        except BaseException as exc:  # raised by a signal handler, too: the outcome is unknown
            self._count_unknown(exc)
            raise
        finally:
            this_thread.call_in_progress = False

    def execute(self, command: Command[Reply], deadline: float | None = None) -> Reply:
        this_thread = self._connections.this_thread
        if this_thread.call_in_progress:
            return self._execute_nested(command)
        try:
            this_thread.call_in_progress = True
            if deadline is None:
                deadline = self._monotonic() + self._timeout
            return self._execute_alone(command, deadline)
        except BaseException as exc:  # as in `attempt`
            self._count_unknown(exc)
            raise
        finally:
            this_thread.call_in_progress = False

    def exchange(
        self, commands: Sequence[Command[Any]], deadline: float | None = None
    ) -> list[Any]:
        """For each node one write and one wait for up to `_MAX_PIPELINE` commands. Without a
        deadline, each of these gets the store's timeout.
        """
        this_thread = self._connections.this_thread
        if this_thread.call_in_progress:
            return self._nested(lambda: self._exchange(commands, deadline))
        try:
            this_thread.call_in_progress = True
            return self._exchange(commands, deadline)
        finally:
            this_thread.call_in_progress = False

    def close(self) -> None:
        """Close all connections. Calls after this raise `ConfigurationError`."""
        self._connections.close()
        if self._topology is not None:
            _close_topology_client(self._topology)

    def _make_call(self, command: Acquire, began: float, deadline: float) -> CallShare:
        """Make one script call. On an open connection, with the short reply, this is all that a
        call costs; `execute_once` takes whatever else comes.
        """
        this_thread = self._connections.this_thread
        connection = this_thread.only_connection
        if connection is None and self._topology is not None:
            # A new thread may take over an open connection, and then needs no `execute_once`.
            self._connection_to(self._topology.node_of(command))
            connection = this_thread.only_connection
        if connection is None or not connection.validate(began):
            return self._execute_alone(command, deadline)
        clock = connection.node.clock
        guard = clock.new_guard(clock.to_server_ms(deadline))
        raw = connection.round_trip(command.frame(guard), deadline)
        share = short_reply(raw, guard)
        if share is not None:
            self._call_sharing.round_trip_s = clock.update(share[1]) - began
            return share
        topology = self._topology
        assert topology is not None
        sent = Request(connection.node, command, deadline, guard=guard)
        execution = execute_once(command, topology, self._settings, deadline, sent=sent)
        next(execution)
        return self._drive(execution, raw, topology, deadline)

    def _execute_alone(self, command: Command[Reply], deadline: float) -> Reply:
        self._connections.check_open()
        topology = self._topology or self._connect_topology(deadline)
        execution = execute_once(command, topology, self._settings, deadline)
        return self._drive(execution, None, topology, deadline)

    def _drive(
        self,
        execution: Generator[Request, RawReply, Reply],
        raw: RawReply,
        topology: Topology,
        deadline: float,
    ) -> Reply:
        """Run `execute_once` to its end, from the raw reply on that it waits for."""
        while True:
            try:
                request = execution.send(raw)
            except StopIteration as end:
                reply: Reply = end.value
                return reply
            if isinstance(topology, ClusterTopology) and topology.claim_refresh():
                start_thread(_refresh_topology, topology)
            raw = self._connection_to(request.node).execute_request(request, deadline)

    def _exchange(self, commands: Sequence[Command[Any]], deadline: float | None) -> list[Any]:
        replies: list[Any] = [None] * len(commands)
        unreachable: set[Node] = set()
        for node, numbers in self._by_node(commands, replies, deadline):
            if node in unreachable:
                why = no_reply_failure(
                    node.name, "it did not answer earlier commands of this exchange", sent=False
                )
                for number in numbers:
                    replies[number] = why
            elif not self._pipeline(node, numbers, commands, replies, deadline):
                unreachable.add(node)
        return replies

    def _by_node(
        self, commands: Sequence[Command[Any]], replies: list[Any], deadline: float | None
    ) -> Iterator[tuple[Node, list[int]]]:
        """Yield each node with the numbers of its commands, `_MAX_PIPELINE` at a time. An error of
        a command that has no node goes into `replies`.
        """
        by_node: dict[Node, list[int]] = {}
        for number, command in enumerate(commands):
            try:
                self._connections.check_open()
                topology = self._topology or self._connect_topology(
                    deadline or self._monotonic() + self._timeout
                )
                by_node.setdefault(topology.node_of(command), []).append(number)
            except DistwindowError as exc:
                replies[number] = exc
        for node, numbers in by_node.items():
            for first in range(0, len(numbers), _MAX_PIPELINE):
                yield node, numbers[first : first + _MAX_PIPELINE]

    def _pipeline(
        self,
        node: Node,
        numbers: list[int],
        commands: Sequence[Command[Any]],
        replies: list[Any],
        deadline: float | None,
    ) -> bool:
        """Send the commands of these numbers to `node` in one write, and put the reply or error of
        each into `replies`. True if the node has answered all of them.
        """
        topology = self._topology
        assert topology is not None
        if deadline is None:
            deadline = self._monotonic() + self._timeout
        batch = [commands[number] for number in numbers]
        if self._settings.client_clock:
            now = self.clock.now_ms()
            batch = [c.with_time(now) if c.now_ms is None else c for c in batch]
        requests = [Request(node, command, deadline) for command in batch]
        raws: Sequence[RawReply | DistwindowError]
        try:
            raws = self._connection_to(node).pipeline(requests, deadline)
        except DistwindowError as exc:
            raws = [exc] * len(batch)
        for number, command, request, raw in zip(numbers, batch, requests, raws, strict=True):
            if isinstance(raw, DistwindowError):
                replies[number] = raw
                continue
            execution = execute_once(command, topology, self._settings, deadline, sent=request)
            next(execution)
            try:
                replies[number] = self._drive(execution, raw, topology, deadline)
            except DistwindowError as exc:
                replies[number] = exc
        return not isinstance(raws[-1], (NoReply, DistwindowError))

    def _execute_nested(self, command: Command[Reply]) -> Reply:
        """Execute a command for a signal handler that has interrupted a call of this thread."""
        try:
            deadline = self._monotonic() + self._timeout
            return self._nested(lambda: self._execute_alone(command, deadline))
        except BaseException as exc:  # as in `attempt`
            self._count_unknown(exc)
            raise

    def _nested(self, call: Callable[[], T]) -> T:
        """Make a call for a signal handler that has interrupted a call of this thread. It must not
        use the connections of the interrupted call, nor wait for it.
        """
        this_thread = self._connections.this_thread
        connections, only = this_thread.connections, this_thread.only_connection
        # No calls between here and `try`: a handler that raised there would lose the connections.
        this_thread.connections, this_thread.only_connection = {}, None
        try:
            return call()
        finally:
            self._connections.restore(connections, only)

    def _count_unknown(self, exc: BaseException) -> None:
        if isinstance(exc, StoreTimeout):
            self._call_sharing.round_trip_s = self._timeout
        if is_unknown(exc):
            with self._lock:
                self.unknown_total += 1

    def _connection_to(self, node: Node) -> BlockingConnection:
        only = isinstance(self._topology, SingleServer) and not self._settings.client_clock
        return self._connections.connection_to(node, only_server=only)

    def _connect_topology(self, deadline: float) -> Topology:
        try:
            topology = run_within(
                deadline - self._monotonic(), self._find_topology, _close_topology_client
            )
        except JobTimeout:
            raise timed_out("the store", self._timeout, sent=False) from None
        with self._lock:
            used = self._topology = self._topology or topology  # another thread may have been first
        if used is not topology:
            _close_topology_client(topology)
        return used


def _close_topology_client(topology: Topology) -> None:
    if topology.close_client is not None:
        topology.close_client()


def _refresh_topology(topology: ClusterTopology) -> None:
    try:
        with FORK_WAIT.connecting():
            topology.client.nodes_manager.initialize()
    except Exception:  # whatever it is: the map stays stale, and is read again in a second
        return
    topology.on_refreshed()
