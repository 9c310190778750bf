"""The blocking Redis store: a connection per thread and node, calls of one key shared.

Threads that call one key at the same time share script calls. The first goes alone; those that
come while it is away gather, and go together as one call with `times`:

    t1  ask ----------> reply
    t2      gather .... ask x3 ----> reply, one part each
    t3        gather ..
    t4          gather
"""

from __future__ import annotations

import queue
import threading
import weakref
from collections.abc import Callable, Generator, Iterator, Sequence
from typing import Any, TypeVar

from ....core.clock import Clock
from ....core.decision import Decision, Source
from ....core.errors import ConfigurationError, DistwindowError, StoreTimeout
from ....core.interrupts import PATCHES, is_interruption
from ....protocol.commands import Acquire, Command
from ....protocol.decisions import admitted_decision, decision_of
from ....protocol.replies import AcquireReply, split_reply
from ..attempts import NoReply, Request, execute_once
from ..outcome import is_unknown, no_reply_failure, timed_out
from ..timeouts import JobTimeout, run_within
from ..topology import CallSettings, ClusterTopology, Node, SingleServer, Topology
from .call_sharing import CallGroup, CallShare, Waiter
from .connection import BlockingConnection

Reply = TypeVar("Reply")


_MIN_ROUND_TRIPS = 3
"""Calls are shared only where so many round trips fit into the timeout: whoever joins waits for the
rest of the call ahead, and then for its own.
"""

_MAX_IDLE = 16
"""Connections that ended threads have left, and that are kept for new threads."""

_MAX_PIPELINE = 256
"""Commands of an exchange that are written at once: what is under way has to be done in time."""


class RedisStore:
    """A Redis server, primary or cluster. Safe to share between threads; survives `fork`.

    `find` names the place; it may connect (a cluster's map), so it is called with the first
    command, and again after it failed.
    """

    source: Source = "store"

    def __init__(self, find_topology: Callable[[], Topology], settings: CallSettings) -> None:
        self.clock: Clock = settings.clock
        self._monotonic = settings.clock.monotonic
        self._timeout = settings.timeout
        self._find_topology = find_topology
        self._settings = settings
        self._closed = False
        self.unknown_total = 0
        self._reset_connections()

    def after_fork(self) -> None:
        """The child has its own connections, and locks that nobody holds."""
        self._finalizer()  # here only: the parent's connections go on
        self._reset_connections()

    def _reset_connections(self) -> None:
        self._topology: Topology | None = None
        self._this_thread = _mine()
        self._connections: dict[weakref.ref[_ThreadToken], dict[Node, BlockingConnection]] = {}
        """The links of each thread, by its token."""
        self._ended_threads: queue.SimpleQueue[weakref.ref[_ThreadToken]] = queue.SimpleQueue()
        """The tokens of threads that have ended."""
        self._idle_connections: list[BlockingConnection] = []
        """What ended threads have left for new ones."""
        self._finalizer = weakref.finalize(
            self, _close_all, self._connections, self._idle_connections
        )
        self._finalizer.atexit = False
        # Re-entrant, because a signal handler may call the limiter it has interrupted.
        self._lock = threading.RLock()
        self._rtt = 0.0
        """Seconds that the last call has taken."""
        self._in_flight: dict[Acquire, float | CallGroup] = {}
        """The deadline of a key's call that is under way, or the group that waits for it."""

    def attempt(self, command: Acquire, deadline: float | None = None) -> Decision:
        this_thread = self._this_thread
        if this_thread.busy:
            return decision_of(command, self._execute_nested(command), "store")
        try:
            this_thread.busy = True
            return self._attempt(command, deadline)
        except BaseException as exc:
            self._count_unknown(exc)
            raise
        finally:
            this_thread.busy = False

    def execute(self, command: Command[Reply], deadline: float | None = None) -> Reply:
        this_thread = self._this_thread
        if this_thread.busy:
            return self._execute_nested(command)
        try:
            this_thread.busy = True
            if deadline is None:
                deadline = self._monotonic() + self._timeout
            return self._execute_alone(command, deadline)
        except BaseException as exc:
            self._count_unknown(exc)
            raise
        finally:
            this_thread.busy = False

    def exchange(
        self, commands: Sequence[Command[Any]], deadline: float | None = None
    ) -> list[Any]:
        """For each node one write and one wait, for so many commands at a time; each time with a
        deadline of its own where none is given.
        """
        answers: list[Any] = [None] * len(commands)
        away: set[Node] = set()
        this_thread = self._this_thread
        busy, connections, direct = this_thread.busy, this_thread.connections, this_thread.direct
        if busy:  # out of a signal handler, see `_nested`
            this_thread.connections, this_thread.direct = {}, None
        try:
            this_thread.busy = True
            for node, batch in self._by_node(commands, answers, deadline):
                if node in away:
                    why = no_reply_failure(node.name, "it did not answer just now", sent=False)
                    for number in batch:
                        answers[number] = why
                elif not self._pipeline(node, batch, commands, answers, deadline):
                    away.add(node)
        finally:
            this_thread.busy = busy
            if busy:
                self._end_nested(connections, direct)
        return answers

    def _by_node(
        self, commands: Sequence[Command[Any]], answers: list[Any], deadline: float | None
    ) -> Iterator[tuple[Node, list[int]]]:
        """The numbers of the commands of each node, so many at a time."""
        nodes: dict[Node, list[int]] = {}
        for number, command in enumerate(commands):
            try:
                self._check_open()
                topology = self._topology or self._connect_topology(
                    deadline or self._monotonic() + self._timeout
                )
                nodes.setdefault(topology.node_of(command), []).append(number)
            except DistwindowError as exc:
                answers[number] = exc
        for node, numbers in nodes.items():
            for first in range(0, len(numbers), _MAX_PIPELINE):
                yield node, numbers[first : first + _MAX_PIPELINE]

    def _pipeline(
        self,
        node: Node,
        batch: list[int],
        commands: Sequence[Command[Any]],
        answers: list[Any],
        deadline: float | None,
    ) -> bool:
        """Have the commands of these numbers answered; is the node there?"""
        topology = self._topology
        assert topology is not None
        if deadline is None:
            deadline = self._monotonic() + self._timeout
        sent = [commands[i] for i in batch]
        if self._settings.client_clock:
            now = self.clock.now_ms()
            sent = [c.with_time(now) if c.now_ms is None else c for c in sent]
        sends = [Request(node, command, deadline) for command in sent]
        try:
            raws = self._connection(node).pipeline(sends, deadline)
        except DistwindowError as exc:
            raws = [exc] * len(batch)
        for number, command, send, raw in zip(batch, sent, sends, raws, strict=True):
            if isinstance(raw, DistwindowError):
                answers[number] = raw
                continue
            operation = execute_once(command, topology, self._settings, deadline, under_way=send)
            next(operation)
            try:
                answers[number] = self._drive(operation, raw, topology, deadline)
            except DistwindowError as exc:
                answers[number] = exc
        return not isinstance(raws[-1], (NoReply, DistwindowError))

    def _execute_nested(self, command: Command[Reply]) -> Reply:
        """A call out of a signal handler, in the midst of another call of this thread: it must not
        touch the connections of that one, nor wait for it.
        """
        this_thread = self._this_thread
        connections, direct = this_thread.connections, this_thread.direct
        this_thread.connections, this_thread.direct = {}, None
        try:
            return self._execute_alone(command, self._monotonic() + self._timeout)
        except BaseException as exc:
            self._count_unknown(exc)
            raise
        finally:
            self._end_nested(connections, direct)

    def _end_nested(
        self, connections: dict[Node, BlockingConnection], direct: BlockingConnection | None
    ) -> None:
        """Give the interrupted call its connections back, and close those of the nested one."""
        this_thread = self._this_thread
        opened = this_thread.connections
        this_thread.connections, this_thread.direct = connections, direct
        for connection in opened.values():
            connection.close()

    def _count_unknown(self, exc: BaseException) -> None:
        if isinstance(exc, StoreTimeout):
            self._rtt = self._timeout
        if is_unknown(exc):
            with self._lock:
                self.unknown_total += 1

    def _attempt(self, command: Acquire, deadline: float | None) -> Decision:
        began = self._monotonic()
        if deadline is None:
            deadline = began + self._timeout
        if (
            command.store_limit
            or self._rtt > self._timeout / _MIN_ROUND_TRIPS
            or deadline - began < self._rtt * 2
        ):
            share = self._request(command, began, deadline)
            self._rtt = self._monotonic() - began
            return _decision_of_share(command, share)
        waiter: Waiter | None = None
        try:
            with self._lock:
                call_ahead = self._in_flight.get(command)
                if call_ahead is None:
                    self._in_flight[command] = deadline
            if call_ahead is not None:
                waiter = Waiter(deadline)
                if not self._join(command, waiter, began):
                    waiter = None
            if waiter is None:
                return _decision_of_share(command, self._request(command, began, deadline))
            return _decision_of_share(command, self._wait_for_share(command, waiter))
        except BaseException as exc:
            if waiter is not None and waiter.group is not None:
                self._leave(command, waiter, exc)
            raise
        finally:
            # Twice, where a signal handler raises in here: what is left away stops all others.
            if waiter is None or waiter.group is None:
                try:
                    self._start_next(command, deadline)
                except BaseException:
                    self._start_next(command, deadline)
                    raise

    def close(self) -> None:
        """Close all connections. Calls after this raise `ConfigurationError`."""
        with self._lock:
            self._closed = True
            self._this_thread = (
                _mine()
            )  # so that no thread has a connection that it need not ask for
        _close_all(self._connections, self._idle_connections)
        self._finalizer.detach()
        if self._topology is not None:
            _release_topology(self._topology)

    def _request(self, command: Acquire, began: float, deadline: float) -> CallShare:
        """Make a call. On a connection that stands, with the usual reply (one ring, all admitted),
        this is all there is; whatever else comes is for `call` to judge.
        """
        connection = self._this_thread.direct
        if (
            connection is None and self._topology is not None
        ):  # a new thread: it may get one that stands
            self._connection(self._topology.node_of(command))
            connection = self._this_thread.direct
        if connection is None or not connection.ready(began):
            return self._execute_alone(command, deadline)
        clock = connection.node.clock
        guard = clock.guard(clock.until_ms(deadline))
        raw = connection.request(command.frame(guard), deadline)
        if type(raw) is list and len(raw) == 3 and raw[0] == guard and raw[1] >= 0:
            self._rtt = clock.learn(raw[2]) - began
            return raw[1], raw[2]
        topology = self._topology
        assert topology is not None
        send = Request(connection.node, command, deadline, guard=guard)
        operation = execute_once(command, topology, self._settings, deadline, under_way=send)
        next(operation)
        return self._drive(operation, raw, topology, deadline)

    def _join(self, command: Acquire, waiter: Waiter, now: float) -> bool:
        """Gather behind the call ahead. False where there is none any more, or it should long be
        back, so that its caller must have been killed by a signal handler's exception, or its
        thread by the interpreter: the member's call is the one that is away then.
        """
        with self._lock:
            call_ahead = self._in_flight.get(command)
            until = call_ahead.call_ahead if isinstance(call_ahead, CallGroup) else call_ahead
            if call_ahead is None or until is None or now > until:
                self._in_flight[command] = waiter.deadline
                return False
            if not isinstance(call_ahead, CallGroup):
                call_ahead = self._in_flight[command] = CallGroup(until)
            call_ahead.join(waiter)
            return True

    def _wait_for_share(self, command: Acquire, waiter: Waiter) -> CallShare:
        """As a member of a group: be its leader, or get one's part from whoever is."""
        group = waiter.group
        assert group is not None
        if waiter.wait(self._monotonic()):
            if group.leader is waiter:
                self._lead(command, group, waiter.deadline)
            return waiter.share()
        raise timed_out("the store", self._timeout, sent=not self._leave(command, waiter, None))

    def _lead(self, command: Acquire, group: CallGroup, deadline: float) -> None:
        """Make the call of a group that has gone, and deal the parts out."""
        began = self._monotonic()
        if began >= deadline:
            raise timed_out("the store", self._timeout, sent=False)
        times = len(group.members)
        shared = command.combined(times)
        group.sent = True
        share = self._request(shared, began, deadline)
        costs = [charge.cost for charge in command.charges]
        if isinstance(share, AcquireReply):
            group.distribute(split_reply(share, times, costs))
        else:
            left, now = share
            group.distribute([(left + costs[0] * after, now) for after in range(times - 1, -1, -1)])
        self._start_next(command, deadline)

    def _leave(self, command: Acquire, waiter: Waiter, why: BaseException | None) -> bool:
        """A member ends without a part; True when it has surely not been asked for. What a leader
        leaves undone is done here.
        """
        group = waiter.group
        assert group is not None
        with self._lock:
            unsent = group.leave(waiter)
            next_leader = self._next_leader(command, waiter)
        if next_leader is not None:
            next_leader.wake()
        elif group.leader is waiter:
            group.fail(why)
            self._start_next(command, waiter.deadline)
        return unsent

    def _next_leader(self, command: Acquire, leader: Waiter) -> Waiter | None:
        """Who leads in the place of a leader that leaves without having asked."""
        group, call_ahead = leader.group, self._in_flight.get(command)
        assert group is not None
        if group.leader is not leader or group.sent or len(group.members) < 2:
            return None
        next_leader = group.members[1]
        if call_ahead is leader.deadline:
            self._in_flight[command] = next_leader.deadline
        elif isinstance(call_ahead, CallGroup) and call_ahead.call_ahead is leader.deadline:
            call_ahead.call_ahead = next_leader.deadline
        else:
            return None
        del group.members[0]
        group.leader = next_leader
        return next_leader

    def _start_next(self, command: Acquire, deadline: float) -> None:
        """The call of that deadline has returned: the group that gathered meanwhile may go."""
        with self._lock:
            call_ahead = self._in_flight.get(command)
            if call_ahead is deadline:
                del self._in_flight[command]
            elif isinstance(call_ahead, CallGroup) and call_ahead.call_ahead is deadline:
                leader = call_ahead.close()
                if leader is None:
                    del self._in_flight[command]
                else:
                    # Woken first: where a signal handler raises in between, this is done again.
                    leader.wake()
                    self._in_flight[command] = leader.deadline

    def _execute_alone(self, command: Command[Reply], deadline: float) -> Reply:
        self._check_open()
        topology = self._topology or self._connect_topology(deadline)
        return self._drive(
            execute_once(command, topology, self._settings, deadline), None, topology, deadline
        )

    def _drive(
        self,
        operation: Generator[Request, Any, Reply],
        answer: Any,
        topology: Topology,
        deadline: float,
    ) -> Reply:
        try:
            while True:
                send = operation.send(answer)
                if isinstance(topology, ClusterTopology) and topology.is_refresh_due():
                    threading.Thread(
                        target=_refresh_topology, args=(topology,), daemon=True
                    ).start()
                answer = self._connection(send.node).exchange(send, deadline)
        except StopIteration as end:
            if is_interruption(end):
                raise
            reply: Reply = end.value
            return reply

    def _connect_topology(self, deadline: float) -> Topology:
        try:
            topology = run_within(
                deadline - self._monotonic(), self._find_topology, _release_topology
            )
        except JobTimeout:
            raise timed_out("the store", self._timeout, sent=False) from None
        with self._lock:
            kept = self._topology = self._topology or topology  # another thread may have been first
        if kept is not topology:
            _release_topology(topology)
        return kept

    def _check_open(self) -> None:
        if self._closed:
            raise ConfigurationError("this limiter is closed; make a new one")

    def _connection(self, node: Node) -> BlockingConnection:
        this_thread = self._this_thread
        connection = this_thread.connections.get(node)
        if connection is None:
            PATCHES.check()
            with self._lock:
                self._check_open()
                if this_thread.token is None:
                    token = _ThreadToken()
                    self._connections[weakref.ref(token, self._ended_threads.put)] = this_thread.own
                    this_thread.token = token
                connection = this_thread.connections[node] = self._idle_connection(
                    node
                ) or BlockingConnection(node, self.clock)
            if isinstance(self._topology, SingleServer) and not self._settings.client_clock:
                this_thread.direct = connection
        return connection

    def _idle_connection(self, node: Node) -> BlockingConnection | None:
        """A link to `node` of a thread that has ended. Under the lock."""
        while not self._ended_threads.empty():
            # In this order nothing is lost where a signal handler raises: at the worst a link stays
            # in `_links`, and is closed with the limiter.
            token = self._ended_threads.get()
            self._idle_connections += self._connections.get(token, {}).values()
            self._connections.pop(token, None)
            while len(self._idle_connections) > _MAX_IDLE:
                self._idle_connections[0].close()
                self._idle_connections.pop(0)
        for connection in self._idle_connections:
            if connection.node is node:
                self._idle_connections.remove(connection)
                return connection
        return None


def _decision_of_share(command: Acquire, share: CallShare) -> Decision:
    if isinstance(share, AcquireReply):
        return decision_of(command, share, "store")
    left, now = share
    limit = command.charges[0].limit
    width = limit.bucket_ms
    return admitted_decision(command, 0, left, limit.span * width - now % width, now, "store")


class _ThreadToken:
    """Kept by a thread alone, so that it goes when the thread ends. Its weak reference is told of
    that: by a call of C, as a destructor would be Python code, and Python drops what a signal
    handler raises in a destructor.
    """

    __slots__ = ("__weakref__",)


class _ThreadState:
    """A thread's own links. What a store has of this is a `threading.local`, see `_mine`."""

    def __init__(self) -> None:
        self.busy = False
        """A call is under way."""
        self.connections: dict[Node, BlockingConnection] = {}
        self.own = self.connections
        """`links`, but for calls out of a signal handler, which have others."""
        self.direct: BlockingConnection | None = None
        """The one that all calls take, where there is one server."""
        self.token: _ThreadToken | None = None


def _mine() -> _ThreadState:
    """A `_Mine` for each thread. Not a subclass once and for all: after gevent has patched
    `threading.local`, that is one for each greenlet.
    """
    kind = type("_MineOfThread", (_ThreadState, threading.local), {})
    this_thread: _ThreadState = kind()
    return this_thread


def _close_all(
    threads: dict[Any, dict[Node, BlockingConnection]], idle: list[BlockingConnection]
) -> None:
    """Close every link, as the limiter is closed, or nobody has it any more."""
    for connections in list(threads.values()):
        for connection in list(connections.values()):
            connection.close()
    for connection in idle:
        connection.close()


def _release_topology(topology: Topology) -> None:
    if topology.release is not None:
        topology.release()


def _refresh_topology(topology: ClusterTopology) -> None:
    try:
        topology.client.nodes_manager.initialize()
    except Exception:  # whatever it is: the map stays stale, and is tried again in a second
        return
    topology.on_refreshed()
