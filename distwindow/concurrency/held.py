"""The slots that this process holds under one concurrency limit: renewed, and given back, by the
worker.
"""

from __future__ import annotations

import itertools
import logging
import math
import secrets
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial

from ..errors import DistwindowError, closed_failure, short_repr
from ..ring.key import AnyKey
from ..runtime.flush import FlushSource, OutgoingCommand
from ..runtime.worker import FlushJob
from .claim import SlotClaim
from .commands import MAX_HOLDERS, Free, FreeReply, Hold, HolderName, Renew, RenewReply, slots_name


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


# --------------------------------------------------------------------------------------------------
#
# The slots that this process holds under one concurrency limit, and those that it has to free.
#
# The worker sends what is due: one `renew` for all slots of a resource, and one `free` for all that
# have to be given back, all resources in one exchange. A slot is renewed a third of its time to
# live after it was last extended; those that are nearly due are renewed with it.

LOG = logging.getLogger("distwindow")

_FIRST_RETRY_S = 0.05
_LAST_RETRY_S = 2.0
"""Seconds between two attempts to free a slot: they double from the first to the last."""


class HeldSlots(FlushSource):
    """The claims of one `Concurrency`, by the names of the holders. Safe to share between threads,
    and with signal handlers: each change of the dictionary is one call of a C function.
    """

    def __init__(self, prefix: str, limit: int, ttl_ms: int, owner: Callable[[], str]) -> None:
        self._prefix, self._limit, self._ttl_ms = prefix, limit, ttl_ms
        self._find_owner = owner
        self.wake: Callable[[], object] = _ignore
        self.on_freed: Callable[[bytes], object] = _ignore
        """Called with the name of slots of which one was freed."""
        self.ends_all: Callable[[], bool] = _false
        """True once the process ends, and so every slot has to be freed."""
        self._claims: dict[bytes, SlotClaim] = {}
        self._left_lines: set[bytes] = set()
        """The names of slots for which nobody waits here any more."""
        self._hold_call: Callable[[], object] | None = None
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
        self._owner = self._find_owner()
        self._process = secrets.token_hex(6)
        self._ids = map(f"{self._process}.%d".__mod__, itertools.count())
        self.next_due_at = math.inf

    # -- the life of a claim --

    def new_claim(self, key: AnyKey) -> SlotClaim:
        """Return a claim with a name that no other has. It is not known here before `add`. Raises
        `ConfigurationError` once this is closed.
        """
        self._check_open()
        return SlotClaim(key, self._new_command(slots_name(self._prefix, key)), self._process)

    def add(self, claim: SlotClaim) -> None:
        """Know `claim`, before anything is sent for it. A claim that was made before the process
        forked gets a new name, because the parent may use the other one. Raises
        `ConfigurationError` once this is closed.
        """
        self._check_open()
        if claim.process is not self._process:
            claim.process, claim.command = self._process, self._new_command(claim.name)
        self._claims[claim.holder] = claim

    def on_granted(self, claim: SlotClaim) -> None:
        """Renew the slot from now on."""
        self._set_due(claim, claim.extended_at + claim.ttl_s / 3)

    def end(self, claim: SlotClaim, free_at: float) -> None:
        """Note that the block of `claim` has ended, or that its caller has given up. The worker
        frees it at `free_at` (monotonic seconds), unless that is done before.
        """
        claim.end()
        if claim.is_gone:
            self.forget(claim)
        else:
            self._set_due(claim, free_at)

    def forget(self, claim: SlotClaim) -> None:
        """Drop a claim that is gone."""
        self._claims.pop(claim.holder, None)

    def leave_line(self, name: bytes, now: float) -> None:
        """Tell the store, by the worker, that nobody waits here for a slot of this name. It is told
        once: if that fails, or comes before the last question of a waiter, the places of this
        process end by themselves (`PLACE_MS`).
        """
        self._left_lines.add(name)
        if self._lower_due(now):
            self.wake()

    def take_free_reply(self, claim: SlotClaim, sent_at: float) -> None:
        """Take an acknowledged free of an ended claim."""
        claim.on_freed(sent_at)
        if claim.is_gone:
            self.forget(claim)
        self.on_freed(claim.name)

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

    def _check_open(self) -> None:
        if self._is_closed:
            raise closed_failure("concurrency limit")

    def settled_at(self) -> float:
        """Return when everything can be freed for good: after the last deadline of a hold whose
        reply was lost.
        """
        ended = [claim.deadline for claim in self._claims.copy().values() if claim.ended]
        return max(ended, default=-math.inf)

    def hold_call(self) -> None:
        """Hold up a call while the process ends."""
        if self._hold_call is not None:
            self._hold_call()

    # -- for the worker: see FlushSource --

    def collect_commands(
        self, now: float, outgoing: list[OutgoingCommand], *, everything: bool = False
    ) -> None:
        if everything and self.ends_all():
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
            free = Free((), slots_name=name, holders=tuple(claim.holder for claim in claims))
            outgoing.append(OutgoingCommand(free, partial(self._on_freed, claims)))
        for name, claims in _batches(renewed):
            holders = tuple(claim.holder for claim in claims)
            renew = Renew((), slots_name=name, ttl_ms=self._ttl_ms, holders=holders)
            outgoing.append(OutgoingCommand(renew, partial(self._on_renewed, claims)))

    def reschedule(self, now: float) -> None:
        self.next_due_at = now if self._left_lines else math.inf
        for claim in self._claims.copy().values():
            self._lower_due(claim.next_due_at)

    def pause_calls(self, hold: Callable[[], object]) -> None:
        self._hold_call = hold

    def unreturned_permits(self) -> int:
        """Return how many slots are still to be freed."""
        claims = self._claims.copy().values()
        ends_all = self.ends_all()
        return sum(claim.ended or (ends_all and claim.is_renewed) for claim in claims)

    # -- replies --

    def _on_freed(self, claims: list[SlotClaim], reply: object, sent_at: float) -> None:
        """Take the reply to a `free`. A second call is harmless."""
        for claim in claims:
            if isinstance(reply, FreeReply):
                self.take_free_reply(claim, sent_at)
            if not claim.is_gone:
                seconds = min(_LAST_RETRY_S, _FIRST_RETRY_S * 2 ** min(claim.frees, 10))
                claim.frees += 1
                claim.next_due_at = claim.free_again_at(sent_at, seconds)

    def _on_renewed(self, claims: list[SlotClaim], reply: object, sent_at: float) -> None:
        """Take the reply to a `renew`. A second call is harmless."""
        for index, claim in enumerate(claims):
            if claim.ended or claim.lost:
                continue
            if not isinstance(reply, RenewReply):
                retry_at = sent_at + max(_FIRST_RETRY_S, claim.ttl_s / 12)
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

    def _new_command(self, name: bytes) -> Hold:
        """Return the command for a new holder of a slot of this name."""
        holder = HolderName(self._limit, self._ttl_ms, next(self._ids), self._owner)
        return Hold(
            (),
            slots_name=name,
            limit=self._limit,
            ttl_ms=self._ttl_ms,
            holder=holder.encode(),
        )

    def _set_due(self, claim: SlotClaim, at: float) -> None:
        claim.next_due_at = at
        if self._lower_due(at):
            self.wake()

    def _lower_due(self, at: float) -> bool:
        with self._lock:
            if at >= self.next_due_at:
                return False
            self.next_due_at = at
            return True


def _batches(
    by_name: dict[bytes, list[SlotClaim]],
) -> Iterator[tuple[bytes, list[SlotClaim]]]:
    """Yield the claims of each name, as many at a time as one command may name."""
    for name, claims in by_name.items():
        for first in range(0, len(claims), MAX_HOLDERS):
            yield name, claims[first : first + MAX_HOLDERS]


def _ignore(*_: object) -> None: ...


def _false() -> bool:
    return False
