"""What a verdict means to the caller, and the dialogue of waiting for one's exact time."""

from __future__ import annotations

from ..core.decision import Decision, Source
from ..core.errors import RateLimitExceeded
from ..protocol.commands import Acquire, AcquireReply, Command, charged_in
from .steps import Operation, Sleep
from .wait_queue import QueueSlot


def decision_of(command: Command[AcquireReply], reply: AcquireReply, source: Source) -> Decision:
    """What a verdict means to the caller."""
    was_admitted, index, left, reset_ms, retry_ms, now_ms, _, starts = reply
    if was_admitted:
        decision = admitted_decision(command, index, left, reset_ms, now_ms, source)
        if starts is not None and decision.charged:
            decision = decision._replace(charged=charged_in(command.charges, starts))
        return decision
    _, limit, cost, key, _ = command.charges[index]
    return Decision(
        False, key, cost, limit, max(0, left), retry_ms / 1000, reset_ms / 1000, 0.0,
        "over_limit", source, now_ms,
    )  # fmt: skip


def admitted_decision(
    command: Command[AcquireReply],
    index: int,
    left: int,
    reset_ms: int,
    now_ms: int,
    source: Source,
) -> Decision:
    """The decision of an admitted call. Stores come here directly on their hot paths."""
    charges = command.charges
    _, limit, cost, key, _ = charges[index]
    charged = charges if type(command) is Acquire else None
    # Decision(...) itself costs twice as much.
    return _new_tuple(
        Decision,
        (True, key, cost, limit, left, 0.0, reset_ms / 1000, 0.0, "ok", source, now_ms, charged),
    )


_new_tuple = tuple.__new__


def wait_until_admitted(command: Acquire, slot: QueueSlot) -> Operation[Decision]:
    """Ask, and where refused sleep until the moment the refusal named; again until admitted.

    Time is counted on the store's clock. Raises `RateLimitExceeded` as soon as it is certain that
    the caller's patience ends first, without sleeping it off.
    """
    began: int | None = None
    patience = slot.remaining_s
    while True:
        decision: Decision = yield command
        if decision.allowed:
            return decision
        if began is None:
            began = decision.now_ms
        waited = (decision.now_ms - began) / 1000
        if patience is not None and waited + decision.retry_after > patience:
            raise RateLimitExceeded(decision)
        slot.refused(decision)
        yield Sleep(decision.retry_after)
