"""Calls of one key that several threads share: one script call stands for them.

Where a store has few threads, each makes its own calls once it has a connection: to wake a thread
that waits costs more than a call (`ThreadConnections.has_many_threads`). With many threads sharing
is faster, and it always saves most of the server's work.

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
from collections.abc import Callable, Sequence
from typing import TypeAlias

from ...errors import DistwindowError, StoreUnavailable
from ...ring.command import Command
from ...ring.commands import Acquire
from ...ring.decision import Decision
from ...ring.decisions import admitted_decision, decision_of
from ...ring.limit import expires_in_ms
from ...ring.replies import AcquireReply, split_reply
from ...support.locks import take_token
from .outcome import timed_out

ShortReply: TypeAlias = "tuple[int, int]"
"""`left` and `now_ms` of the reply `[stamp, left, now_ms]`, which `acquire` gives when a call has
one ring and every call is admitted. That is nearly every reply, and both stores recognize it where
it arrives: three words, the first of which is the stamp of the call, and `left` at least 0.
"""
CallShare: TypeAlias = "ShortReply | AcquireReply"
"""The share of one caller. It is cheaper to make than a decision: where threads share a call, one
thread makes all shares while the others wait, and then each makes its own decision.
"""
_MIN_ROUND_TRIPS = 3
"""Calls are shared only if so many round trips fit into the timeout: a caller that joins waits for
the rest of the call in flight, and then for its own.
"""
MakeCall: TypeAlias = "Callable[[Acquire, float, float], CallShare]"
"""Makes one script call of a command; takes its start and its deadline (monotonic seconds)."""


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
        for waiter, share in zip(self.members, shares, strict=True):
            waiter.set_share(share)
        self._wake()

    def fail(self, exc: BaseException | None) -> None:
        """End the group's call for every member that has no share: with `exc`, or None if the
        leader's deadline came first. Each of them was charged at most once.

        If the leader was interrupted while it distributed the shares, the members get them here.
        """
        if self._shares:
            self.distribute(self._shares)
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
