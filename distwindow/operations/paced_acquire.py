"""Waiting for permits of limits that are paced or warm up: until the promised moment."""

from __future__ import annotations

from ..core.decision import Decision
from ..core.errors import RateLimitExceeded
from ..protocol.shaped_commands import AcquireShaped
from .steps import Operation, Sleep
from .wait_queue import QueueSlot


def wait_until_paced(command: AcquireShaped, slot: QueueSlot) -> Operation[Decision]:
    """Send `command` again and again until it is admitted, and sleep until it may proceed.

    The store is told how long the caller can still wait, so that no moment after its timeout is
    promised. Raises `RateLimitExceeded` as soon as it is certain that the timeout ends before the
    call may proceed.
    """
    began_ms: int | None = None
    timeout = slot.remaining_s
    while True:
        remaining = slot.remaining_s
        capped = command.unshared() if remaining is None else command.capped(remaining)
        decision: Decision = yield capped
        if decision.allowed:
            # The next waiter gets its moment while this one sleeps: the pace would slow down
            # otherwise, because a call that asks later than it could is promised a later moment.
            slot.leave()
            if decision.wait:
                yield Sleep(decision.wait)
            return decision
        if began_ms is None:
            began_ms = decision.now_ms
        proceeds_in = decision.retry_after
        max_wait_ms = decision.limit.max_wait_ms
        if max_wait_ms is not None:  # at `retry_after` it is promised this wait
            max_wait = max_wait_ms / 1000
            proceeds_in += max_wait if remaining is None else min(max_wait, remaining)
        waited = (decision.now_ms - began_ms) / 1000
        if timeout is not None and waited + proceeds_in > timeout:
            raise RateLimitExceeded(decision)
        slot.on_refused(decision)
        yield Sleep(decision.retry_after)
