"""Callers of one key that gather while a call for it is away, to go together as one.

A group's first member leads: it makes the call and deals the parts out, in the order in which the
members came. Joining, quitting and going happen under the store's lock.
"""

from __future__ import annotations

import copy
from _thread import allocate_lock
from collections.abc import Sequence
from typing import TypeAlias

from ...core.errors import DistwindowError, StoreUnavailable
from ...wire.command import Verdict

Part: TypeAlias = "tuple[int, int] | Verdict"
"""What one caller gets: (left, now_ms) of the usual reply, or a verdict. Kept small because one
thread deals for all, and each makes its decision itself.
"""


class Member:
    """One caller in a group."""

    __slots__ = ("_awake", "_failure", "_part", "deadline", "group")

    def __init__(self, group: Group, deadline: float) -> None:
        self.group = group
        self.deadline = deadline
        # A bare lock, held until woken: an Event would cost three times as much.
        self._awake = allocate_lock()
        self._awake.acquire()
        self._part: Part | None = None
        self._failure: DistwindowError | None = None

    def wait(self, now: float) -> bool:
        """Until it is woken, as the leader or with a result; False when its deadline came first."""
        return self._awake.acquire(timeout=max(0.0, self.deadline - now))

    def wake(self) -> None:
        self._awake.release()

    def give(self, part: Part | None, failure: DistwindowError | None = None) -> None:
        self._part, self._failure = part, failure

    def part(self) -> Part:
        """Its part, once it has been dealt; raises what the shared call failed with."""
        if self._failure is not None:
            # A copy: one exception raised in several threads would mix their tracebacks.
            raise copy.copy(self._failure) from self._failure
        assert self._part is not None
        return self._part


class Group:
    """Members that are waiting for the call ahead of them to return, then one call."""

    __slots__ = ("_waiting", "gone", "leader")

    def __init__(self) -> None:
        self._waiting: list[Member] = []
        self.gone: list[Member] = []
        """Who went, in order."""
        self.leader: Member | None = None
        """The first of them, who makes the call."""

    def join(self, deadline: float) -> Member:
        member = Member(self, deadline)
        self._waiting.append(member)
        return member

    def quit(self, member: Member) -> bool:
        """The member has waited long enough; True when it had not gone yet, so surely not asked."""
        if member in self._waiting:
            self._waiting.remove(member)
            return True
        if member is self.leader:
            # It was made leader in the moment its time ran out, and nobody else will make the call.
            self.fail(StoreUnavailable("the deadline of the shared call had passed"))
            return True
        return False

    def go(self) -> bool:
        """Send the group off under its first member; False when nobody is left in it."""
        self.gone, self._waiting = self._waiting, []
        if not self.gone:
            return False
        self.leader = self.gone[0]
        self.leader.wake()
        return True

    def deal(self, parts: Sequence[Part]) -> None:
        """Hand each member its part."""
        for member, part in zip(self.gone, parts, strict=True):
            member.give(part)
        self._wake()

    def fail(self, exc: BaseException) -> None:
        """The shared call failed: for everyone in it, at most once charged."""
        if isinstance(exc, DistwindowError):
            failure = exc
        else:
            failure = StoreUnavailable(
                "the call that carried this one was interrupted; its outcome is unknown",
                charged=None,
            )
        for member in self.gone:
            member.give(None, failure)
        self._wake()

    def _wake(self) -> None:
        for member in self.gone:
            if member is not self.leader:
                member.wake()
