"""The operations of concurrency limits: ask for a slot, wait for one, give one back.

A caller that was refused waits in the queue of its process, where the head asks again: when a slot
of this process was freed, when the first deadline comes, and after a pause. With each question it
tells the store how long the first waiters of its process have waited. These are the places of the
process in the line for the slots of the key, which is ordered by arrival: a caller gets a slot when
fewer places are before its own than slots are free.

    the caller                      asks                     if refused
    `try_hold`, or `timeout=0`      after all places         changes nothing
    the first of its process        after all places         takes a place
    waits, and others before it     not
    waits as the head               with the arrivals of     the first MAX_PLACES waiters of the
                                    the first waiters        process have places; if granted, those
                                                             behind it
    gives up, and others wait       the next head asks
    gives up, and none waits        the worker asks for      the process has no place
                                    nothing (`nobody_waits`)

A process that has not asked for PLACE_MS has no place any more, until it asks again: so one that is
killed, and a place of which the removal was lost, keep a free slot from others for no longer.

The pause is a part of the time since a slot was granted or renewed the last time, more for those
who are further back in the line: so a slot stays free for a small part of the time between two
grants, and a line costs the store about as many questions for each grant however long that takes.
It is shortened at random by up to a half, so that processes do not ask together.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace

from ..errors import ConcurrencyExceeded, DistwindowError, StoreError, StoreTimeout
from ..runtime.steps import Operation, Sleep, send
from ..waiting.waiting import Waiter, WaitQueues
from .claim import SlotClaim
from .commands import MAX_PLACES, Free, Hold, HolderName, Holders, HoldReply
from .held import HeldSlots
from .stats import ConcurrencyStats, Holder

MIN_POLL_S = 0.005
MAX_POLL_S = 0.2
"""Seconds between two questions of a waiting process."""
_POLL_SHARE = 0.25
"""The pause of the first in the line, as a part of the time since a slot was granted. A slot so
stays free for about a tenth of that.
"""
_RETRY_S = 0.01
"""Seconds before a hold whose reply was lost is sent again, the first time; then it doubles."""


class SlotOperations:
    """Operations of a `Concurrency` on its store. `timeout` (seconds) is the time that the store
    has to answer: a request that gets no reply within half of it is sent again.
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

    def try_hold(self, claim: SlotClaim, waiter: Waiter | None = None) -> Operation[HoldReply]:
        """Ask once for a slot. Nobody must overtake those that wait in this process: while there
        are some, this is refused. `waiter`: of a caller that waits if it is refused.
        """
        if self._queues.count(claim.name):
            return HoldReply(False, claim.command.limit, 0, 0)
        return (yield from self._ask(claim, waiter))

    def wait_for_slot(
        self, claim: SlotClaim, waiter: Waiter, refused: HoldReply | None
    ) -> Operation[HoldReply]:
        """Ask as the head of the queue, until a slot is granted. `refused` is the reply to a hold
        that was sent just before; None has it asked at once, as the head before may have left one.

        Raises `ConcurrencyExceeded` when the waiter's timeout is over.
        """
        reply = refused
        while True:
            if waiter.remaining_s == 0.0:
                raise exceeded(claim, reply or HoldReply(False, claim.command.limit, 0, 0))
            if reply is None or reply is not refused:
                reply = yield from self._ask(claim, waiter, is_head=True)
                if reply.granted:
                    return reply
            refused = None
            seconds = (reply.ahead + 1) * reply.age_ms / 1000 * _POLL_SHARE
            seconds = min(max(seconds, MIN_POLL_S), MAX_POLL_S) * (1 - self._jitter() / 2)
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

    def _ask(
        self, claim: SlotClaim, waiter: Waiter | None, *, is_head: bool = False
    ) -> Operation[HoldReply]:
        """Send the hold, and again if its reply is lost, until the timeout of `waiter` is over, and
        for as long as the store has to answer: to hold a slot that is held already only extends it.
        """
        patience = None if waiter is None else waiter.remaining_s
        give_up_at = self._monotonic() + max(self._timeout, patience or 0.0)
        pause = _RETRY_S
        while True:
            self._held.hold_call()
            sent_at = self._monotonic()
            claim.on_send(sent_at + self.request_timeout)
            try:
                reply: HoldReply = yield _with_places(claim.command, waiter, is_head=is_head)
            except DistwindowError as exc:
                claim.on_failure(exc, sent_at)
                # A server that is silent may answer the next request; one that refuses may not.
                may_answer = isinstance(exc, StoreTimeout) or (
                    isinstance(exc, StoreError) and exc.charged is None
                )
                if not may_answer or self._monotonic() + pause >= give_up_at:
                    raise
            else:
                claim.on_reply(reply, sent_at)
                return reply
            yield Sleep(pause)
            pause = min(2 * pause, MAX_POLL_S)


def _with_places(command: Hold, waiter: Waiter | None, *, is_head: bool) -> Hold:
    """Return the command with which this waiter asks."""
    if waiter is None or not waiter.may_wait:
        return command
    waited_ms = waiter.first_waited_ms(MAX_PLACES) if is_head else (waiter.waited_ms,)
    return replace(command, is_head=is_head, waited_ms=waited_ms)


def exceeded(claim: SlotClaim, reply: HoldReply) -> ConcurrencyExceeded:
    """Return the error of a caller whose last reply was this refusal.

    Its `retry_after` is an estimate: whoever asks at any moment finds that half of the time between
    two grants is over. Each place before the caller takes one grant. Holders that died are gone
    after `ends_ms`.
    """
    seconds = (2 * reply.ahead + 1) * reply.age_ms / 1000 if reply.ends_ms else MAX_POLL_S
    longest = reply.ends_ms / 1000 or MAX_POLL_S
    seconds = min(max(seconds, MIN_POLL_S), longest)
    return ConcurrencyExceeded(claim.key, claim.command.limit, reply.held, seconds)
