"""The ring as Redis holds it, in memory: LeapArray semantics with a running total.

This is the specification of `lua/shared/ring.lua`, and what `memory://` runs on. It differs from
`LeapArray` where a shared limit must: time never goes back (Sentinel hands out a detached bucket
and loses its count), and a total is kept so that admission costs the same for any bucket count.

    number   start of a bucket in widths since the epoch
    window   the `span` buckets up to the newest; older ones are dropped when a bucket opens
"""

from __future__ import annotations

from collections.abc import Iterable

from .stats import Bucket, RingState

MAX_TOTAL = 10**13
"""The largest total: up to here, and no further, Lua adds exactly and writes plain digits."""


class Ring:
    """One resource's window. Not locked: its owner is. All times are ms since the epoch."""

    __slots__ = (
        "_passed",
        "_tallies",
        "bucket_ms",
        "closed_total",
        "limit",
        "newest",
        "span",
        "start",
        "used",
    )  # fmt: skip

    def __init__(self, width: int, span: int, now: int, limit: str) -> None:
        self.bucket_ms = width
        self.span = span
        self._open(now, limit)

    def _open(self, now: int, limit: str) -> None:
        self.newest = now // self.bucket_ms
        self.start = self.newest * self.bucket_ms
        self.used = 0
        self.closed_total = 0
        self.limit = limit
        self._passed: dict[int, int] = {}
        self._tallies: dict[int, list[int]] = {}

    def copy(self) -> Ring:
        """A ring of the same content that can be turned without a trace."""
        twin = Ring.__new__(Ring)
        twin.bucket_ms, twin.span = self.bucket_ms, self.span
        twin.newest, twin.start = self.newest, self.start
        twin.used, twin.closed_total, twin.limit = self.used, self.closed_total, self.limit
        twin._passed = dict(self._passed)
        twin._tallies = {number: list(tally) for number, tally in self._tallies.items()}
        return twin

    def is_stale(self, now: int) -> bool:
        """Is nothing of this ring in the window of `now`: all expired, or all from a future?"""
        behind = now // self.bucket_ms - self.newest >= self.span
        return behind or self.start - now > self.bucket_ms * self.span

    def rotate(self, now: int, limit: str) -> None:
        """Make the newest bucket that of `now`, dropping what has left the window.

        Time never goes back: an earlier `now` counts as the newest bucket's, unless the ring is
        ahead by more than its window; then it is lost state (the clock was set back) and emptied.
        """
        if self.is_stale(now):
            self._open(now, limit)
            return
        steps = now // self.bucket_ms - self.newest
        if steps > 0:
            counts, tallies = self._passed, self._tallies
            oldest = self.newest + 1 - self.span + steps
            gone, stale = 0, False
            for number in range(oldest - steps, oldest):
                if number in counts or number in tallies:
                    stale = True
                    gone += counts.get(number, 0)
            if stale:
                counts = {number: count for number, count in counts.items() if number >= oldest}
                tallies = {number: tally for number, tally in tallies.items() if number >= oldest}
            passed, closed = self.used - self.closed_total, self.used - gone
            # From here on without a call, so that no signal handler raises in between.
            if passed:
                counts[self.newest] = passed
            self._passed, self._tallies = counts, tallies
            self.newest += steps
            self.start = self.newest * self.bucket_ms
            self.used = self.closed_total = closed
            self.limit = limit

    def block(self, amount: int) -> None:
        """Count refused permits in the newest bucket."""
        self._tallies.setdefault(self.newest, [0, 0, 0, 0, 0])[0] += amount

    def add(self, buckets: Iterable[Bucket]) -> bool:
        """Add counts to the buckets they were counted in; is any of them in the window? What is
        ahead of the newest bucket counts in that.

        An expired ring has to be turned before.
        """
        floor = self.newest - self.span
        live = [b for b in buckets if b.start // self.bucket_ms > floor]
        for bucket in live:
            number = min(self.newest, bucket.start // self.bucket_ms)
            passed = min(bucket.passed, MAX_TOTAL - self.used)
            if passed:
                known = self._passed.get(number, 0)
                self.used += passed
                if number < self.newest:
                    self.closed_total += passed
                    self._passed[number] = known + passed
            self._add_tallies(number, bucket)
        return bool(live)

    def _add_tallies(self, number: int, seen: Bucket) -> None:
        if not (seen.blocked or seen.success or seen.error):
            return
        tally = self._tallies.setdefault(number, [0, 0, 0, 0, 0])
        tally[0] += seen.blocked
        if seen.success or seen.error:
            least = seen.rt_min_ms or 0
            tally[4] = min(tally[4], least) if tally[1] or tally[2] else least
            tally[1] += seen.success
            tally[2] += seen.error
            tally[3] += seen.rt_sum_ms

    def passed(self) -> dict[int, int]:
        """The passes of the window by the start of their bucket, the newest always among them."""
        passed = {number * self.bucket_ms: count for number, count in self._passed.items() if count}
        passed[self.start] = self.used - self.closed_total
        return passed

    def refund(self, amount: int, start: int) -> int:
        """Take up to `amount` out of the bucket that began at `start`; how much was there."""
        number = start // self.bucket_ms
        if number == self.newest:
            back = min(amount, self.used - self.closed_total)
        elif self.newest - self.span < number < self.newest:
            back = min(amount, self._passed.get(number, 0))
            if back:
                self._passed[number] -= back
                self.closed_total -= back
        else:
            return 0
        self.used -= back
        return back

    def room_at_ms(self, need: int) -> int:
        """When the oldest buckets that together hold `need` permits have left the window."""
        for number in range(self.newest + 1 - self.span, self.newest):
            need -= self._passed.get(number, 0)
            if need <= 0:
                return (number + self.span) * self.bucket_ms
        return (self.newest + self.span) * self.bucket_ms

    def empty_at_ms(self) -> int:
        """When the newest bucket that holds a permit leaves the window; 0 when there is none."""
        if self.used > self.closed_total:
            return (self.newest + self.span) * self.bucket_ms
        if self.used == 0:
            return 0
        newest = max(number for number, passed in self._passed.items() if passed)
        return (newest + self.span) * self.bucket_ms

    def state(self) -> RingState:
        """Everything there is, as a value."""
        passed = dict(self._passed)
        passed[self.newest] = self.used - self.closed_total
        buckets = []
        for number in sorted(passed.keys() | self._tallies.keys()):
            block, success, error, rt_sum, rt_min = self._tallies.get(number, (0, 0, 0, 0, 0))
            count = passed.get(number, 0)
            least = rt_min if success or error else None
            bucket = Bucket(number * self.bucket_ms, count, block, success, error, rt_sum, least)
            if count or block or success or error:
                buckets.append(bucket)
        return RingState(self.start, self.used, self.closed_total, self.limit, tuple(buckets))


class SenderRecords:
    """Which flushes a ring has taken: of each sender the last `seq`, and the newest bucket then.

    They outlive the ring: a flush that was taken before a reset is not taken again after it. A
    record holds until its bucket has left the window, because whatever its sender may send again
    has then left it, too. After that it counts as none, so nobody can tell when it is deleted.
    """

    __slots__ = ("_records", "expires_at")

    def __init__(self) -> None:
        self._records: dict[str, tuple[int, int]] = {}
        self.expires_at = 0
        """When no record holds any more, ms since the epoch."""

    def has(self, sender: str, seq: int, ring: Ring) -> bool:
        """Has `ring` taken this flush of `sender`, or a later one?"""
        last, number = self._records.get(sender, (-1, ring.newest - ring.span))
        return seq <= last and number > ring.newest - ring.span

    def remember(self, sender: str, seq: int, ring: Ring, now: int) -> None:
        """`ring` has taken this flush of `sender`."""
        if sender not in self._records:
            floor = ring.newest - ring.span
            self._records = {who: last for who, last in self._records.items() if last[1] > floor}
        self._records[sender] = (seq, ring.newest)
        self.expires_at = max(ring.start, now) + (ring.span + 1) * ring.bucket_ms
