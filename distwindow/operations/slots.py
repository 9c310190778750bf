"""The operations of concurrency limits: ask for a slot, wait for one, give one back.

A caller that was refused waits in the queue of its process, where the head asks again: when a slot
of this process was freed, when the first deadline comes, and at the latest after LAST_POLL_S. The
pause between two questions doubles from FIRST_POLL_S, and is shortened at random by up to a half,
so that processes that began to wait together do not ask together.
"""

from __future__ import annotations

import random
from collections.abc import Callable

from ..core.errors import ConcurrencyExceeded, DistwindowError, StoreError
from ..core.slot_stats import ConcurrencyStats, Holder
from ..protocol.slot_commands import Free, HolderName, Holders, HoldReply
from .held_slots import HeldSlots
from .slot_claim import SlotClaim
from .steps import Operation, Sleep, send
from .wait_queue import Waiter, WaitQueues

FIRST_POLL_S = 0.02
LAST_POLL_S = 0.2
"""Seconds between two questions of a waiting process, the first and the longest pause."""
_RETRY_S = 0.01
"""Seconds before a hold whose reply was lost is sent again, the first time; then it doubles."""


class SlotOperations:
    """What a `Concurrency` does with its store. `timeout` (seconds) is the time that the store has
    to answer: a request that gets no reply within half of it is sent again.
    """

    def __init__(
        self,
        held: HeldSlots,
        queues: WaitQueues,
        monotonic: Callable[[], float],
        timeout: float,
        jitter: Callable[[], float] = random.random,
    ) -> None:
        """`jitter` returns numbers from 0 up to 1."""
        self._held, self._queues, self._monotonic = held, queues, monotonic
        self._timeout = timeout
        self._jitter = jitter
        self.request_timeout = timeout / 2
        """Seconds until a request counts as lost."""

    def try_hold(self, claim: SlotClaim, patience: float | None = None) -> Operation[HoldReply]:
        """Ask once for a slot. Nobody must overtake those that wait in this process: while there
        are some, this is refused. `patience`: see `_ask`.
        """
        if self._queues.count(claim.name):
            return HoldReply(False, claim.command.limit, 0, 0)
        return (yield from self._ask(claim, patience))

    def wait_for_slot(
        self, claim: SlotClaim, waiter: Waiter, refused: HoldReply | None
    ) -> Operation[HoldReply]:
        """Ask as the head of the queue, until a slot is granted. `refused` is the reply to a hold
        that was sent just before; None has it asked at once, as the head before may have left one.

        Raises `ConcurrencyExceeded` when the waiter's timeout is over.
        """
        pause, reply = FIRST_POLL_S, refused
        while True:
            if waiter.remaining_s == 0.0:
                raise exceeded(claim, reply or HoldReply(False, claim.command.limit, 0, 0))
            if reply is None or reply is not refused:
                reply = yield from self._ask(claim, waiter.remaining_s)
                if reply.granted:
                    return reply
            refused = None
            seconds = pause * (1 - self._jitter() / 2)
            pause = min(2 * pause, LAST_POLL_S)
            if reply.ends_ms > 0:
                seconds = min(seconds, reply.ends_ms / 1000)
            left = waiter.remaining_s
            yield Sleep(seconds if left is None else min(seconds, left))

    def free(self, claim: SlotClaim) -> Operation[None]:
        """Free the slot of a claim that has ended. Where that fails, the worker does it."""
        command = Free((), slots_name=claim.name, holders=(claim.holder,))
        for last in (False, True):
            sent_at = self._monotonic()
            try:
                yield from send(command)
            except DistwindowError:
                if last:
                    return
            else:
                self._held.take_free_reply(claim, sent_at)
                return

    def stats(self, claim: SlotClaim) -> Operation[ConcurrencyStats]:
        """Return who holds the slots that `claim`, which is never sent, is about."""
        reply = yield from send(Holders((), slots_name=claim.name))
        holders = []
        for member, ends_ms in reply.ends_ms.items():
            name = HolderName.parse(member)
            owner = member.decode("ascii", "backslashreplace") if name is None else name.owner
            holders.append(Holder(owner, ends_ms / 1000))
        return ConcurrencyStats(
            claim.key,
            claim.command.limit,
            len(holders),
            self._queues.count(claim.name),
            tuple(holders),
            reply.now_ms,
        )

    def _ask(self, claim: SlotClaim, patience: float | None) -> Operation[HoldReply]:
        """Send the hold, and again if its reply is lost, for `patience` seconds (None: as long as
        the store has to answer): to hold a slot that is held already only extends it.
        """
        began = self._monotonic()
        give_up_at = began + max(self._timeout, patience or 0.0)
        pause = _RETRY_S
        while True:
            self._held.hold_call()
            sent_at = self._monotonic()
            claim.on_send(sent_at + self.request_timeout)
            try:
                reply: HoldReply = yield claim.command
            except DistwindowError as exc:
                claim.on_failure(exc, sent_at)
                is_unknown = isinstance(exc, StoreError) and exc.charged is None
                if not is_unknown or self._monotonic() + pause >= give_up_at:
                    raise
            else:
                claim.on_reply(reply, sent_at)
                return reply
            yield Sleep(pause)
            pause = min(2 * pause, LAST_POLL_S)


def exceeded(claim: SlotClaim, reply: HoldReply) -> ConcurrencyExceeded:
    """Return the error of a caller whose last reply was this refusal."""
    return ConcurrencyExceeded(claim.key, claim.command.limit, reply.held, reply.ends_ms / 1000)
