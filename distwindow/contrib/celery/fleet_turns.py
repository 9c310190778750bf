"""Turns in the fleet's line, for tasks that are sent back because their worker has no room.

Workers that gave out turns on their own would give the same moments to their tasks, and these would
come back as many times too early as there are workers.
"""

from __future__ import annotations

from collections.abc import Callable

from ... import Decision, Limit, Limiter
from ...core.key import AnyKey

_MOST_LIMITERS = 16
"""Each has a connection of its own. One is made for the limits of tasks that are sent back; further
limits have no turns.
"""

MakeLimiter = Callable[[tuple[Limit, ...]], Limiter]


class FleetTurns:
    """Calls that take a place in the fleet's line: `Limiter.try_acquire(..., enqueue=True)`."""

    def __init__(self, make: MakeLimiter) -> None:
        self._make = make
        self._limiters: dict[tuple[Limit, ...], Limiter] = {}
        self._is_closed = False

    def has_turns(self, limits: tuple[Limit, ...]) -> bool:
        """True if there are turns under these limits: not if one is paced or warms up."""
        if not limits or self._is_closed or any(limit.is_shaped for limit in limits):
            return False
        return limits in self._limiters or len(self._limiters) < _MOST_LIMITERS

    def ask(self, key: AnyKey, limits: tuple[Limit, ...], cost: int) -> Decision:
        """Return the decision; `retry_after` of a refusal is the turn. Raises what `try_acquire`
        raises.
        """
        limiter = self._limiters.get(limits)
        if limiter is None:
            limiter = self._limiters[limits] = self._make(limits)
        return limiter.try_acquire(key, cost, enqueue=True)

    def close(self) -> None:
        self._is_closed = True
        while self._limiters:
            self._limiters.popitem()[1].close()
