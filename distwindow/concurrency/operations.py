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
from dataclasses import dataclass, replace

from ..errors import ConcurrencyExceeded, DistwindowError, StoreError, StoreTimeout
from ..ring.key import AnyKey
from ..runtime.steps import Operation, Sleep, send
from ..support.backoff import Backoff
from ..waiting.waiting import Waiter, WaitQueues
from .commands import MAX_PLACES, HolderName, Holders, HoldReply
from .held import HeldSlots, SlotClaim


@dataclass(frozen=True)
class Holder:
    """One holder of a slot."""

    name: str
    """The `name` of its `Concurrency`; by default host and process id."""
    expires_in: float
    """Seconds until its slot is free, unless it is renewed."""


@dataclass(frozen=True)
class ConcurrencyStats:
    """The slots of one key."""

    key: AnyKey
    limit: int
    held: int
    """Slots that are held now, by all processes; more than `limit` where that was lowered."""
    waiting: int
    """Callers that wait for a slot in this process."""
    holders: tuple[Holder, ...]
    """The first deadline first."""
    now_ms: int
    """The store's time, ms since the epoch."""


MIN_POLL_S = 0.005
MAX_POLL_S = 0.2
"""Seconds between two questions of a waiting process."""
_POLL_SHARE = 0.25
"""The pause of the first in the line, as a part of the time since a slot was granted. A slot so
stays free for about a tenth of that.
"""
_RETRIES = Backoff(0.01, MAX_POLL_S)
"""The delays before a hold whose reply was lost is sent again."""


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
        self.held, self.queues, self._monotonic = held, queues, monotonic
        self._timeout = timeout
        self._jitter = jitter
        self.request_timeout = timeout / 2
        """Seconds until a request counts as lost."""

    def ask_again(
        self, claim: SlotClaim, failure: DistwindowError, timeout: float | None, began_at: float
    ) -> Operation[HoldReply] | None:
        """Ask for a slot again, after the first hold has ended with `failure`; None if that would
        be in vain. `timeout`, `began_at`: those of a caller that waits if it is refused.
        """
        give_up_at = began_at + max(self._timeout, timeout or 0.0)
        if not self._may_ask_again(failure, _RETRIES.first_s, give_up_at):
            return None
        return self._ask(claim, give_up_at, began_at=began_at, failures=1)

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
                give_up_at = self._monotonic() + max(self._timeout, waiter.remaining_s or 0.0)
                reply = yield from self._ask(claim, give_up_at, head=waiter)
                if reply.granted:
                    return reply
            refused = None
            seconds = (reply.ahead + 1) * reply.age_ms / 1000 * _POLL_SHARE
            seconds = min(max(seconds, MIN_POLL_S), MAX_POLL_S) * (1 - self._jitter() / 2)
            if reply.ends_ms > 0:
                seconds = min(seconds, reply.ends_ms / 1000)
            left = waiter.remaining_s
            yield Sleep(seconds if left is None else min(seconds, left))

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
            self.queues.count(claim.name),
            tuple(holders),
            reply.now_ms,
        )

    def _ask(
        self,
        claim: SlotClaim,
        give_up_at: float,
        *,
        head: Waiter | None = None,
        began_at: float = 0.0,
        failures: int = 0,
    ) -> Operation[HoldReply]:
        """Send the hold, and again if its reply is lost, until the caller's time and that of the
        store to answer are over: to hold a slot that is held already only extends it. `head`: the
        head of the queue; `began_at`: of a caller that is in none; `failures`: how often it failed.
        """
        while True:
            if failures:
                yield Sleep(_RETRIES.delay_s(failures))
            if self.held.hold_call is not None:
                self.held.hold_call()
            sent_at = self._monotonic()
            self.held.add(claim, sent_at + self.request_timeout)
            command = claim.command
            if head is not None:
                waited_ms = head.first_waited_ms(MAX_PLACES)
                command = replace(command, is_head=True, waited_ms=waited_ms)
            elif command.waited_ms:
                command = replace(command, waited_ms=(round((sent_at - began_at) * 1000),))
            try:
                reply: HoldReply = yield command
            except DistwindowError as exc:
                claim.on_failure(exc, sent_at)
                failures += 1
                if not self._may_ask_again(exc, _RETRIES.delay_s(failures), give_up_at):
                    raise
            else:
                claim.on_reply(reply, sent_at)
                return reply

    def _may_ask_again(self, failure: DistwindowError, pause: float, give_up_at: float) -> bool:
        # A server that is silent may answer the next request; one that refuses may not.
        may_answer = isinstance(failure, StoreTimeout) or (
            isinstance(failure, StoreError) and failure.charged is None
        )
        return may_answer and self._monotonic() + pause < give_up_at


def exceeded(claim: SlotClaim, reply: HoldReply) -> ConcurrencyExceeded:
    """Return the error of a caller whose last reply was this refusal.

    Its `retry_after` is an estimate: whoever asks at any moment finds that half of the time between
    two grants is over. Each place before it takes one. Holders that died are gone after `ends_ms`.
    """
    seconds = (2 * reply.ahead + 1) * reply.age_ms / 1000 if reply.ends_ms else MAX_POLL_S
    longest = reply.ends_ms / 1000 or MAX_POLL_S
    seconds = min(max(seconds, MIN_POLL_S), longest)
    return ConcurrencyExceeded(claim.key, claim.command.limit, reply.held, seconds)
