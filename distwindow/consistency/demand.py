"""How many permits a process will need of a key: what sizes its leases.

Counts of calls and the time they took, both fading with `_FADE`, give a rate; from the rate follows
what will be needed until a moment. A little too much is no harm: what a lease has left when its
bucket ends is given back, and found by the others as long as the bucket counts.
"""

from __future__ import annotations

from math import exp, sqrt

_FADE_S = 0.25
"""Seconds after which what was seen weighs a third."""
_UNKNOWN_S = 0.01
"""Seconds without a call that are taken to have been before the first: two calls at once are no
sign of many.
"""
_MIN_LEASE = 2
"""Permits that are worth a lease: getting it and giving the rest back are two commands."""


class Demand:
    """The demand for one key in one process."""

    __slots__ = ("calls", "observed_at", "observed_s")

    def __init__(self, now: float) -> None:
        self.calls = 0.0
        self.observed_s = _UNKNOWN_S
        self.observed_at = now

    def observe(self, now: float, permits: int) -> None:
        """So many permits were asked for since the last time."""
        passed = now - self.observed_at
        if passed > 0:
            fade = exp(-passed / _FADE_S)
            self.calls *= fade
            self.observed_s = self.observed_s * fade + _FADE_S * (1 - fade)
            self.observed_at = now
        self.calls += permits

    def rate(self, now: float) -> float:
        """Permits per second, now."""
        fade = exp(-max(0.0, now - self.observed_at) / _FADE_S)
        return self.calls * fade / (self.observed_s * fade + _FADE_S * (1 - fade))

    def permits_needed(self, now: float, seconds: float) -> int:
        """Permits that will be needed within `seconds`, less what the rate may be wrong by; 0 where
        a lease of them would save nothing.
        """
        if self.calls <= 1:
            return 0
        needed = int(self.rate(now) * seconds * (1 - 1 / sqrt(self.calls)))
        return needed if needed >= _MIN_LEASE else 0
