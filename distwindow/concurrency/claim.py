"""One holder's claim to a slot, from the first request until the store has surely no trace of it.

The name of a holder is in the store's set at most once, so to hold, to renew and to free may be
sent again. An outcome that is unknown is therefore asked for again, and what cannot be asked any
more is freed; no slot is given up on, and none is assumed.

    state    the holder in the store     the block               the worker
    new      surely absent               has not begun           -
    asking   unknown, or surely absent   has not begun           -
    held     present until `expires_at`  runs                    renews it
    lost     unknown                     runs, `lost` is true    -
    ended    unknown                     has ended, or never     frees it: again, until a reply is
                                         will begin              final or its time is over
    gone     surely absent               has ended               -

    from    event                                           to
    new     the caller gives up                             gone
    new     a hold is sent                                  asking
    asking  its reply: granted                              held
    asking  its reply: refused                              asking
    asking  its reply is lost                               asking, unsettled
    asking  the caller gives up, all replies refused        gone
    asking  the caller gives up, one is unsettled           ended
    held    a renewal is acknowledged                       held
    held    a renewal finds it absent                       lost
    held    `expires_at` comes                              lost
    held    the block ends                                  ended
    held    its object is garbage-collected                 ended
    lost    the block ends                                  ended
    ended   a free is acknowledged                          gone
    ended   a free is acknowledged, a hold may still come   ended
    ended   every deadline that it may have is over         gone
    held    the process forks, in the child                 gone

A caller gives up when its timeout is over, when the store fails, and when it is cancelled or
interrupted, at whatever line. A hold whose reply was lost may still be on its way: the server
executes it up to the deadline in its stamp. So a free is final only if all holds were answered, or
if it was sent after the last of these deadlines. `expires_at` counts from before the request was
sent, and allows for a drift between the clocks, so it comes before the deadline in the store.

The block's thread sets `ended`, and the worker sets `lost`: neither undoes what the other did.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from ..errors import DistwindowError, StoreError
from ..ring.key import AnyKey
from .commands import Hold, HoldReply

MAX_CLOCK_DRIFT = 0.1
"""The part of a time by which the clock here may be slower than the store's, as for leases."""
CLOCK_MARGIN_S = 0.001
"""The store's clock is read in whole ms."""
_NO_TIME = -math.inf


class SlotClaim:
    """The state of one holder. Times are monotonic seconds."""

    __slots__ = (
        "_deadline",
        "_may_be_stored",
        "_may_have_place",
        "_unsettled",
        "command",
        "ended",
        "extended_at",
        "frees",
        "key",
        "lost",
        "next_due_at",
        "owner",
        "process",
        "ttl_s",
    )

    def __init__(self, key: AnyKey, command: Hold, process: str = "") -> None:
        self.key = key
        self.command = command
        self.process = process
        """The part of the holder's name that this process alone has: a child has another."""
        self.ttl_s = command.ttl_ms / 1000
        self.extended_at = _NO_TIME
        """When the last request was sent that gave or extended the slot; at first long ago."""
        self.lost = ""
        """Why the slot was lost; empty if it was not."""
        self.ended = False
        self.frees = 0
        """The number of times that it was freed without a final reply."""
        self.next_due_at = math.inf
        """When the worker has to renew or to free it."""
        self.owner: Callable[[], object] | None = None
        """A weak reference to the object by which the caller holds it."""
        self._may_be_stored = False
        self._may_have_place = False
        self._unsettled = 0
        """Holds whose outcome is unknown."""
        self._deadline = _NO_TIME
        """The last time at which the server may execute one of them."""

    @property
    def name(self) -> bytes:
        """The Redis key of the slots."""
        return self.command.slots_name

    @property
    def holder(self) -> bytes:
        """The holder's name in the store."""
        return self.command.holder

    @property
    def deadline(self) -> float:
        """The deadline of the hold that was sent last."""
        return self._deadline

    @property
    def expires_at(self) -> float:
        """Until when it surely has its slot."""
        return self.extended_at + self.ttl_s / (1 + MAX_CLOCK_DRIFT) - CLOCK_MARGIN_S

    @property
    def is_dropped(self) -> bool:
        """True if the object by which the caller held it was garbage-collected."""
        return self.owner is not None and self.owner() is None

    @property
    def is_gone(self) -> bool:
        """True once the caller has given up or the block has ended, and the store surely has no
        trace of it.
        """
        return self.ended and not self._may_be_stored

    @property
    def may_have_place(self) -> bool:
        """False if each hold that was sent surely was not executed: then the store knows no place
        of this process by it. A claim that has sent none may be named by that of another waiter.
        """
        was_sent = self._deadline != _NO_TIME
        return self._may_have_place or self._unsettled > 0 or not was_sent

    @property
    def is_renewed(self) -> bool:
        """True if the worker renews it."""
        return self.extended_at != _NO_TIME and not self.ended and not self.lost

    @property
    def state(self) -> str:
        """The state by the table above."""
        if self.is_gone:
            return "gone"
        if self.ended:
            return "ended"
        if self.extended_at != _NO_TIME:
            return "lost" if self.lost else "held"
        return "asking" if self._deadline != _NO_TIME else "new"

    def on_send(self, deadline: float) -> None:
        """Note that a hold is sent now, which the server may execute until `deadline`."""
        self._deadline = max(self._deadline, deadline)
        self._unsettled += 1
        self._may_be_stored = True

    def on_reply(self, reply: HoldReply, sent_at: float) -> None:
        """Take the reply to a hold."""
        self._unsettled -= 1
        self._may_have_place = True
        if reply.granted:
            self.extended_at = sent_at
        else:
            self._settle(sent_at)

    def on_failure(self, exc: DistwindowError, sent_at: float) -> None:
        """Take the failure of a hold. Its outcome is unknown only if `.charged` is None."""
        if not isinstance(exc, StoreError) or exc.charged is False:
            self._unsettled -= 1
            self._settle(sent_at)

    def on_renewed(self, sent_at: float) -> None:
        """Take an acknowledged renewal."""
        self.extended_at = max(self.extended_at, sent_at)

    def on_freed(self, sent_at: float) -> None:
        """Take an acknowledged free."""
        if self._is_final(sent_at):
            self._may_be_stored = False

    def end(self) -> None:
        """Note that the block has ended, or that it never will begin."""
        self.ended = True

    def lose(self, why: str) -> bool:
        """Note that the slot is lost. True if that is new."""
        if self.lost or self.ended:
            return False
        self.lost = why
        return True

    def disown(self) -> None:
        """In a forked child: the slot is the parent's."""
        self.lost = "the process was forked, and the parent has it"
        self._may_be_stored = False
        self.ended = True

    def expire(self, now: float) -> bool:
        """Note that the deadlines in the store are over, if they are. True if so."""
        if now < max(self.extended_at, self._deadline) + self.ttl_s * (1 + MAX_CLOCK_DRIFT):
            return False
        self._may_be_stored = False
        return True

    def free_again_at(self, now: float, seconds: float) -> float:
        """Return when to free it again: a free that was acknowledged may be final later."""
        return self._deadline if now < self._deadline else now + seconds

    def _settle(self, sent_at: float) -> None:
        if self._is_final(sent_at):
            self._may_be_stored = False

    def _is_final(self, sent_at: float) -> bool:
        """True if no hold can be executed after a request that was sent at `sent_at`."""
        return self._unsettled <= 0 or sent_at >= self._deadline

    def __repr__(self) -> str:
        return f"SlotClaim({self.holder!r}, {self.state})"
