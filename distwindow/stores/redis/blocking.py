"""The blocking Redis store: a connection for each thread and node, calls of one key shared by many
threads.

Threads that call one key at the same time share script calls, if the store has many threads.

Where it has few, each makes its own calls once it has a connection: to wake a thread that waits
costs more than a call (`ThreadConnections.has_many_threads`). With many threads sharing is faster,
and it always saves most of the server's work.

The first thread calls alone. Threads that come while its call is in flight wait in a group, and the
first member of the group, its leader, then makes one script call for all members:

    thread 1   call ----------> reply
    thread 2      wait ........ call for three ----------> reply, split into shares
    thread 3         wait .............................. share
    thread 4            wait ........................... share

A key has one of three states: `idle` (it has no `InFlightCall`), `in flight` (it has one), and
`gathering` (and members wait in the group behind it). A test plays every row of this table:

    | state     | event                           | next state | what happens                    |
    |-----------|---------------------------------|------------|---------------------------------|
    | idle      | a call begins                   | in flight  | it is made alone                |
    | in flight | a call begins                   | gathering  | it waits in a new group         |
    | gathering | a call begins                   | gathering  | it joins the group              |
    | in flight | the call ends                   | idle       | nobody is woken                 |
    | gathering | the call ends                   | in flight  | the leader calls for its group  |
    | gathering | the only waiter's time is over  | in flight  | it was surely not executed      |
    | in flight | the leader is interrupted early | in flight  | the next member leads           |
    | in flight | a call begins too late          | in flight  | it is made alone, in its place  |
    | gathering | a call begins too late          | in flight  | the waiters run out of time     |

"Interrupted early" means before it has sent anything. "Too late" means after the deadline of the
call in flight: its thread was ended by the interpreter, or by a signal handler's exception in the
middle of the clean-up, and nobody would ever end that call. Then the new call takes its place.

A signal handler may raise anywhere in the main thread. Where it leaves a call in flight that nobody
ends, those who wait behind it run out of time, and the next call takes its place.
"""

from __future__ import annotations

import copy
import queue
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, TypeAlias, TypeVar

from ...away.outages import Reachability, probe_pause_s
from ...errors import (
    ConfigurationError,
    DistwindowError,
    StoreError,
    StoreTimeout,
    StoreUnavailable,
)
from ...ring.clock import Clock
from ...ring.command import Command
from ...ring.commands import Acquire
from ...ring.decision import Decision, Source
from ...ring.decisions import admitted_decision, decision_of
from ...ring.limit import expires_in_ms
from ...ring.replies import PAST_DEADLINE, AcquireReply, split_reply
from ...support.fork import FORK_WAIT
from ...support.locks import start_thread, take_token
from .connections import (
    NOT_OPEN,
    BlockingConnection,
    ThreadConnections,
    ask_once,
    try_to_connect,
)
from .handshake import connect_failure, may_be_wrong_server
from .outcome import (
    JobTimeout,
    NoReply,
    RawReply,
    Request,
    check_not_away,
    execute_once,
    is_unknown,
    no_reply_failure,
    run_within,
    timed_out,
)
from .slot_map import Questions
from .topology import CallSettings, ClusterMap, ClusterTopology, Node, SingleServer, Topology

# --------------------------------------------------------------------------------------------------
#
# One script call may stand for several equal calls: what each of their callers gets of its reply.
# Both stores recognize short replies here, split a reply into shares, and decide each of them.

ShortReply: TypeAlias = "tuple[int, int]"
"""`left` and `now_ms` of the reply `[stamp, left, now_ms]`, which `acquire` gives when a call has
one ring and every call is admitted. That is nearly every reply, and both stores recognize it where
it arrives: three words, the first of which is the stamp of the call, and `left` at least 0.
"""

CallShare: TypeAlias = "ShortReply | AcquireReply"
"""The share of one caller. It is cheaper to make than a decision: where threads share a call, one
thread makes all shares while the others wait, and then each makes its own decision.
"""


def split_share(share: CallShare, calls: int, costs: Sequence[int]) -> Sequence[CallShare]:
    """The shares that `calls` equal calls would have got one after the other. `share` is the reply
    to the one call that stood for them; `costs` is what a single call charges each ring.
    """
    if isinstance(share, AcquireReply):
        return split_reply(share, calls, costs)
    left, now_ms = share
    return [(each, now_ms) for each in _permits_left(left, calls, costs[0])]


def decisions_of_reply(
    command: Command[AcquireReply], reply: CallShare, calls: int
) -> list[Decision]:
    """The decisions on `calls` calls that one call stood for. They are those on each of
    `split_share`, and cost less, because what the calls have in common is done once.
    """
    if isinstance(reply, AcquireReply):
        costs = [charge.cost for charge in command.charges]
        return [decision_of(command, each, "store") for each in split_reply(reply, calls, costs)]
    left, now_ms = reply
    reset_ms = expires_in_ms(command.charges[0].limit, now_ms)
    return [
        admitted_decision(command, 0, each, reset_ms, now_ms, "store")
        for each in _permits_left(left, calls, command.charges[0].cost)
    ]


def _permits_left(left: int, calls: int, cost: int) -> range:
    """The permits left after each of the calls, of which the last one leaves `left`."""
    return range(left + cost * (calls - 1), left - 1, -cost)


_MIN_ROUND_TRIPS = 3
"""Calls are shared only if so many round trips fit into the timeout: a caller that joins waits for
the rest of the call in flight, and then for its own.
"""


MakeCall: TypeAlias = "Callable[[Acquire, float, float], CallShare]"
"""Makes one script call of a command; takes its start and its deadline (monotonic seconds)."""


class InFlightCall:
    """A call of one key that a thread makes, or is about to make.

    Calls are told apart by identity, because two of them may have equal deadlines.
    """

    __slots__ = ("deadline", "next_group")

    def __init__(self, deadline: float) -> None:
        self.deadline = deadline
        self.next_group: CallGroup | None = None
        """The callers that wait until this call ends."""


class GroupMember:
    """One caller in a group."""

    __slots__ = ("_failure", "_share", "_woken", "call", "group")

    def __init__(self, call: InFlightCall) -> None:
        self.call = call
        """The call that it makes if it becomes the leader."""
        self.group: CallGroup | None = None
        """None until it has joined one."""
        self._woken: queue.SimpleQueue[None] = queue.SimpleQueue()
        self._share: CallShare | None = None
        self._failure: DistwindowError | None = None

    def wait(self, now: float) -> bool:
        """Wait to be woken, as the leader or with a result; False if the deadline came first."""
        return take_token(self._woken, self.call.deadline - now)

    def wake(self) -> None:
        """Wake the waiter. Idempotent."""
        self._woken.put(None)

    def set_share(self, share: CallShare | None, failure: DistwindowError | None = None) -> None:
        """Set its share, or why it gets none; only the first of these calls has an effect."""
        if self._share is None and self._failure is None:
            self._share, self._failure = share, failure

    def share(self) -> CallShare:
        """Its share, once that has been set; raise what the shared call failed with."""
        if self._failure is not None:
            # A copy: one exception raised in several threads would mix their tracebacks.
            raise copy.copy(self._failure) from self._failure
        assert self._share is not None
        return self._share


class CallGroup:
    """Callers that wait until the call in flight ends, and then are the members of one call.

    Joining, leaving and closing happen under the lock of `CallSharing`.
    """

    __slots__ = ("_shares", "_waiting", "leader", "members", "sent")

    def __init__(self) -> None:
        self._waiting: list[GroupMember] = []
        self.members: list[GroupMember] = []
        """The callers that the group's call is made for, in the order in which they joined."""
        self.leader: GroupMember | None = None
        """The first member, which makes the call."""
        self.sent = False
        """True once the leader has begun to send."""
        self._shares: Sequence[CallShare] = ()
        """One share for each of `members`, once the reply has come."""

    def join(self, waiter: GroupMember) -> None:
        """Add a caller."""
        waiter.group = self  # first, so that a caller that is interrupted here leaves the group
        self._waiting.append(waiter)

    def leave(self, waiter: GroupMember) -> bool:
        """Remove a caller that waits no longer; True if its call was surely not sent."""
        if waiter in self._waiting:
            self._waiting.remove(waiter)
            return True
        return not self.sent

    def close(self) -> GroupMember | None:
        """Take no further callers, and return the leader; None if nobody waits. Idempotent."""
        if self.leader is None and self._waiting:
            self.members, self._waiting = self._waiting, []
            self.leader = self.members[0]
        return self.leader

    def distribute(self, shares: Sequence[CallShare]) -> None:
        """Give each member its share, and wake it."""
        self._shares = shares
        self._distribute()

    def _distribute(self) -> None:
        for waiter, share in zip(self.members, self._shares, strict=True):
            waiter.set_share(share)
        self._wake()

    def fail(self, exc: BaseException | None) -> None:
        """End the group's call for every member that has no share: with `exc`, or None if the
        leader's deadline came first. Each of them was charged at most once.

        If the leader was interrupted while it distributed the shares, the members get them here.
        """
        if self._shares:
            self._distribute()
            return
        if isinstance(exc, DistwindowError):
            failure = exc
        elif self.sent:
            failure = StoreUnavailable(
                "the thread that made the shared call for this one was interrupted; the outcome "
                "of the call is unknown",
                charged=None,
            )
        else:
            failure = StoreUnavailable(
                "the thread that was making the shared call failed before sending it; the call "
                "was surely not executed"
            )
        for waiter in self.members:
            waiter.set_share(None, failure)
        self._wake()

    def _wake(self) -> None:
        for waiter in self.members:
            if waiter is not self.leader:
                waiter.wake()


class CallSharing:
    """The calls in flight of one store, by command, and the groups that wait behind them."""

    def __init__(self, timeout: float, monotonic: Callable[[], float]) -> None:
        self._timeout = timeout
        self._monotonic = monotonic
        self._lock = threading.RLock()
        self._in_flight: dict[Acquire, InFlightCall] = {}
        self.round_trip_s = 0.0
        """Seconds that the last call took."""

    def call(
        self, command: Acquire, began: float, deadline: float, make_call: MakeCall
    ) -> CallShare:
        """Make the call, alone or in a group, and return this caller's share. `began` is now."""
        if (
            command.write_limit
            or self.round_trip_s > self._timeout / _MIN_ROUND_TRIPS
            or deadline - began < self.round_trip_s * 2
        ):
            share = make_call(command, began, deadline)
            self.round_trip_s = self._monotonic() - began
            return share
        call = InFlightCall(deadline)
        waiter: GroupMember | None = None
        try:
            with self._lock:
                in_flight = self._in_flight.get(command)
                if in_flight is None:
                    self._in_flight[command] = call
            if in_flight is not None:
                waiter = GroupMember(call)
                if not self._join(command, waiter, began):
                    waiter = None
            if waiter is None:
                return make_call(command, began, deadline)
            return self._wait_for_share(command, waiter, make_call)
        except BaseException as exc:  # raised by a signal handler, too: others may wait for it
            if waiter is not None and waiter.group is not None:
                self._leave(command, waiter, exc)
            raise
        finally:
            if waiter is None or waiter.group is None:
                self._end_call(command, call)

    def _join(self, command: Acquire, waiter: GroupMember, now: float) -> bool:
        """Join the group behind the call in flight. False if there is no such call any more, or its
        deadline has passed: then the waiter's own call is the one in flight.
        """
        with self._lock:
            in_flight = self._in_flight.get(command)
            if in_flight is None or now > in_flight.deadline:
                self._in_flight[command] = waiter.call
                return False
            if in_flight.next_group is None:
                in_flight.next_group = CallGroup()
            in_flight.next_group.join(waiter)
            return True

    def _wait_for_share(
        self, command: Acquire, waiter: GroupMember, make_call: MakeCall
    ) -> CallShare:
        """Wait in a group; then either lead it, or take the share that its leader has set."""
        group = waiter.group
        assert group is not None
        if waiter.wait(self._monotonic()):
            if group.leader is waiter:
                self._lead(command, group, waiter.call, make_call)
            return waiter.share()
        raise timed_out("the store", self._timeout, sent=not self._leave(command, waiter, None))

    def _lead(
        self, command: Acquire, group: CallGroup, call: InFlightCall, make_call: MakeCall
    ) -> None:
        """Make the call of a closed group, and distribute the shares."""
        began = self._monotonic()
        if began >= call.deadline:
            raise timed_out("the store", self._timeout, sent=False)
        calls = len(group.members)
        combined = command.combined(calls)
        group.sent = True
        share = make_call(combined, began, call.deadline)
        costs = [charge.cost for charge in command.charges]
        group.distribute(split_share(share, calls, costs))
        self._end_call(command, call)

    def _leave(self, command: Acquire, waiter: GroupMember, why: BaseException | None) -> bool:
        """Remove a waiter that ends without a share; True if its call was surely not sent. If it is
        the leader, another member leads, or the group's call ends here.
        """
        group = waiter.group
        assert group is not None
        with self._lock:
            unsent = group.leave(waiter)
            next_leader = self._replace_leader(command, waiter)
        if next_leader is not None:
            next_leader.wake()
        elif group.leader is waiter:
            group.fail(why)
            self._end_call(command, waiter.call)
        return unsent

    def _replace_leader(self, command: Acquire, leader: GroupMember) -> GroupMember | None:
        """Let the next member lead for one that has not sent; None if there is none, or no need."""
        group, call = leader.group, leader.call
        assert group is not None
        if group.leader is not leader or group.sent or len(group.members) < 2:
            return None
        if self._in_flight.get(command) is not call:
            return None
        next_leader = group.members[1]
        next_leader.call.next_group = call.next_group
        self._in_flight[command] = next_leader.call
        del group.members[0]
        group.leader = next_leader
        return next_leader

    def _end_call(self, command: Acquire, call: InFlightCall) -> None:
        """The call has ended: close the group that waits for it, and wake its leader. Nothing
        happens if another call has taken the place of this one.
        """
        with self._lock:
            if self._in_flight.get(command) is not call:
                return
            leader = None if call.next_group is None else call.next_group.close()
            if leader is None:
                del self._in_flight[command]
                return
            self._in_flight[command] = leader.call
            leader.wake()


# --------------------------------------------------------------------------------------------------
#
# A call goes through `decide`, `_make_call` and one exchange on the thread's connection; where
# there are many threads, or the thread has no connection yet, `CallSharing.call` is between the
# first two. What is no reply that decides the call goes through `execute_once`.

Reply = TypeVar("Reply")
T = TypeVar("T")

_MAX_PIPELINE = 256
"""Commands of an exchange that are written at once: all of them have to be answered in time."""


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
            if isinstance(share, AcquireReply):
                return decision_of(command, share, "store")
            left, now_ms = share
            return admitted_decision(command, 0, left, None, now_ms, "store")
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
            began = self._monotonic()
            if deadline is None:
                deadline = began + self._timeout
            connection = this_thread.connections.get(self._only_node)
            connection = connection or self._connection_if_known(command)
            if connection is None or began >= deadline:
                return self._execute_alone(command, deadline)
            # What `execute_once` does, as long as nothing goes wrong.
            clock = connection.node.clock
            stamp = clock.new_stamp(deadline)
            raw = connection.exchange(command.frame(stamp), began, deadline)
            if type(raw) is list and len(raw) >= 3 and raw[0] == stamp and raw[1] != PAST_DEADLINE:
                now = self._monotonic()
                if command.writes:
                    clock.answered_at = now
                else:
                    clock.read_at = now
                clock.last_reply = raw[2], now
                return command.reply(raw)
            sent = Request(connection.node, command, deadline, stamp=stamp)
            return self._execute_alone(command, deadline, sent, raw)
        except BaseException as exc:  # as in `decide`
            self._count_unknown(exc)
            raise
        finally:
            this_thread.call_in_progress = False

    def execute_many(
        self, commands: Sequence[Command[Any]], deadline: float | None = None
    ) -> list[Any]:
        """One write and one wait for `_MAX_PIPELINE` commands of a node, each in the timeout."""
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
        """Make one script call. On an open connection, with a reply that decides it, this is all
        that a call costs; `execute_once` takes whatever else comes.
        """
        connection = self._connections.this_thread.connections.get(self._only_node)
        connection = connection or self._connection_if_known(command)
        if connection is None:
            return self._execute_alone(command, deadline)
        clock = connection.node.clock
        stamp = clock.new_stamp(deadline)
        raw = connection.exchange(command.frame(stamp), began, deadline)
        # A short reply is an admission, unless the call came past its deadline.
        if (
            type(raw) is list
            and len(raw) >= 3
            and raw[0] == stamp
            and (raw[1] >= 0 or len(raw) > 3)
        ):
            clock.answered_at = now = self._monotonic()
            clock.last_reply = now_ms, _ = raw[2], now
            self._call_sharing.round_trip_s = now - began
            return (raw[1], now_ms) if len(raw) == 3 else command.reply(raw)
        sent = Request(connection.node, command, deadline, stamp=stamp)
        return self._execute_alone(command, deadline, sent, raw)

    def _connection_if_known(self, command: Command[Any]) -> BlockingConnection | None:
        """Return this thread's connection for a call that needs no `execute_once` as long as
        nothing goes wrong; None for one that does. It may not be open. (Callers look for that
        to the only server themselves, which spares most calls this one.)
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
        if raw is NOT_OPEN:
            sent = raw = None
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
                _refresh_if_due(topology)
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
        for number, command, request, raw in sorted(answers, key=_is_error):
            if isinstance(raw, DistwindowError):
                replies[number] = raw
                continue
            try:
                replies[number] = self._execute_alone(command, deadline, request, raw)
            except DistwindowError as exc:
                replies[number] = exc
        return not isinstance(raws[-1], (NoReply, DistwindowError))

    def _execute_nested(self, command: Command[Reply]) -> Reply:
        """Execute a command for a signal handler that has interrupted a call of this thread."""
        try:
            deadline = self._monotonic() + self._timeout
            return self._nested(lambda: self._execute_alone(command, deadline))
        except BaseException as exc:  # as in `decide`
            self._count_unknown(exc)
            raise

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
        if self._settings.endpoints:  # of a cluster, whose map another limiter may have read
            topology = self._make_topology()
            if isinstance(topology, ClusterTopology) and topology.map.ranges:
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
            self._map.on_connect_failed("reading its map timed out", began_at, slow=True)
            raise timed_out("the store", self._timeout, sent=False) from None
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


def _is_error(answer: tuple[int, Command[Any], Request, RawReply | DistwindowError]) -> bool:
    return isinstance(answer[3], Exception)


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
