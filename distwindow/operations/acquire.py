"""Waiting for permits until the moment at which the store has them."""

from __future__ import annotations

from ..core.decision import Decision
from ..core.errors import RateLimitExceeded
from ..protocol.commands import Acquire
from .steps import Operation, Sleep
from .wait_queue import QueueSlot


def wait_until_admitted(command: Acquire, slot: QueueSlot) -> Operation[Decision]:
    """Send `command` again and again until it is admitted, and sleep for `retry_after` in between.

    Time is taken from the decisions, and so from the store's clock. Raises `RateLimitExceeded` as
    soon as it is certain that the caller's timeout ends before the permits are there.
    """
    began_ms: int | None = None
    timeout = slot.remaining_s
    while True:
        decision: Decision = yield command
        if decision.allowed:
            return decision
        if began_ms is None:
            began_ms = decision.now_ms
        waited = (decision.now_ms - began_ms) / 1000
        if timeout is not None and waited + decision.retry_after > timeout:
            raise RateLimitExceeded(decision)
        slot.on_refused(decision)
        yield Sleep(decision.retry_after)
