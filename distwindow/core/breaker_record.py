"""A circuit breaker as stores keep it: the specification of `lua/shared/breaker.lua`.

    closed      counts calls that ended; opens when the rule's threshold is reached
    open        counts nothing; from `retry_ms` on, the first probe that is asked for is handed out
    half_open   hands out probes; closes when enough have succeeded, opens when one has failed

Each change of state begins a new *epoch*: a number that is the time of the change in ms, or one
more than the epoch before if that is later. Counts carry the epoch in which their calls were let
through, and those of an earlier epoch are dropped, so counts that arrive late cannot open a breaker
that has been closed since.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from .breaker_rules import BreakerRule

CLOSED, OPEN, HALF_OPEN = range(3)

KEPT_MS = 3_600_000
"""How long a breaker that is not closed, and that nobody calls, is kept beyond its times."""
MAX_TOTAL = 10**13
"""No bucket counts further, so that sums stay exact in Lua's doubles."""


class CallCounts(NamedTuple):
    """Calls that were let through in `epoch`, and ended in the bucket of `start` (ms)."""

    epoch: int
    start: int
    total: int
    bad: int


class BreakerRecord:
    """One breaker. Not locked. Times are ms of the store's clock."""

    __slots__ = ("buckets", "epoch", "expires_ms", "probes", "retry_ms", "state", "succeeded")

    def __init__(self) -> None:
        self.state = CLOSED
        self.epoch = 0
        self.retry_ms = 0
        """When an open breaker may hand out a probe."""
        self.succeeded = 0
        """Probes that have succeeded since the breaker turned half-open."""
        self.expires_ms = 0
        """From then on the breaker is as if it had never been."""
        self.probes: dict[str, int] = {}
        """The deadlines of the probes that are under way, by their ids."""
        self.buckets: dict[int, tuple[int, int, int]] = {}
        """By slot (number modulo the number of buckets): the bucket's number, total and bad."""

    def totals(self, rule: BreakerRule, now: int) -> tuple[int, int]:
        """Return the calls in the window, and the bad ones among them."""
        newest = now // rule.bucket_ms
        live = [b for b in self.buckets.values() if newest - rule.buckets < b[0] <= newest]
        return sum(b[1] for b in live), sum(b[2] for b in live)

    def live_counts(
        self, rule: BreakerRule, counts: Iterable[CallCounts], now: int
    ) -> list[tuple[int, int, int]]:
        """Return (number, total, bad) of the counts that a closed breaker takes: those of its epoch
        whose bucket is in the window. What ended after now is counted in the newest bucket.
        """
        if self.state != CLOSED:
            return []
        newest = now // rule.bucket_ms
        placed = ((c, min(newest, c.start // rule.bucket_ms)) for c in counts)
        return [
            (number, c.total, c.bad)
            for c, number in placed
            if c.epoch >= self.epoch and number > newest - rule.buckets
        ]

    def add(self, rule: BreakerRule, live: Iterable[tuple[int, int, int]], now: int) -> None:
        """Add what `live_counts` returned, and open the breaker if the rule says so."""
        for number, total, bad in live:
            known, known_total, known_bad = self.buckets.get(number % rule.buckets, (-1, 0, 0))
            if known != number:
                known_total = known_bad = 0
            total, bad = min(known_total + total, MAX_TOTAL), min(known_bad + bad, MAX_TOTAL)
            self.buckets[number % rule.buckets] = (number, total, bad)
        self.expires_ms = (now // rule.bucket_ms + rule.buckets + 1) * rule.bucket_ms
        total, bad = self.totals(rule, now)
        if rule.reached_by(bad, total):
            self._open(rule, now)

    def take_probe(self, rule: BreakerRule, probe_id: str, now: int) -> bool:
        """Hand out the probe `probe_id` if there is one to be had. May be asked again."""
        if self.state == CLOSED:
            return False
        if self.state == OPEN:
            if self._retry_in_ms(rule, now):
                return False
            self._change(HALF_OPEN, now)
        alive = {i: d for i, d in self.probes.items() if _wait_ms(d, now, rule.probe_ms)}
        if probe_id in self.probes or len(alive) + self.succeeded < rule.probes:
            self.probes = {**alive, probe_id: now + rule.probe_ms}
            self._keep(rule, now)
            return True
        return False

    def renew_probe(self, rule: BreakerRule, probe_id: str, now: int) -> bool:
        """Take in that the process of a probe lives: it has its whole time again, also where that
        had run out, and the probe is not replaced. Return False for one that is not under way.
        """
        if self.state != HALF_OPEN or probe_id not in self.probes:
            return False
        self.probes[probe_id] = now + rule.probe_ms
        self._keep(rule, now)
        return True

    def end_probe(self, rule: BreakerRule, probe_id: str, outcome: str, now: int) -> bool:
        """Take in that a probe ended: `succeed`, `fail`, or `free` if it says nothing about the
        service. Return False for a probe that is not under way, which changes nothing.
        """
        if self.state != HALF_OPEN or probe_id not in self.probes:
            return False
        del self.probes[probe_id]
        if outcome == "fail":
            self._open(rule, now)
            return True
        self.succeeded += outcome == "succeed"
        if self.succeeded >= rule.probes:
            self.buckets = {}
            self._change(CLOSED, now)
        self._keep(rule, now)
        return True

    def retry_in_ms(self, rule: BreakerRule, now: int) -> int:
        """Return in how many ms a call may be let through; 0 for now."""
        if self.state == OPEN:
            return self._retry_in_ms(rule, now)
        if self.state == CLOSED:
            return 0
        waits = [wait for d in self.probes.values() if (wait := _wait_ms(d, now, rule.probe_ms))]
        return min(waits) if len(waits) + self.succeeded >= rule.probes else 0

    def _retry_in_ms(self, rule: BreakerRule, now: int) -> int:
        return _wait_ms(self.retry_ms, now, rule.open_ms)

    def _open(self, rule: BreakerRule, now: int) -> None:
        self.retry_ms = now + rule.open_ms
        self._change(OPEN, now)
        self._keep(rule, now)

    def _change(self, state: int, now: int) -> None:
        self.state = state
        self.epoch = max(self.epoch + 1, now)
        self.succeeded = 0
        self.probes = {}

    def _keep(self, rule: BreakerRule, now: int) -> None:
        if self.state == CLOSED:
            self.expires_ms = (now // rule.bucket_ms + rule.buckets + 1) * rule.bucket_ms
        else:
            until = self.retry_ms if self.state == OPEN else now + rule.probe_ms
            self.expires_ms = max(until, now) + rule.window_ms + KEPT_MS


def _wait_ms(until: int, now: int, longest: int) -> int:
    """Return the ms from `now` until then, 0 if that has come. A time that is further ahead than
    was ever set is from before the clock was set back, and has come.
    """
    wait = until - now
    return wait if 0 < wait <= longest else 0
