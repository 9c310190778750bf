"""How many permits a process will need of a key, which sizes its leases.

Two sums decay exponentially with the time constant `_DECAY_TIME_S`: the permits that were asked
for, and the seconds that were observed. Their quotient is a rate, and the rate gives what will be
needed until a moment. An estimate that is a little too high costs little: what a lease has left
when its bucket ends is given back, and other processes can use it as long as the bucket counts.
"""

from __future__ import annotations

from math import exp, sqrt

from ..protocol.commands import Acquire

_DECAY_TIME_S = 0.25
"""Seconds after which an observation weighs 1/e."""
_INITIAL_OBSERVED_S = 0.01
"""Seconds without a call that are assumed before the first one, as two calls at once do not mean
that many more follow.
"""
_MIN_LEASE_PERMITS = 2
"""A lease of fewer permits saves no command: fetching it and refunding the rest are two commands.
"""
_MIN_PERMITS = 2
"""Permits asked for lately, faded, below which no key gets its first lease. Most keys may be called
two or three times only, and `permits_needed` takes a tenth of the processor time of such a call.
"""
_FAR_APART_S = _DECAY_TIME_S / 4
"""Calls of cost 1 that are farther apart never add up to the demand for `_MIN_LEASE_PERMITS`: with
`permits` at 4, needed are 4 * (1 - 1 / sqrt(4)) = 2.
"""


class Demand:
    """The demand for one key in one process."""

    __slots__ = ("observed_at", "observed_s", "permits")

    def __init__(self, now: float) -> None:
        self.permits = 0.0
        """Permits that were asked for, faded."""
        self.observed_s = _INITIAL_OBSERVED_S
        """Seconds in which they were, faded."""
        self.observed_at = now
        """Monotonic seconds."""

    def observe(self, now: float, permits: int) -> None:
        """Take in that `permits` were asked for since the last observation."""
        elapsed_s = now - self.observed_at
        if elapsed_s > 0:
            fade = exp(-elapsed_s / _DECAY_TIME_S)
            self.permits *= fade
            self.observed_s = self.observed_s * fade + _DECAY_TIME_S * (1 - fade)
            self.observed_at = now
        self.permits += permits

    def rate(self, now: float) -> float:
        """Return the permits per second that are asked for at `now`."""
        fade = exp(-max(0.0, now - self.observed_at) / _DECAY_TIME_S)
        return self.permits * fade / (self.observed_s * fade + _DECAY_TIME_S * (1 - fade))

    def permits_needed(self, now: float, seconds: float) -> int:
        """Return the permits that will be needed within `seconds`, less the standard error of the
        rate; 0 if a lease of them would save no command.
        """
        if self.permits <= 1:
            return 0
        needed = int(self.rate(now) * seconds * (1 - 1 / sqrt(self.permits)))
        return needed if needed >= _MIN_LEASE_PERMITS else 0


def worth_lease(command: Acquire, now: float, seconds: float) -> bool:
    """For a key without a key state: true if a lease for `seconds` would save commands. If not,
    take in a call of `command`.

    Most keys may be called too seldom for a lease, and their calls are to cost no more than in
    `direct`. So the demand of such a key is kept in its command, and as long as its calls are far
    apart that is only the time of the last one. (Threads share it without a lock: an observation
    that is lost delays a lease by one call.)
    """
    demand = command.unleased_demand
    cost = command.charges[0].cost
    if demand.__class__ is not Demand:
        if cost == 1 and now - demand > _FAR_APART_S:
            command.unleased_demand = now
            return False
        called_at = demand
        demand = Demand(called_at or now)
        if called_at:
            demand.observe(called_at, cost)
        command.unleased_demand = demand
    if demand.permits >= _MIN_PERMITS and demand.permits_needed(now, seconds):
        return True
    demand.observe(now, cost)
    return False


def take_demand(command: Acquire, now: float) -> Demand:
    """Return the demand that `worth_lease` has kept in `command`, for the key state that its key
    gets; a new one if there is none.
    """
    demand, command.unleased_demand = command.unleased_demand, 0.0
    return demand if isinstance(demand, Demand) else Demand(now)
