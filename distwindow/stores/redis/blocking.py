"""The blocking Redis store: a connection for each thread and node.

A call goes through `decide`, `_make_call` and one round trip on the thread's connection; where
there are many threads, or the thread has no connection yet, `CallSharing.call` is between the first
two. What is no reply that decides the call goes through `execute_once`.
"""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, TypeVar

from ...errors import ConfigurationError, DistwindowError, StoreError, StoreTimeout
from ...ring.clock import Clock
from ...ring.command import Command, ScriptReply
from ...ring.commands import Acquire
from ...ring.decision import Decision, Source
from ...ring.decisions import admitted_decision, decision_of
from ...ring.replies import PAST_DEADLINE, AcquireReply
from ...support.fork import FORK_WAIT
from ...support.locks import start_thread
from .call_sharing import CallSharing
from .connections import (
    BlockingConnection,
    JobTimeout,
    ThreadConnections,
    ask_once,
    run_within,
    try_to_connect,
)
from .handshake import connect_failure, may_be_wrong_server
from .outcome import (
    MAX_PIPELINE,
    NoReply,
    RawReply,
    Request,
    check_not_away,
    execute_once,
    is_unknown,
    no_reply_failure,
    timed_out,
)
from .slot_map import Questions
from .topology import (
    CallSettings,
    ClusterMap,
    ClusterTopology,
    Node,
    Reachability,
    SingleServer,
    Topology,
    probe_pause_s,
)

Reply = TypeVar("Reply")
T = TypeVar("T")


class RedisStore:
    """A Redis server, primary or cluster. Safe to share between threads; survives `fork`.

    `make_topology` is called by the first command, which reads the map of a cluster as well.
    """

    decided_by: Source = "store"

    def __init__(self, make_topology: Callable[[], Topology], settings: CallSettings) -> None:
        self.clock: Clock = settings.clock
        self._monotonic = settings.clock.monotonic
        self._timeout = settings.timeout
        self._make_topology = make_topology
        self._settings = settings
        self.unknown_total = 0
        self.outages = settings.outages
        this_store = weakref.ref(self)  # a store that is dropped is not probed any more
        self.outages.start_probe = lambda server: start_thread(_probe, server, this_store)
        self._connections = ThreadConnections(self.clock)
        self._reset()

    def _reset(self) -> None:
        # Re-entrant, because a signal handler may call the limiter that it has interrupted.
        self._lock = threading.RLock()
        self._topology: Topology | None = None
        self._only_node: Any = None  # so that it is looked up in a dictionary of nodes
        """The only server's node, once known; None on a cluster, or with the client's time."""
        self._map = ClusterMap(self._settings)
        """Whether the map of a cluster can be read. (Other topologies need no connection.)"""
        self._call_sharing = CallSharing(self._timeout, self._monotonic)

    def after_fork(self) -> None:
        """In a forked child: start without connections, and with locks that no thread holds."""
        self._connections.after_fork()
        self.outages.after_fork()
        self._reset()

    def decide(self, command: Acquire, deadline: float | None = None) -> Decision:
        decision: Decision = self._call(command, deadline, decides=True)
        return decision

    def _call(self, command: Any, deadline: float | None = None, *, decides: bool = False) -> Any:
        """Begin a call, and return the reply; with `decides` the decision on an `Acquire`."""
        this_thread = self._connections.this_thread
        is_nested = this_thread.call_in_progress
        try:
            this_thread.call_in_progress = True
            began = self._monotonic()
            if deadline is None:
                deadline = began + self._timeout
            if is_nested:
                reply = self._nested(partial(self._execute_alone, command, deadline))
            elif not decides:
                reply = self._make_call(command, began, deadline, command.reply)
            elif this_thread.connections and not self._connections.has_many_threads:
                reply = self._make_call(command, began, deadline)
            else:
                # Also a thread's first calls, so that threads that begin at the same time do not
                # all connect at once, which may take longer than the timeout.
                reply = self._call_sharing.call(command, began, deadline, self._make_call)
            if not decides:
                return reply
            if isinstance(reply, AcquireReply):
                return decision_of(command, reply, "store")
            left, now_ms = reply
            return admitted_decision(command, 0, left, None, now_ms, "store")
        except BaseException as exc:  # raised by a signal handler, too: the outcome is unknown
            self._count_unknown(exc)
            raise
        finally:
            this_thread.call_in_progress = is_nested

    execute = _call  # itself, as a function that calls it would cost each call

    def execute_many(
        self, commands: Sequence[Command[Any]], deadline: float | None = None
    ) -> list[Any]:
        """One write and one wait for `MAX_PIPELINE` commands of a node, each in the timeout."""
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

    def _make_call(
        self,
        command: Command[Any],
        began: float,
        deadline: float,
        reply_of: Callable[[ScriptReply], Any] | None = None,
    ) -> Any:
        """Make one script call, and return its reply: without `reply_of` a `CallShare`. On an open
        connection, with a reply that decides it, this is all that a call costs; `execute_once`
        takes whatever else comes.
        """
        connection = self._connections.this_thread.connections.get(self._only_node)
        connection = connection or self._connection_if_known(command)
        if connection is None or began >= deadline:
            return self._execute_alone(command, deadline)
        clock = connection.node.clock
        stamp = clock.new_stamp(deadline)
        frame = command.frame(stamp)
        if not connection.is_open(began):
            return self._execute_alone(command, deadline)
        raw = connection.round_trip(frame, deadline)
        if type(raw) is list and len(raw) >= 3 and raw[0] == stamp and raw[1] != PAST_DEADLINE:
            now = self._monotonic()
            clock.on_reply(command, raw[2], now)
            if reply_of is not None:
                return reply_of(raw)
            self._call_sharing.round_trip_s = now - began
            return (raw[1], raw[2]) if len(raw) == 3 else command.reply(raw)
        sent = Request(connection.node, command, deadline, stamp=stamp)
        return self._execute_alone(command, deadline, sent, raw)

    def _connection_if_known(self, command: Command[Any]) -> BlockingConnection | None:
        """Return this thread's connection, which may not be open, for a call that needs no
        `execute_once` as long as nothing goes wrong; else None. (Callers look for that to the only
        server themselves, which spares most calls this one.)
        """
        node, topology = self._only_node, self._topology
        if isinstance(topology, ClusterTopology) and not self._settings.client_clock:
            node = topology.known_node_of(command)
        # A new thread may take over an open connection.
        return None if node is None else self._connections.connection_to(node)

    def _execute_alone(
        self,
        command: Command[Reply],
        deadline: float,
        sent: Request | None = None,
        raw: RawReply = None,
    ) -> Reply:
        """Run `execute_once` to its end. `raw` is the reply to the request that was sent before."""
        if sent is None:
            self._connections.check_open()
        topology = self._topology or self._connect_topology(deadline)
        if sent is None and isinstance(topology, SingleServer):
            check_not_away(topology.node)  # answered without an attempt of its own
        _refresh_if_due(topology)  # also where no node has the slot
        execution = execute_once(command, topology, self._settings, deadline, sent=sent)
        if sent is not None:
            next(execution)
        while True:
            try:
                request = execution.send(raw)
            except StopIteration as end:
                reply: Reply = end.value
                return reply
            _refresh_if_due(topology)
            if request.pause_s:
                self.clock.sleep(request.pause_s)
            raw = self._connections.connection_to(request.node).execute_request(request, deadline)

    def _exchange(self, commands: Sequence[Command[Any]], deadline: float | None) -> list[Any]:
        replies: list[Any] = [None] * len(commands)
        by_node: dict[Node, list[int]] = {}
        for number, command in enumerate(commands):
            try:
                self._connections.check_open()
                topology = self._topology or self._connect_topology(
                    deadline or self._monotonic() + self._timeout
                )
                _refresh_if_due(topology)
                by_node.setdefault(topology.node_of(command), []).append(number)
            except DistwindowError as exc:
                replies[number] = exc
        for node, numbers in by_node.items():
            while numbers:
                batch, numbers = numbers[:MAX_PIPELINE], numbers[MAX_PIPELINE:]
                if not self._pipeline(node, batch, commands, replies, deadline):
                    why = "it did not answer earlier commands of this exchange"
                    failure = no_reply_failure(node.name, why, sent=False)
                    for number in numbers:
                        replies[number] = failure
                    break
        return replies

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
        if deadline is None:
            deadline = self._monotonic() + self._timeout
        batch = [commands[number] for number in numbers]
        if self._settings.client_clock:
            now = self.clock.now_ms()
            batch = [c.with_time(now) if c.now_ms is None else c for c in batch]
        requests = [Request(node, command, deadline) for command in batch]
        raws: Sequence[RawReply | DistwindowError]
        try:
            raws = self._connections.connection_to(node).pipeline(requests, deadline)
        except DistwindowError as exc:
            raws = [exc] * len(batch)
        answers = list(zip(numbers, batch, requests, raws, strict=True))
        # Those that may have to wait come last: the others tell the server's time, which is now.
        answers.sort(key=lambda answer: isinstance(answer[3], Exception))
        for number, command, request, raw in answers:
            if isinstance(raw, DistwindowError):
                replies[number] = raw
                continue
            try:
                replies[number] = self._execute_alone(command, deadline, request, raw)
            except DistwindowError as exc:
                replies[number] = exc
        return not isinstance(raws[-1], (NoReply, DistwindowError))

    def _nested(self, call: Callable[[], T]) -> T:
        """Make a call for a signal handler that has interrupted a call of this thread. It must not
        use the connections of the interrupted call, nor wait for it.
        """
        this_thread = self._connections.this_thread
        connections = this_thread.connections
        # No calls between here and `try`: a handler that raised there would lose the connections.
        this_thread.connections = {}
        try:
            return call()
        finally:
            self._connections.restore(connections)

    def _count_unknown(self, exc: BaseException) -> None:
        if isinstance(exc, StoreTimeout):
            self._call_sharing.round_trip_s = self._timeout
        if is_unknown(exc):
            with self._lock:
                self.unknown_total += 1

    def probe(self, server: Reachability) -> bool:
        """Try once whether `server` is up again. True if it is, or if the store is closed."""
        if self._connections.is_closed:
            server.stop_probing()
            return True
        step = server.poll()
        if step == "connect":
            try:
                if isinstance(server, Node):
                    try_to_connect(server, self.clock, self._timeout)
                else:
                    self._keep_topology(self._read_topology())
            except ConfigurationError as exc:
                server.on_refused_client(exc)  # the next call raises it
            except Exception:  # whatever redis-py raises: if it was reached, `poll` knows
                pass
        return server.poll() == "done"

    def _find_topology(self) -> Topology:
        topology = self._make_topology()
        if isinstance(topology, ClusterTopology) and not topology.map.ranges:
            # Others wait for as long as a call may. A child may find it held, by a thread of its
            # parent that was reading.
            is_first = topology.map.first_reading.acquire(timeout=self._timeout)
            try:
                if not topology.map.ranges:
                    _ask(topology.read_map())
            except DistwindowError:
                raise
            except Exception as exc:  # whatever redis-py raises
                raise connect_failure(exc, "the cluster", self._settings.secrets) from exc
            finally:
                if is_first:
                    topology.map.first_reading.release()
        return topology

    def _connect_topology(self, deadline: float) -> Topology:
        slot_map = None
        if self._settings.endpoints:  # of a cluster, whose map another limiter may have read
            topology = self._make_topology()
            if isinstance(topology, ClusterTopology):
                slot_map = topology.map
                if slot_map.ranges:
                    return self._keep_topology(topology)
        began_at = self._monotonic()
        check_not_away(self._map)
        seconds = deadline - began_at
        find = partial(self._map.wrong_server.find, self._map.endpoints, seconds)
        try:
            topology = run_within(
                seconds, self._read_topology, _close_topology_client,
                find_mistake=find if self._map.wrong_server.is_due else None,
            )  # fmt: skip
        except JobTimeout:
            mistake = self._map.on_reading_timed_out(slot_map, began_at)
            raise mistake or timed_out("the store", self._timeout, sent=False) from None
        except StoreError as exc:
            self._map.on_connect_failed(exc, began_at)
            raise
        except ConfigurationError as exc:
            self._map.on_refused_map(exc)
            raise
        return self._keep_topology(topology)

    def _read_topology(self) -> Topology:
        """Find the topology, or say that another server answers in the cluster's place."""
        check = self._map.wrong_server
        if (error := check.again(self._timeout)) is not None:
            raise error
        try:
            return self._find_topology()
        except (StoreError, ConfigurationError) as exc:
            error = None
            if check.is_due and may_be_wrong_server(exc, exc):
                error = check.find(self._map.endpoints, self._timeout)
            if error is None:
                raise
            raise error from exc

    def _keep_topology(self, topology: Topology) -> Topology:
        self._map.on_connected()
        with self._lock:
            used = self._topology = self._topology or topology  # another thread may have been first
            if isinstance(used, SingleServer):
                used.node.ask_sentinels = lambda: start_thread(_ask, used.ask_sentinels())
                if not self._settings.client_clock:
                    self._only_node = used.node
        if used is not topology:
            _close_topology_client(topology)
        return used


def _close_topology_client(topology: Topology) -> None:
    if topology.close_client is not None:
        topology.close_client()


def _probe(server: Reachability, store: weakref.ref[RedisStore]) -> None:
    """Probe a server that is away until it is back, in a thread of its own."""
    try:
        server.outages.notify()
        while True:
            time.sleep(probe_pause_s())
            used = store()
            if used is None or used.probe(server):
                return
            del used
    except BaseException:  # the greenlet is killed, for example
        server.stop_probing()
        raise


def _ask(questions: Questions) -> None:
    """Ask questions, each over a connection of its own."""
    reply: Any = None
    with suppress(StopIteration), FORK_WAIT.connecting():
        while True:
            connection, words = questions.send(reply)
            reply = ask_once(connection, words)


def _refresh_if_due(topology: Topology) -> None:
    """Have the map of a cluster read again, if it is stale."""
    if isinstance(topology, ClusterTopology) and topology.claim_refresh():
        start_thread(_refresh_topology, topology)


def _refresh_topology(topology: ClusterTopology) -> None:
    try:
        _ask(topology.read_map())
    except Exception:  # whatever it is: the map stays stale, and is read again soon
        return
    topology.on_refreshed()
