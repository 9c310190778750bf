"""How many permits a process will surely need of a key: what sizes its leases.

Counts of calls and the time they took, both fading with `_FADE`, give a rate. From the rate follows
what is needed until a moment, and from the count how well the rate is known. Leased is what will
be needed with near certainty (two standard deviations below the mean), because a permit that is
leased and not spent is one that nobody else gets:

    calls known    rate * time    leased
             3             10         0     too little is known
            50             10         2     could as well be 4
          1000           1000       910
"""

from __future__ import annotations

from math import exp, sqrt

_FADE = 0.25
"""Seconds after which what was seen weighs a third."""
_BLIND = 0.01
"""Seconds without a call that are taken to have been before the first: two calls at once are no
sign of many.
"""


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

    def surely(self, now: float, seconds: float) -> int:
        """Permits that will be needed within `seconds`, with near certainty."""
        mean = self.rate(now) * seconds
        if mean < 1:
            return 0
        return max(0, int(mean - 2 * sqrt(mean + mean * mean / max(1.0, self.calls))))
