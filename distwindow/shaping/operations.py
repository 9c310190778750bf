"""Calls under limits that are paced or warm up: their commands, their costs, and how they wait."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any, cast

from ..errors import RateLimitExceeded
from ..ring.command import Command
from ..ring.commands import Acquire, Read
from ..ring.decision import Charge, Decision
from ..ring.key import AnyKey, shaping_name
from ..ring.limit import Limit, LimitSpec, parse_limits
from ..ring.replies import AcquireReply
from ..ring.stats import ShapingStats
from ..runtime.command_cache import CommandCache
from ..runtime.steps import Operation, Sleep
from ..waiting.waiting import PermitWaiter
from .commands import AcquireShaped, PeekShaped, ReadShaped, any_shaped
from .shaping import shaping_of, shaping_stats


def wait_until_paced(acquire: Acquire, waiter: PermitWaiter) -> Operation[Decision]:
    """Send this `AcquireShaped` again until it is admitted, and sleep until it may proceed.

    The store is told how long the caller can still wait, so that no moment after its timeout is
    promised. Raises `RateLimitExceeded` once it is certain that the timeout ends first.
    """
    command = cast(AcquireShaped, acquire)
    began_ms: int | None = None
    timeout = waiter.remaining_s
    while True:
        remaining = waiter.remaining_s
        capped = command.unshared() if remaining is None else command.capped(remaining)
        decision: Decision = yield capped
        if decision.allowed:
            # The next waiter gets its moment while this one sleeps: the pace would slow down
            # otherwise, because a call that asks later than it could is promised a later moment.
            waiter.leave()
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
        waiter.on_refused(decision)
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


class MixedCommandCache(CommandCache):
    """A cache for plain limits. `try_acquire_all` may name others."""

    def _several(self, charges: tuple[Charge, ...]) -> Acquire:
        if not any_shaped(charge.limit for charge in charges):
            return super()._several(charges)
        check_shaped_costs(charges)
        return AcquireShaped(charges)


class ShapedCommandCache(MixedCommandCache):
    """A cache that gives each caller a command of its own, as each call has a wait of its own."""

    command_type = AcquireShaped

    def acquire_command(self, key: AnyKey, cost: int = 1) -> Acquire:
        command = cast(AcquireShaped, super().acquire_command(key, cost))
        if cost != 1:
            check_shaped_costs(command.charges)
        own = command.unshared()
        own.counts = command.counts
        return own

    def peek_command(self, charges: tuple[Charge, ...]) -> Command[AcquireReply]:
        return PeekShaped(charges)

    def read_command(self, charges: tuple[Charge, ...]) -> Read:
        return ReadShaped(charges)

    def shaping_stats(self, limit: Limit, stored: Any, now_ms: int) -> ShapingStats | None:
        return shaping_stats(limit, stored, now_ms)


def make_command_cache(
    prefix: str, limits: LimitSpec, beside: Sequence[Callable[[bytes], bytes]] = ()
) -> CommandCache:
    """Return the command cache for these limits. `beside`: see `CommandCache`."""
    parsed = parse_limits(limits)
    cache = ShapedCommandCache if any_shaped(parsed) else MixedCommandCache
    return cache(prefix, parsed, [*beside, shaping_name])
