"""What a verdict means to the caller, and the dialogue of waiting for one's exact time."""

from __future__ import annotations

from ..core.decision import Decision
from ..core.errors import RateLimitExceeded
from ..protocol.commands import Acquire
from .steps import Operation, Sleep
from .wait_queue import QueueSlot


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
