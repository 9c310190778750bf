"""The slots that a process holds under a concurrency limit, renewed and freed by the worker."""

from __future__ import annotations

import itertools
import logging
import math
import secrets
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial

from ..errors import DistwindowError, StoreError, closed_failure, short_repr
from ..observer import Level, Tally
from ..ring.key import AnyKey
from ..runtime.flush import FlushSource, OutgoingCommand
from ..runtime.flush_job import FlushJob
from ..runtime.shutdown import SHUTDOWN
from ..support.backoff import Backoff
from ..waiting.waiting import WaitQueues
from .commands import MAX_HOLDERS, Free, FreeReply, Hold, HolderName, HoldReply, Renew, RenewReply

LOG = logging.getLogger("distwindow")
_RETRIES = Backoff(0.05, 2.0)
"""The delays between two attempts to free a slot."""


class HeldSlots(FlushSource):
    """The claims of one `Concurrency`, by the names of the holders. Safe to share between threads,
    and with signal handlers: each change of the dictionary is one call of a C function.

    The worker sends what is due: one `renew` for all slots of a resource, and one `free` for all
    that have to be given back, all resources in one exchange. A slot is renewed a third of its time
    to live after it was last extended; those that are nearly due are renewed with it.
    """

    def __init__(self, limit: int, ttl_ms: int, owner: Callable[[], str]) -> None:
        self._limit, self._ttl_ms = limit, ttl_ms
        self.limit_text = str(limit)
        self._find_owner = owner
        self.wake: Callable[[], object] = _ignore
        self.wait_queues: WaitQueues | None = None
        """The queues of those who wait for slots: the head is woken when one is freed."""
        self._claims: dict[bytes, SlotClaim] = {}
        self._left_lines: set[bytes] = set()
        """The names of slots for which nobody waits here any more."""
        self.tally: Tally | None = None
        """What adds up for an observer."""
        self.hold_call: Callable[[], object] | None = None
        """Holds up a call while the process ends; None at other times."""
        self._is_closed = False
        self._has_told_of_drop = False
        self.after_fork()

    def after_fork(self) -> None:
        """Begin without slots: those of the parent are the parent's."""
        for claim in self._claims.copy().values():
            claim.disown()
        self._claims = {}
        self._left_lines = set()
        self._lock = threading.RLock()
        """Re-entrant, as a signal handler may use the limit that it has interrupted."""
        self._process = secrets.token_hex(6)
        name = HolderName(self._limit, self._ttl_ms, f"{self._process}.\0", self._find_owner())
        template = name.encode().replace(b"%", b"%%").replace(b"\0", b"%d")
        self._names = map(template.__mod__, itertools.count())
        """The names of the holders to come."""
        self.next_due_at = math.inf
        self._has_to_wake = False
        """True where the worker may not know `next_due_at`, so that the next caller wakes it: the
        one that lowered it was interrupted or found no event loop, or it was `reschedule`, which
        wakes nobody."""

    def new_claim(self, key: AnyKey, name: bytes, timeout: float | None = 0.0) -> SlotClaim:
        """Return a claim to a slot of this name, which no other holder has had. It is not known
        here before `add`. Raises `ConfigurationError` once this is closed.
        """
        if self._is_closed:
            raise closed_failure("concurrency limit")
        waited_ms = () if timeout == 0 else (0,)
        return SlotClaim(key, self._new_command(name, waited_ms), self._process)

    def add(self, claim: SlotClaim, deadline: float) -> None:
        """Know `claim`, before a hold is sent for it that the server may execute until `deadline`.
        A claim that was made before the process forked gets a new name, because the parent may use
        the other one. Raises `ConfigurationError` once this is closed.
        """
        if self._is_closed:
            raise closed_failure("concurrency limit")
        if claim.process is not self._process:
            claim.process = self._process
            claim.command = self._new_command(claim.name, claim.command.waited_ms)
        self._claims[claim.command.holder] = claim
        claim.on_send(deadline)
        # This claim may wait for one that the worker has to free. One that should have come before
        # now is the task of a loop that has stopped, and is not closed.
        self._has_to_wake |= self.next_due_at < deadline - _LATE_S
        if self._has_to_wake:
            self._come_by(self.next_due_at)

    def on_granted(self, claim: SlotClaim) -> None:
        """Renew the slot from now on."""
        self._set_due(claim, claim.extended_at + claim.ttl_s / 3)

    def end(self, claim: SlotClaim, free_at: float) -> None:
        """Note that the block of `claim` has ended, or that its caller has given up. The worker
        frees it at `free_at` (monotonic seconds), unless that is done before.
        """
        was_held = claim.is_renewed
        claim.ended = True
        if claim.is_gone:
            self.forget(claim)
        else:
            self._set_due(claim, free_at)
        if was_held and self.tally is not None:
            self.tally.level_changed()

    def forget(self, claim: SlotClaim) -> None:
        """Drop a claim that is gone."""
        self._claims.pop(claim.command.holder, None)

    def leave_line(self, name: bytes, now: float) -> None:
        """Tell the store, by the worker, that nobody waits here for a slot of this name. It is told
        once: if that fails, or comes before the last question of a waiter, the places of this
        process end by themselves (`PLACE_MS`).
        """
        self._left_lines.add(name)
        self._come_by(now)

    def take_free_reply(self, claim: SlotClaim, sent_at: float) -> None:
        """Take an acknowledged free of an ended claim."""
        claim.on_freed(sent_at)
        if claim.is_gone:
            self.forget(claim)
        queues = self.wait_queues
        if queues is not None and claim.name in queues.by_name:
            queues.wake_head(claim.name)

    def check_lost(self, claim: SlotClaim, now: float) -> bool:
        """True if the slot of `claim` is lost, or was when its block ended."""
        if claim.is_renewed and now >= claim.expires_at:
            self._lose(claim, f"it was not renewed within {claim.ttl_s:g} s")
        return bool(claim.lost)

    def lose_all(self, why: str, now: float) -> None:
        """Take their slots from all that hold one, and have these freed."""
        for claim in self._claims.copy().values():
            if claim.is_renewed:
                claim.lose(why)
                self.end(claim, now)

    def close(self) -> None:
        """Refuse new claims, because the store is closed."""
        self._is_closed = True

    def settled_at(self) -> float:
        """Return when all can be freed for good: after deadlines of holds whose reply was lost."""
        ended = [claim.deadline for claim in self._claims.copy().values() if claim.ended]
        return max(ended, default=-math.inf)

    def levels(self) -> list[Level]:
        """Return how many slots are held here."""
        assert self.tally is not None
        held = sum(claim.is_renewed for claim in self._claims.copy().values())
        name = self.tally.name
        return [Level("concurrency", name, "slots_held", self.limit_text, float(held))]

    def collect_commands(
        self, now: float, outgoing: list[OutgoingCommand], *, everything: bool = False
    ) -> None:
        if everything and SHUTDOWN.are_calls_paused():
            self.lose_all("the process is ending", now)
        while self._left_lines:
            nobody_waits = replace(
                self._new_command(self._left_lines.pop()), limit=0, is_head=True, waited_ms=()
            )
            outgoing.append(OutgoingCommand(nobody_waits, _ignore))
        renewed: dict[bytes, list[SlotClaim]] = {}
        freed: dict[bytes, list[SlotClaim]] = {}
        soon = now + self._ttl_ms / 6000
        for claim in self._claims.copy().values():
            if not claim.ended and claim.is_dropped:
                self._tell_of_drop(claim)
                self.end(claim, now)
            if claim.ended:
                if claim.is_gone or claim.expire(now):
                    self.forget(claim)
                elif everything or claim.next_due_at <= now:
                    freed.setdefault(claim.name, []).append(claim)
            elif not claim.is_renewed or self.check_lost(claim, now):
                continue
            elif everything or claim.next_due_at <= soon:
                renewed.setdefault(claim.name, []).append(claim)
        for name, claims in _batches(freed):
            holders = tuple(claim.command.holder for claim in claims)
            free = Free((), slots_name=name, holders=holders)
            outgoing.append(OutgoingCommand(free, partial(self._on_freed, claims)))
        for name, claims in _batches(renewed):
            holders = tuple(claim.command.holder for claim in claims)
            renew = Renew((), slots_name=name, ttl_ms=self._ttl_ms, holders=holders)
            outgoing.append(OutgoingCommand(renew, partial(self._on_renewed, claims)))

    def reschedule(self, now: float) -> None:
        self.next_due_at = now if self._left_lines else math.inf
        for claim in self._claims.copy().values():
            self._lower_due(claim.next_due_at)

    def pause_calls(self, hold: Callable[[], object]) -> None:
        self.hold_call = hold

    def unreturned_permits(self) -> int:
        """Return how many slots are still to be freed."""
        claims = self._claims.copy().values()
        ends_all = SHUTDOWN.are_calls_paused()  # every slot has to be freed
        return sum(claim.ended or (ends_all and claim.is_renewed) for claim in claims)

    def _on_freed(self, claims: list[SlotClaim], reply: object, sent_at: float) -> None:
        """Take the reply to a `free`. A second call is harmless."""
        for claim in claims:
            if isinstance(reply, FreeReply):
                self.take_free_reply(claim, sent_at)
            if not claim.is_gone:
                claim.frees += 1
                seconds = _RETRIES.delay_s(claim.frees)
                claim.next_due_at = claim.free_again_at(sent_at, seconds)

    def _on_renewed(self, claims: list[SlotClaim], reply: object, sent_at: float) -> None:
        """Take the reply to a `renew`. A second call is harmless."""
        for index, claim in enumerate(claims):
            if claim.ended or claim.lost:
                continue
            if not isinstance(reply, RenewReply):
                retry_at = sent_at + max(_RETRIES.first_s, claim.ttl_s / 12)
                claim.next_due_at = min(retry_at, claim.expires_at)
            elif index in reply.gone:
                claim.next_due_at = math.inf
                self._lose(claim, "the store has it no more")
            else:
                claim.on_renewed(sent_at)
                claim.next_due_at = sent_at + claim.ttl_s / 3

    def _lose(self, claim: SlotClaim, why: str) -> None:
        claim.next_due_at = math.inf
        if claim.lose(why):
            if self.tally is not None:
                self.tally.level_changed()
            LOG.warning(
                "a slot of %s was lost while it was held: %s; another holder may have it, so "
                "what it guards should stop",
                short_repr(claim.key), why,
            )  # fmt: skip

    def _tell_of_drop(self, claim: SlotClaim) -> None:
        if claim.is_renewed and not self._has_told_of_drop:
            self._has_told_of_drop = True
            LOG.warning(
                "a slot of %s was garbage-collected before it was released, so others get it while "
                "what it guards may still run; keep what `try_hold` returns until that has ended: "
                "`with slots.try_hold(key) as slot:`, and in that block `if slot:` (logged once)",
                short_repr(claim.key),
            )  # fmt: skip

    def _new_command(self, name: bytes, waited_ms: tuple[int, ...] = ()) -> Hold:
        """Return the command for a new holder of a slot of this name."""
        return Hold(
            (),
            slots_name=name,
            limit=self._limit,
            ttl_ms=self._ttl_ms,
            holder=next(self._names),
            waited_ms=waited_ms,
        )

    def _set_due(self, claim: SlotClaim, at: float) -> None:
        claim.next_due_at = at
        # `reschedule` raises `next_due_at` first, and then reads those of the claims.
        if at < self.next_due_at or self._has_to_wake:
            self._come_by(at)

    def _come_by(self, at: float) -> None:
        """Have the worker come at `at` (monotonic seconds) or earlier."""
        self._lower_due(at)
        if self._has_to_wake:
            self._has_to_wake = False
            was_woken = False
            try:
                was_woken = self.wake() is not False
            finally:  # a signal handler may raise anything in it
                if not was_woken:
                    self._has_to_wake = True  # so that the next caller wakes the worker

    def _lower_due(self, at: float) -> None:
        with self._lock:
            if at < self.next_due_at:
                self.next_due_at, self._has_to_wake = at, True


_LATE_S = 2.0
"""Seconds. A worker that should have come so long before the deadline of a new request is woken
once more; with a timeout that is longer than this, also one that has only just to come."""
MAX_CLOCK_DRIFT = 0.1
"""The part of a time by which the clock here may be slower than the store's, as for leases."""
CLOCK_MARGIN_S = 0.001
"""The store's clock is read in whole ms."""
_NO_TIME = -math.inf


class SlotClaim:
    """One holder's claim to a slot, from the first request until the store has surely no trace of
    it. Times are monotonic seconds.

    The name of a holder is in the store's set at most once, so to hold, to renew and to free may be
    sent again. An outcome that is unknown is therefore asked for again, and what cannot be asked
    any more is freed; no slot is given up on, and none is assumed.

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
    executes it up to the deadline in its stamp. So a free is final only if all holds were answered,
    or if it was sent after the last of these deadlines. `expires_at` counts from before it was
    sent, and allows for a drift between the clocks, so it comes before the deadline in the store.

    The block's thread sets `ended`, and the worker sets `lost`: neither undoes what the other did.
    """

    __slots__ = (
        "_may_be_stored", "_may_have_place", "_unsettled", "command", "deadline", "ended",
        "extended_at", "frees", "key", "lost", "name", "next_due_at", "owner", "process", "ttl_s",
    )  # fmt: skip

    def __init__(self, key: AnyKey, command: Hold, process: str = "") -> None:
        self.key = key
        self.name = command.slots_name
        """The Redis key of the slots."""
        self.command = command
        """The hold that is sent first. It has the holder's name in the store."""
        self.process = process
        """The part of the holder's name that this process alone has: a child has another."""
        self.ttl_s = command.ttl_ms / 1000
        self.extended_at = _NO_TIME
        """When the last request was sent that gave or extended the slot; at first long ago."""
        self.lost = ""
        """Why the slot was lost; empty if it was not."""
        self.ended = False
        """True once the block has ended, or if it never will begin."""
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
        self.deadline = _NO_TIME
        """The last time at which the server may execute one of them: that of the last hold."""

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
        """True once the call is over or given up, and the store surely has no trace of it."""
        return self.ended and not self._may_be_stored

    @property
    def may_have_place(self) -> bool:
        """False if each hold that was sent surely was not executed: then the store knows no place
        of this process by it. A claim that has sent none may be named by that of another waiter.
        """
        was_sent = self.deadline != _NO_TIME
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
        return "asking" if self.deadline != _NO_TIME else "new"

    def on_send(self, deadline: float) -> None:
        """Note that a hold is sent now, which the server may execute until `deadline`."""
        self.deadline = max(self.deadline, deadline)
        self._unsettled += 1
        self._may_be_stored = True

    def on_reply(self, reply: HoldReply, sent_at: float) -> None:
        """Take the reply to a hold."""
        self._unsettled -= 1
        self._may_have_place = True
        if reply.granted:
            self.extended_at = sent_at
        else:
            self.on_freed(sent_at)

    def on_failure(self, exc: DistwindowError, sent_at: float) -> None:
        """Take the failure of a hold. Its outcome is unknown only if `.charged` is None."""
        if not isinstance(exc, StoreError) or exc.charged is False:
            self._unsettled -= 1
            self.on_freed(sent_at)

    def on_renewed(self, sent_at: float) -> None:
        """Take an acknowledged renewal."""
        self.extended_at = max(self.extended_at, sent_at)

    def on_freed(self, sent_at: float) -> None:
        """Take an acknowledged free, or a hold that was refused or not executed: no hold can be
        executed after a request that was sent then, if all were answered, or are too late.
        """
        if self._unsettled <= 0 or sent_at >= self.deadline:
            self._may_be_stored = False

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
        if now < max(self.extended_at, self.deadline) + self.ttl_s * (1 + MAX_CLOCK_DRIFT):
            return False
        self._may_be_stored = False
        return True

    def free_again_at(self, now: float, seconds: float) -> float:
        """Return when to free it again: a free that was acknowledged may be final later."""
        return self.deadline if now < self.deadline else now + seconds

    def __repr__(self) -> str:
        return f"SlotClaim({self.command.holder!r}, {self.state})"


class SlotJob(FlushJob):
    """The job of a `Concurrency`: it renews the slots that are held, and frees those given back."""

    __slots__ = ()

    @property
    def has_unsent(self) -> bool:
        return self.strategy.unreturned_permits() > 0

    def log_failure(self, failure: BaseException, *, is_expected: bool) -> None:
        if is_expected:
            LOG.warning(
                "renewing or freeing the slots of %s failed: %s; this is tried again until their "
                "deadlines, and a holder whose slot is lost is told",
                self.name, failure,
            )  # fmt: skip
        else:
            LOG.error(
                "renewing or freeing the slots of %s failed with an unexpected error; this is "
                "tried again until their deadlines",
                self.name, exc_info=failure,
            )  # fmt: skip

    def log_recovery(self) -> None:
        LOG.warning("the slots of %s can be renewed and freed again", self.name)

    def record_close(self, failure: DistwindowError | None) -> None:
        self.failure = failure
        if self.has_unsent and not self.loss_reported:
            self.loss_reported = True
            self.log_lost("it was closed before", failure or "there was not enough time")

    def log_lost(self, when: str, why: object) -> None:
        LOG.warning(
            "%d slots of %s were not freed: %s that was done (%s); they end with their deadlines",
            self.strategy.unreturned_permits(), self.name, when, why,
        )  # fmt: skip


def _batches(by_name: dict[bytes, list[SlotClaim]]) -> Iterator[tuple[bytes, list[SlotClaim]]]:
    """Yield the claims of each name, as many at a time as one command may name."""
    for name, claims in by_name.items():
        for first in range(0, len(claims), MAX_HOLDERS):
            yield name, claims[first : first + MAX_HOLDERS]


def _ignore(*_: object) -> None: ...
