"""Calls under limits that are paced or warm up: their commands, their costs, and how they wait."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import cast

from ..errors import RateLimitExceeded
from ..ring.commands import Acquire
from ..ring.decision import Charge, Decision
from ..ring.key import AnyKey
from ..ring.limit import LimitSpec, parse_limits
from ..runtime.command_cache import CommandCache
from ..runtime.steps import Operation, Sleep
from ..waiting.waiting import QueueSlot
from .commands import AcquireShaped, any_shaped
from .shaping import shaping_of


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


def check_shaped_costs(charges: Iterable[Charge]) -> None:
    """Raise `ValueError` for a cost that a cold limit never admits: the limit would stay cold if
    all calls cost as much. A paced limit admits each cost, after a longer wait.
    """
    for charge in charges:
        limit, cost = charge.limit, charge.cost
        if limit.warmup_ms is not None and limit.max_wait_ms is None:
            most = math.floor(shaping_of(limit, None).coldest_rate())
            if cost > most:
                raise ValueError(
                    f"cost={cost} can never be admitted while {limit} is cold: the most is then "
                    f"{most}"
                )


class ShapedCommandCache(CommandCache):
    """A cache that gives each caller a command of its own, as each call has a wait of its own."""

    command_type = AcquireShaped

    def acquire_command(self, key: AnyKey, cost: int = 1) -> Acquire:
        command = cast(AcquireShaped, super().acquire_command(key, cost))
        if cost != 1:
            check_shaped_costs(command.charges)
        return command.unshared()


def make_command_cache(prefix: str, limits: LimitSpec) -> CommandCache:
    """Return the command cache for these limits."""
    parsed = parse_limits(limits)
    cache = ShapedCommandCache if any_shaped(parsed) else CommandCache
    return cache(prefix, parsed)
