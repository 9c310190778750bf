"""Callers of one key that gather while a call for it is away, to go together as one.

A group's first member leads: it makes the call and deals the parts out, in the order in which the
members came. Joining, quitting and going happen under the store's lock.

An exception out of a signal handler may end any caller anywhere. So what ends a group can be done
twice, and does the second time what the first left undone.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from queue import Empty, SimpleQueue
from typing import TypeAlias

from ....core.errors import DistwindowError, StoreUnavailable
from ....core.interrupts import is_interruption
from ....protocol.commands import Verdict

Part: TypeAlias = "tuple[int, int] | Verdict"
"""What one caller gets: (left, now_ms) of the usual reply, or a verdict. Kept small because one
thread deals for all, and each makes its decision itself.
"""


class Member:
    """One caller in a group."""

    __slots__ = ("_failure", "_part", "_woken", "deadline", "group")

    def __init__(self, deadline: float) -> None:
        self.group: Group | None = None
        """None until it has joined one."""
        self.deadline = deadline
        self._woken: SimpleQueue[None] = SimpleQueue()
        self._part: Part | None = None
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

    def give(self, part: Part | None, failure: DistwindowError | None = None) -> None:
        """Its part, or why there is none; the first one counts."""
        if self._part is None and self._failure is None:
            self._part, self._failure = part, failure

    def part(self) -> Part:
        """Its part, once it has been dealt; raises what the shared call failed with."""
        if self._failure is not None:
            # A copy: one exception raised in several threads would mix their tracebacks.
            raise copy.copy(self._failure) from self._failure
        assert self._part is not None
        return self._part


class Group:
    """Members that are waiting for the call ahead of them to return, then one call.

    `ahead` is the deadline of that call, and its very object stands for it: two calls may have
    equal deadlines, but not the same one.
    """

    __slots__ = ("_parts", "_waiting", "ahead", "asked", "gone", "leader")

    def __init__(self, ahead: float) -> None:
        self.ahead = ahead
        self._waiting: list[Member] = []
        self.gone: list[Member] = []
        """Who went, in order."""
        self.leader: Member | None = None
        """The first of them, who makes the call."""
        self.asked = False
        """The call is being made, or was."""
        self._parts: Sequence[Part] = ()
        """What the call has brought, one part for each of `gone`."""

    def join(self, member: Member) -> None:
        member.group = self  # first, so that a member that is interrupted here can leave
        self._waiting.append(member)

    def quit(self, member: Member) -> bool:
        """The member waits no longer; True when it has surely not been asked for."""
        if member in self._waiting:
            self._waiting.remove(member)
            return True
        return not self.asked

    def go(self) -> Member | None:
        """Send the group off under its first member; None when nobody is left in it."""
        if self.leader is None and self._waiting:
            self.gone, self._waiting = self._waiting, []
            self.leader = self.gone[0]
        return self.leader

    def deal(self, parts: Sequence[Part]) -> None:
        """Hand each member its part."""
        self._parts = parts
        self._deal()

    def _deal(self) -> None:
        for member, part in zip(self.gone, self._parts, strict=True):
            member.give(part)
        self._wake()

    def fail(self, exc: BaseException | None) -> None:
        """The shared call failed, with `exc` or because its leader's deadline came first: for all
        who have no part yet, at most once charged. Where the reply has come and the leader was
        interrupted as it dealt, the others get their parts.
        """
        if self._parts:
            self._deal()
            return
        if isinstance(exc, DistwindowError):
            failure = exc
        elif self.asked:
            failure = StoreUnavailable(
                "the call that carried this one was interrupted; its outcome is unknown",
                charged=None,
            )
        else:
            failure = StoreUnavailable("the caller that was to ask for this one could not")
        for member in self.gone:
            member.give(None, failure)
        self._wake()

    def _wake(self) -> None:
        for member in self.gone:
            if member is not self.leader:
                member.wake()
