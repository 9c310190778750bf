"""What this process knows and has counted of one circuit breaker.

    what                                                    event      becomes
    pending    calls that ended, by epoch and bucket        flush      in_flight
    in_flight  a batch that was sent under a number         reply      acknowledged
    in_flight                                               any error  sent again, same number
    ends       probes that ended, by their ids              reply      acknowledged
    probes     probes under way in this process             renew      under way
    probes                                                  end        in `ends`
    probes                                                  dropped    not renewed: given to another

The store takes each number of a sender once, and the end of a probe once, so both can be sent again
when their outcome is unknown. A probe is dropped where a signal handler has raised before its end
was recorded: nobody refers to it any more. Times in `_at` are monotonic seconds of this process;
`offset_ms` converts them to the store's clock.
"""

from __future__ import annotations

import math
from typing import NamedTuple
from weakref import ref

from .. import _fork
from ..core.breaker_record import CallCounts
from ..core.breaker_state import BreakerState
from ..core.key import AnyKey
from ..protocol.breaker_commands import ProbeAction
from .breaker_source import FollowedBreaker


class InFlightCalls(NamedTuple):
    """Counts that have been sent. They are sent again under the same number until a reply comes."""

    seq: int
    counts: tuple[CallCounts, ...]


class Probe:
    """A probe that a call of this process is."""

    __slots__ = ("__weakref__", "forks", "has_ended", "name", "probe_id", "renew_at")

    def __init__(self, name: tuple[str, bytes], probe_id: str, renew_at: float) -> None:
        self.name = name
        """The store, and the name of its breaker there."""
        self.probe_id = probe_id
        """Empty for one that is not the fleet's."""
        self.renew_at = renew_at
        """When it is to be renewed, monotonic seconds; infinite for never."""
        self.has_ended = False
        self.forks = _fork.forks

    @property
    def is_own(self) -> bool:
        """True in the process that has asked for it. A forked child only has a copy of its call."""
        return self.forks == _fork.forks


class BreakerKeyState(FollowedBreaker):
    """One breaker. Changed under the lock of the `BreakerStates` that it belongs to."""

    __slots__ = (
        "_probes", "ends", "epoch", "generation", "in_flight", "own_probe_until", "pending",
        "probe_asked", "retry_at", "state",
    )  # fmt: skip

    def __init__(self, key: AnyKey, name: bytes, offset_ms: float) -> None:
        super().__init__(key, name, offset_ms)
        self.state: BreakerState = "closed"
        self.epoch: int | None = None
        """None until the store's first reply."""
        self.generation = 0
        """0 while nothing is known; it grows with each change of state that is learned of."""
        self.retry_at = 0.0
        """No call is let through before, unless the breaker is closed."""
        self.probe_asked = False
        """True while a caller asks the store for a probe."""
        self.own_probe_until = -math.inf
        """Until then a probe of this process alone is under way, as the store does not answer."""
        self.pending: dict[tuple[int, int], list[int]] = {}
        """Total and bad calls, by epoch and start of the bucket (ms)."""
        self.in_flight: InFlightCalls | None = None
        self.ends: dict[str, ProbeAction] = {}
        self._probes: list[ref[Probe]] = []

    @property
    def has_counts(self) -> bool:
        """True if there is anything that the store has not acknowledged."""
        return bool(self.pending or self.in_flight or self.ends)

    def add_probe(self, probe: Probe) -> None:
        """Note that `probe` is under way, as long as its call refers to it."""
        self._probes.append(ref(probe))
        self.renew_at = min(self.renew_at, probe.renew_at)

    def probes_under_way(self) -> list[Probe]:
        """Return the probes under way, forget the others, and set `renew_at`."""
        if not self._probes:
            return []
        found = [probe for one in self._probes if (probe := one()) and not probe.has_ended]
        self._probes = [ref(probe) for probe in found]
        self.renew_at = min((probe.renew_at for probe in found), default=math.inf)
        return found

    def count(self, epoch: int, start_ms: int, bad: bool) -> None:
        """Count one call that ended."""
        counted = self.pending.get((epoch, start_ms))
        if counted is None:
            counted = self.pending[epoch, start_ms] = [0, 0]
        counted[0] += 1
        counted[1] += bad

    def drop_before(self, start_ms: int) -> int:
        """Drop the counts of buckets that begin before `start_ms`, as no window has them any more.
        Return how many calls they were.
        """
        dropped = 0
        for at in [at for at in self.pending if at[1] < start_ms]:
            dropped += self.pending.pop(at)[0]
        batch = self.in_flight
        if batch is not None and all(c.start < start_ms for c in batch.counts):
            dropped += sum(c.total for c in batch.counts)
            self.in_flight = None
        return dropped

    def unacknowledged(self) -> int:
        """Return how many calls, and ends of probes, the store has not acknowledged."""
        sent = self.in_flight.counts if self.in_flight is not None else ()
        # A copy: callers add to it meanwhile.
        waiting = sum(counted[0] for counted in list(self.pending.values()))
        return waiting + sum(c.total for c in sent) + len(self.ends)
