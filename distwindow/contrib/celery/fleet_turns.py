"""Turns in the fleet's line, for tasks that are sent back because their worker has no room.

Workers that gave out turns on their own would give the same moments to their tasks, and these would
come back as many times too early as there are workers.
"""

from __future__ import annotations

from collections.abc import Callable

from ... import Decision, Limit, Limiter
from ...core.key import AnyKey

_MOST_LIMITERS = 16
"""Each has a connection of its own. One is made for the limits of tasks that are sent back."""

MakeLimiter = Callable[[tuple[Limit, ...]], Limiter]


class FleetTurns:
    """Calls that take a place in the fleet's line: `Limiter.try_acquire(..., enqueue=True)`."""

    def __init__(self, make: MakeLimiter) -> None:
        self._make = make
        self._limiters: dict[tuple[Limit, ...], Limiter] = {}

    @staticmethod
    def serve(limits: tuple[Limit, ...]) -> bool:
        """True if there are turns under these limits: not if one is paced or warms up."""
        return not any(limit.is_shaped for limit in limits)

    def ask(self, key: AnyKey, limits: tuple[Limit, ...], cost: int) -> Decision:
        """Return the decision; `retry_after` of a refusal is the turn. Raises what `try_acquire`
        raises.
        """
        limiter = self._limiters.get(limits)
        if limiter is None:
            if len(self._limiters) >= _MOST_LIMITERS:
                self._limiters.pop(next(iter(self._limiters))).close()
            limiter = self._limiters[limits] = self._make(limits)
        return limiter.try_acquire(key, cost, enqueue=True)

    def close(self) -> None:
        for limiter in self._limiters.values():
            limiter.close()
        self._limiters.clear()
