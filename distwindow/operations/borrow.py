"""Priority calls: where the window is full, they borrow permits of coming buckets."""

from __future__ import annotations

from decimal import Decimal
from typing import NamedTuple

from ..core.decision import Decision, Source
from ..core.errors import ConfigurationError, RateLimitExceeded
from ..protocol.borrowing import Borrow
from ..protocol.commands import Acquire
from ..protocol.decisions import borrow_decision
from .steps import Operation, Sleep, send
from .strategy import Strategy
from .wait_queue import QueueSlot


class PriorityCall(NamedTuple):
    """A call with `priority=True`."""

    acquire: Acquire
    """The command of the same call without priority."""
    max_wait: float
    """Seconds that the call may be told to wait."""
    borrow_share: float
    """The part of each limit that a window may hold in borrowed permits."""
    source: Source
    """What decides a call that is sent to the store."""

    def command(self, max_wait: float) -> Borrow:
        """Return the command of this call, if it may be told to wait for `max_wait` seconds."""
        charges = self.acquire.charges
        # As a decimal fraction: 0.29 * 100 is less than 29 as a float.
        share = Decimal(str(self.borrow_share))
        return Borrow(
            charges,
            max_wait_ms=int(max_wait * 1000 + 1e-6),
            max_borrowed=tuple([int(charge.limit.amount * share) for charge in charges]),
        )


def check_priority(priority: object, strategy: Strategy) -> None:
    """Raise `ConfigurationError` if `strategy` cannot serve a call with this `priority`."""
    if priority is not True:
        raise ConfigurationError(f"priority={priority!r} is neither True nor False")
    if not strategy.can_borrow:
        raise ConfigurationError(
            'priority=True needs consistency="direct" or "leased": with "eventual" each process '
            "decides by counts that are up to sync_interval old, so nobody can promise permits of "
            "coming buckets"
        )


def try_borrow(
    strategy: Strategy, call: PriorityCall, max_wait: float | None = None
) -> Operation[Decision]:
    """Return the decision on `call`; with `max_wait`, as if it were the setting (seconds)."""
    charge = call.acquire.charges[0]
    decision = strategy.spend_leased(charge.key, charge.cost)
    if decision is not None:
        return decision
    command = call.command(call.max_wait if max_wait is None else max_wait)
    reply = yield from send(command)
    return borrow_decision(command, reply, call.source)


def borrow_or_wait(strategy: Strategy, call: PriorityCall, slot: QueueSlot) -> Operation[Decision]:
    """Repeat `call` until it is admitted, and sleep for `retry_after` in between. The decision may
    have a `wait`, which is not slept here. Raises `RateLimitExceeded` as soon as it is certain that
    the caller's timeout ends before the call may proceed.
    """
    began_ms: int | None = None
    timeout, max_wait = slot.remaining_s, call.max_wait
    while True:
        if (remaining := slot.remaining_s) is not None:
            max_wait = min(max_wait, remaining)
        decision = yield from try_borrow(strategy, call, max_wait)
        if decision.allowed:
            return decision
        if began_ms is None:
            began_ms = decision.now_ms
        if timeout is not None:
            left = timeout - (decision.now_ms - began_ms) / 1000
            if decision.retry_after > left:
                raise RateLimitExceeded(decision)
            if decision.retry_after + max_wait > left:
                # What it could borrow then begins after the timeout, so it can only wait for room.
                # Otherwise it would ask more and more often, as the timeout comes nearer.
                max_wait = 0.0
        slot.on_refused(decision)
        yield Sleep(decision.retry_after)
