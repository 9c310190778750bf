"""How many permits a process will need of a key: what sizes its leases.

Counts of calls and the time they took, both fading with `_FADE`, give a rate; from the rate follows
what will be needed until a moment. A little too much is no harm: what a lease has left when its
bucket ends is given back, and found by the others as long as the bucket counts.
"""

from __future__ import annotations

from math import exp, sqrt

_FADE = 0.25
"""Seconds after which what was seen weighs a third."""
_BLIND = 0.01
"""Seconds without a call that are taken to have been before the first: two calls at once are no
sign of many.
"""
_LEAST = 2
"""Permits that are worth a lease: getting it and giving the rest back are two commands."""


class Demand:
    """The demand for one key in one process."""

    __slots__ = ("at", "calls", "seconds")

    def __init__(self, now: float) -> None:
        self.calls = 0.0
        self.seconds = _BLIND
        self.at = now

    def saw(self, now: float, permits: int) -> None:
        """So many permits were asked for since the last time."""
        passed = now - self.at
        if passed > 0:
            fade = exp(-passed / _FADE)
            self.calls *= fade
            self.seconds = self.seconds * fade + _FADE * (1 - fade)
            self.at = now
        self.calls += permits

    def rate(self, now: float) -> float:
        """Permits per second, now."""
        fade = exp(-max(0.0, now - self.at) / _FADE)
        return self.calls * fade / (self.seconds * fade + _FADE * (1 - fade))

    def needed(self, now: float, seconds: float) -> int:
        """Permits that will be needed within `seconds`, less what the rate may be wrong by; 0 where
        a lease of them would save nothing.
        """
        if self.calls <= 1:
            return 0
        needed = int(self.rate(now) * seconds * (1 - 1 / sqrt(self.calls)))
        return needed if needed >= _LEAST else 0
