"""The operations that first send what this process has counted of a key: stats and refunds."""

from __future__ import annotations

import inspect
import itertools

from ..errors import short_repr
from ..ring.clock import Clock
from ..ring.commands import Refund
from ..ring.decision import Charge, Decision, with_cost
from ..ring.key import AnyKey
from ..ring.stats import Stats, stats_of, window_at
from .command_cache import CommandCache
from .flush import send_all
from .steps import Operation, send
from .strategy import Strategy


def stats(
    strategy: Strategy, commands: CommandCache, key: AnyKey, clock: Clock
) -> Operation[Stats]:
    """Return the statistics of a key. What this process has counted is sent first."""
    charges = commands.acquire_command(key).charges
    key = charges[0].key  # as it is kept: bytes may be the same key
    yield from _flush_key(strategy, key, clock)
    states, now_ms, shapings = yield from send(commands.read_command(charges))
    windows = tuple(
        window_at(
            state, charge.limit, now_ms, commands.shaping_stats(charge.limit, shaping, now_ms)
        )
        for state, charge, shaping in itertools.zip_longest(states, charges, shapings)
    )
    return stats_of(key, windows, now_ms)


def refund(strategy: Strategy, decision: Decision, clock: Clock) -> Operation[int]:
    """Give back what `decision` was charged, to the bucket it was charged in. Return how many
    permits were given back, the most of any limit. Raises `ValueError` if it charged nothing.
    """
    charges, most = _checked_charges(decision), 0
    if decision.source == "local":  # what was not sent yet is taken back here
        left: list[Charge] = []
        for _, group in itertools.groupby(charges, lambda charge: charge.key):
            own = tuple(group)
            taken = strategy.take_back(own, own[0].cost, decision.now_ms)
            most = max(most, taken)
            left += with_cost(own, own[0].cost - taken) if taken < own[0].cost else ()
        if not left:
            return most
        charges = tuple(left)
    yield from _flush_key(strategy, decision.key, clock)
    count, _ = yield from send(Refund(charges, charged_ms=decision.now_ms))
    strategy.invalidate(decision.key)
    # Again, so that what this process knows of the key includes the refund.
    yield from _flush_key(strategy, decision.key, clock)
    return most + count


def _flush_key(strategy: Strategy, key: AnyKey, clock: Clock) -> Operation[None]:
    """Send what this process has counted of `key`."""
    yield from send_all(strategy.clock_probe(), clock.monotonic)
    command = strategy.flush_command(key)
    if command is not None:
        yield from send_all([command], clock.monotonic)


def _checked_charges(decision: Decision) -> tuple[Charge, ...]:
    """Return what `decision` was charged; raise if that is nothing, or if it is no decision."""
    if not isinstance(decision, Decision):
        awaited = "; await the call first" if inspect.isawaitable(decision) else ""
        raise TypeError(
            f"refund takes the Decision that try_acquire or acquire has returned, not "
            f"{short_repr(decision)}{awaited}"
        )
    if not decision.charged:
        why = "the call was refused" if not decision.allowed else "peek counts nothing"
        raise ValueError(
            f"nothing was charged by this decision, as {why}; there is nothing to give back: "
            f"{decision!r}"
        )
    return decision.charged
