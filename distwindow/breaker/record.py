"""A circuit breaker as stores keep it: the specification of `lua/shared/breaker.lua` and
`lua/breaker_adaptive.lua`.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from ..errors import Blocked, short_repr
from ..ring.key import AnyKey
from ..sentinel.circuit_breakers import BreakerState
from .rules import BreakerRule

CLOSED, OPEN, HALF_OPEN = range(3)
STATES: tuple[BreakerState, ...] = ("closed", "open", "half_open")
"""The states by the number that scripts and replies use for them."""
KEPT_MS = 3_600_000
"""How long a breaker that is not closed, and that nobody calls, is kept beyond its times."""
MAX_TOTAL = 10**13
"""No bucket counts further, so that sums stay exact in Lua's doubles."""


class BreakerRecord:
    """One breaker. Not locked. Times are ms of the store's clock.

    closed      counts calls that ended; opens when the rule's threshold is reached
    open        counts nothing; from `retry_ms` on, the first probe that is asked for is handed out
    half_open   hands out probes; closes when enough have succeeded, opens when one has failed

    Each change of state begins a new *epoch*: a number that is the time of the change in ms, or one
    more than the epoch before if that is later. Counts carry the epoch in which their calls were
    let through, and those of an earlier epoch are dropped, so counts that arrive late cannot open a
    breaker that has been closed since.
    """

    __slots__ = ("buckets", "epoch", "expires_at_ms", "in_a_row", "probes", "retry_ms", "state")

    def __init__(self) -> None:
        self.state = CLOSED
        self.epoch = 0
        self.retry_ms = 0
        """When an open breaker may hand out a probe."""
        self.in_a_row = 0
        """Ends towards the next state: of a half-open breaker the probes that have succeeded, of a
        closed one whose rule says how many in a row the failures since the last success.
        """
        self.expires_at_ms = 0
        """From then on the breaker is as if it had never been."""
        self.probes: dict[str, int] = {}
        """The deadlines of the probes that are under way, by their ids."""
        self.buckets: dict[int, tuple[int, int, int]] = {}
        """By slot (number modulo the number of buckets): the bucket's number, total and bad."""

    def totals(self, rule: BreakerRule, now: int) -> tuple[int, int]:
        """Return the calls in the window, and the bad ones among them."""
        counts = self._window(rule, now)
        return sum(c[0] for c in counts), sum(c[1] for c in counts)

    def _window(self, rule: BreakerRule, now: int) -> list[tuple[int, int]]:
        """Return the same by bucket, the oldest first; failures in a row as one bucket."""
        if rule.measure == "in_a_row":
            failures = self.in_a_row if self.state == CLOSED else 0
            return [(failures, failures)]
        newest = now // rule.bucket_ms
        live = sorted(b for b in self.buckets.values() if newest - rule.buckets < b[0] <= newest)
        return [(total, bad) for _, total, bad in live]

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
            if rule.measure == "in_a_row":
                # As many as the rule says open it, whatever follows.
                if self.in_a_row < rule.threshold:
                    self.in_a_row = bad + (self.in_a_row if bad == total else 0)
                continue
            known, known_total, known_bad = self.buckets.get(number % rule.buckets, (-1, 0, 0))
            if known != number:
                known_total = known_bad = 0
            total, bad = min(known_total + total, MAX_TOTAL), min(known_bad + bad, MAX_TOTAL)
            self.buckets[number % rule.buckets] = (number, total, bad)
        self._keep(rule, now)
        if rule.reached_by(self._window(rule, now)):
            self.open(rule, now)

    def take_probe(self, rule: BreakerRule, probe_id: str, now: int) -> bool:
        """Hand out the probe `probe_id` if there is one to be had. May be asked again."""
        if self.state == CLOSED:
            return False
        if self.state == OPEN:
            if self.retry_in_ms(rule, now):
                return False
            self._change(HALF_OPEN, now)
        alive = {i: d for i, d in self.probes.items() if _wait_ms(d, now, rule.probe_ms)}
        if probe_id in self.probes or len(alive) + self.in_a_row < rule.probes:
            self.probes = {**alive, probe_id: now + rule.probe_ms}
            self._keep(rule, now)
            return True
        return False

    def renew_probe(self, rule: BreakerRule, probe_id: str, now: int) -> bool:
        """Renew a probe, as its process lives: it has its whole time again, also where that had run
        out, and the probe is not replaced. Return False for one that is not under way.
        """
        if self.state != HALF_OPEN or probe_id not in self.probes:
            return False
        self.probes[probe_id] = now + rule.probe_ms
        self._keep(rule, now)
        return True

    def end_probe(self, rule: BreakerRule, probe_id: str, outcome: str, now: int) -> bool:
        """End a probe: `succeed`, `fail`, or `free` if it says nothing about the service. Return
        False for a probe that is not under way, which changes nothing.
        """
        if self.state != HALF_OPEN or probe_id not in self.probes:
            return False
        del self.probes[probe_id]
        if outcome == "fail":
            self.open(rule, now)
            return True
        self.in_a_row += outcome == "succeed"
        if self.in_a_row >= rule.probes:
            self.close(rule, now)
        else:
            self._keep(rule, now)
        return True

    def retry_in_ms(self, rule: BreakerRule, now: int) -> int:
        """Return in how many ms a call may be let through; 0 for now."""
        if self.state == OPEN:
            return _wait_ms(self.retry_ms, now, rule.open_ms)
        if self.state == CLOSED:
            return 0
        waits = [wait for d in self.probes.values() if (wait := _wait_ms(d, now, rule.probe_ms))]
        return min(waits) if len(waits) + self.in_a_row >= rule.probes else 0

    def open(self, rule: BreakerRule, now: int) -> None:
        """Open it for the whole `open_for`, whatever its state is."""
        self.retry_ms = now + rule.open_ms
        self._change(OPEN, now)
        self._keep(rule, now)

    def close(self, rule: BreakerRule, now: int) -> None:
        """Close it, and count afresh, whatever its state is."""
        self.buckets = {}
        self._change(CLOSED, now)
        self._keep(rule, now)

    def _change(self, state: int, now: int) -> None:
        self.state = state
        self.epoch = max(self.epoch + 1, now)
        self.in_a_row = 0
        self.probes = {}

    def _keep(self, rule: BreakerRule, now: int) -> None:
        if self.state == CLOSED:
            self.expires_at_ms = (now // rule.bucket_ms + rule.buckets + 1) * rule.bucket_ms
            if self.in_a_row:
                self.expires_at_ms += rule.open_ms
        else:
            until = self.retry_ms if self.state == OPEN else now + rule.probe_ms
            self.expires_at_ms = max(until, now) + rule.window_ms + KEPT_MS


class CallCounts(NamedTuple):
    """Calls that were let through in `epoch`, and ended in the bucket of `start` (ms), in the order
    in which they ended.
    """

    epoch: int
    start: int
    total: int
    bad: int
    """The bad ones among them; of a rule with failures in a row those after the last good one."""


def _wait_ms(until: int, now: int, longest: int) -> int:
    """Return the ms from `now` until then, 0 if that has come. A time that is further ahead than
    was ever set is from before the clock was set back, and has come.
    """
    wait = until - now
    return wait if 0 < wait <= longest else 0


class BreakerChange(NamedTuple):
    """A change of state, as listeners get it: between two looks of one process."""

    key: AnyKey
    previous: BreakerState
    state: BreakerState
    at_ms: int
    """When `state` began, by the store's clock: ms since the epoch; 0 if it does not know."""


class BreakerOpen(Blocked):  # the usual name for it, hence no "Error"
    """A call was refused by a circuit breaker.

    `.key` is the breaker's key, `.state` is `"open"` or `"half_open"` (probes are under way), or
    `"closed"` from an adaptive breaker, which has no states. `.retry_after` is in seconds: no call
    will be let through before. Of an adaptive breaker it is when one is let through at the latest.
    """

    def __init__(self, key: AnyKey, state: BreakerState, retry_after: float) -> None:
        super().__init__(key, state, retry_after)
        self.key = key
        self.state = state
        self.retry_after = retry_after

    def __str__(self) -> str:
        state = {"closed": "refusing", "open": "open", "half_open": "half-open"}[self.state]
        return (
            f"the circuit breaker of {short_repr(self.key)} is {state}; "
            f"retry in {self.retry_after:.3f} s{self._rule_text()}"
        )


class AdaptiveRecord:
    """One adaptive breaker: its calls, and its last pass. Not locked. Times are the store's, ms."""

    __slots__ = ("buckets", "expires_at_ms", "passed_ms")

    def __init__(self) -> None:
        self.expires_at_ms = 0
        self.buckets: dict[int, tuple[int, int, int, int]] = {}
        """By slot: the bucket's number, successes, failures and drops."""
        self.passed_ms = 0

    def live_counts(
        self, counts: Iterable[AdaptiveCounts], bucket_ms: int, span: int, now: int
    ) -> list[tuple[int, int, int, int]]:
        """Return the counts whose bucket is in the window, by its number. What ended after now is
        counted in the newest bucket.
        """
        newest = now // bucket_ms
        placed = ((min(newest, c.start // bucket_ms), c) for c in counts)
        return [(n, c.success, c.failure, c.drop) for n, c in placed if n > newest - span]

    def add(self, live: Iterable[tuple[int, int, int, int]], span: int) -> None:
        """Add what `live_counts` returned."""
        for number, *counted in live:
            known = self.buckets.get(number % span, (-1, 0, 0, 0))
            if known[0] == number:
                counted = [min(a + b, MAX_TOTAL) for a, b in zip(known[1:], counted, strict=True)]
            success, failure, drop = counted
            self.buckets[number % span] = (number, success, failure, drop)

    def note_pass(self, passed_ms: int, force_ms: int, now: int) -> tuple[bool, int]:
        """Record when a call last passed. With `force_ms` above 0, claim a pass: it is granted if
        there was one, and the last is longer than that ago. Return whether, and the last pass.
        """
        # A time ahead of now is from before the clock was set back.
        known = min(self.passed_ms, now)
        last = max(known, min(passed_ms, now))
        forced = 0 < force_ms < now - last and last > 0
        if forced:
            last = now
        if last > known:
            self.passed_ms = last
        return forced, last

    def window(self, bucket_ms: int, span: int, now: int) -> list[AdaptiveCounts]:
        """Return the buckets of the window, oldest first."""
        newest = now // bucket_ms
        live = sorted(b for b in self.buckets.values() if newest - span < b[0] <= newest)
        return [AdaptiveCounts(number * bucket_ms, *counted) for number, *counted in live]


class AdaptiveCounts(NamedTuple):
    """The calls of the bucket that begins at `start` (ms)."""

    start: int
    success: int
    failure: int
    drop: int

    @property
    def calls(self) -> int:
        """All calls, those that were dropped included."""
        return self.success + self.failure + self.drop
