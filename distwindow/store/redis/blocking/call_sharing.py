"""Callers of one key that gather while a call for it is away, to go together as one.

A group's first member leads: it makes the call and deals the parts out, in the order in which the
members came. Joining, quitting and going happen under the store's lock.

An exception out of a signal handler may end any caller anywhere. So what ends a group can be done
twice, and does the second time what the first left undone.
"""

from __future__ import annotations

import copy
import queue
from collections.abc import Sequence
from queue import Empty
from typing import TypeAlias

from ....core.errors import DistwindowError, StoreUnavailable
from ....core.interrupts import is_interruption
from ....protocol.replies import AcquireReply

CallShare: TypeAlias = "tuple[int, int] | AcquireReply"
"""What one caller gets: (left, now_ms) of the usual reply, or a verdict. Kept small because one
thread deals for all, and each makes its decision itself.
"""


class Waiter:
    """One caller in a group."""

    __slots__ = ("_failure", "_share", "_woken", "deadline", "group")

    def __init__(self, deadline: float) -> None:
        self.group: CallGroup | None = None
        """None until it has joined one."""
        self.deadline = deadline
        self._woken: queue.SimpleQueue[None] = queue.SimpleQueue()
        self._share: CallShare | None = None
        self._failure: DistwindowError | None = None

    def wait(self, now: float) -> bool:
        """Until it is woken, as the leader or with a result; False when its deadline came first."""
        try:
            self._woken.get(True, max(0.0, self.deadline - now))
        except Empty as exc:
            if is_interruption(exc):
                raise
            return False
        return True

    def wake(self) -> None:
        """Harmless when repeated."""
        self._woken.put(None)

    def set_share(self, share: CallShare | None, failure: DistwindowError | None = None) -> None:
        """Its part, or why there is none; the first one counts."""
        if self._share is None and self._failure is None:
            self._share, self._failure = share, failure

    def share(self) -> CallShare:
        """Its part, once it has been dealt; raises what the shared call failed with."""
        if self._failure is not None:
            # A copy: one exception raised in several threads would mix their tracebacks.
            raise copy.copy(self._failure) from self._failure
        assert self._share is not None
        return self._share


class CallGroup:
    """Members that are waiting for the call ahead of them to return, then one call.

    `ahead` is the deadline of that call, and its very object stands for it: two calls may have
    equal deadlines, but not the same one.
    """

    __slots__ = ("_shares", "_waiting", "call_ahead", "leader", "members", "sent")

    def __init__(self, call_ahead: float) -> None:
        self.call_ahead = call_ahead
        self._waiting: list[Waiter] = []
        self.members: list[Waiter] = []
        """Who went, in order."""
        self.leader: Waiter | None = None
        """The first of them, who makes the call."""
        self.sent = False
        """The call is being made, or was."""
        self._shares: Sequence[CallShare] = ()
        """What the call has brought, one part for each of `gone`."""

    def join(self, waiter: Waiter) -> None:
        waiter.group = self  # first, so that a member that is interrupted here can leave
        self._waiting.append(waiter)

    def leave(self, waiter: Waiter) -> bool:
        """The member waits no longer; True when it has surely not been asked for."""
        if waiter in self._waiting:
            self._waiting.remove(waiter)
            return True
        return not self.sent

    def close(self) -> Waiter | None:
        """Send the group off under its first member; None when nobody is left in it."""
        if self.leader is None and self._waiting:
            self.members, self._waiting = self._waiting, []
            self.leader = self.members[0]
        return self.leader

    def distribute(self, shares: Sequence[CallShare]) -> None:
        """Hand each member its part."""
        self._shares = shares
        self._distribute()

    def _distribute(self) -> None:
        for waiter, share in zip(self.members, self._shares, strict=True):
            waiter.set_share(share)
        self._wake()

    def fail(self, exc: BaseException | None) -> None:
        """The shared call failed, with `exc` or because its leader's deadline came first: for all
        who have no part yet, at most once charged. Where the reply has come and the leader was
        interrupted as it dealt, the others get their parts.
        """
        if self._shares:
            self._distribute()
            return
        if isinstance(exc, DistwindowError):
            failure = exc
        elif self.sent:
            failure = StoreUnavailable(
                "the call that carried this one was interrupted; its outcome is unknown",
                charged=None,
            )
        else:
            failure = StoreUnavailable("the caller that was to ask for this one could not")
        for waiter in self.members:
            waiter.set_share(None, failure)
        self._wake()

    def _wake(self) -> None:
        for waiter in self.members:
            if waiter is not self.leader:
                waiter.wake()
