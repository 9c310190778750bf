"""The ring of buckets (Sentinel's LeapArray) as stores keep it; specifies `lua/shared/ring.lua`."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TypeAlias

from .borrowed import BorrowedPermits, window_sums
from .stats import Bucket, RingState

MAX_TOTAL = 10**13
"""The largest total: up to here Lua adds exactly and writes plain digits."""
RETIRED_START = 10**18
"""The start of a ring that its store has dropped: no time is in its newest bucket, so who has kept
the ring looks for the present one.
"""
StoredRefusal: TypeAlias = "tuple[int, int, int, int, list[int], tuple[int, int, int]]"
"""A refusal in the newest bucket: (amount of the limit, `used`, least and greatest cost, counters
of the bucket, (permits left, ms at which there is room, ms at which the window is empty)). It holds
for calls of such a cost as long as the ring is not rotated, and `used` and the closed buckets are
unchanged. A plain tuple is unpacked fastest.
"""


class Ring:
    """The buckets of one limit of one key, by ms since the epoch. Callers hold the store's lock.

    The ring, which `memory://` uses, too, differs from `LeapArray` in two points that a shared
    limit needs. Time never goes back, where Sentinel returns a detached bucket and loses what is
    counted in it. And it keeps a total, so that admission costs the same for any number of buckets.

      number         start of a bucket divided by the length of a bucket
      window         the `span` buckets up to the newest; earlier ones go when a bucket opens
      used           permits counted in the window, with which admission compares the limit
      closed_total   permits counted in the closed buckets: all but the newest
      refusal        the last refusal, to be repeated (`StoredRefusal`)
      borrowed_permits   what is borrowed from buckets that have not begun (`borrowed.py`)
      peak           permits in the fullest window that a call in the newest bucket counts in
    """

    __slots__ = (
        "_closed_passed", "_counters", "borrowed_permits", "bucket_ms", "closed_total", "limit",
        "newest_number", "refusal", "shortcut_start", "span", "start", "used",
    )  # fmt: skip

    def __init__(self, bucket_ms: int, span: int, now: int, limit: str) -> None:
        self.bucket_ms = bucket_ms
        self.span = span
        self._open(now, limit)

    def _open(self, now: int, limit: str) -> None:
        counters = RingCounters()
        # No call follows, so no signal handler can raise in between.
        self.newest_number = now // self.bucket_ms
        self.start = self.newest_number * self.bucket_ms
        self.used = 0
        self.closed_total = 0
        self.limit = limit
        self._closed_passed: dict[int, int] = {}
        """Permits of the closed buckets, by bucket number."""
        self._counters = counters
        self.refusal: StoredRefusal | None = None
        self.borrowed_permits: BorrowedPermits | None = None
        self.shortcut_start = self.start
        """`start` if `used` decides a plain call; `RETIRED_START` while permits are borrowed."""

    def copy(self) -> Ring:
        """Return a ring of the same content, which can be rotated without changing this one."""
        twin = Ring.__new__(Ring)
        twin.bucket_ms, twin.span = self.bucket_ms, self.span
        twin.replace_with(self)
        twin._closed_passed = dict(self._closed_passed)
        twin._counters = self._counters.twin()
        return twin

    def replace_with(self, twin: Ring) -> None:
        """Take over the content of `twin`. No call, so no signal handler can raise in between."""
        self.newest_number, self.start = twin.newest_number, twin.start
        self.used, self.closed_total, self.limit = twin.used, twin.closed_total, twin.limit
        self._closed_passed, self._counters = twin._closed_passed, twin._counters
        self.refusal = None
        self.borrowed_permits, self.shortcut_start = twin.borrowed_permits, twin.shortcut_start

    def is_stale(self, now: int) -> bool:
        """True if no bucket is in the window of `now`: all expired, or all far ahead of `now`."""
        behind = now // self.bucket_ms - self.last_number >= self.span
        return behind or self.start - now > self.bucket_ms * self.span

    def rotate(self, now: int, limit: str) -> None:
        """Open the bucket of `now`, and drop the buckets that have expired.

        Time never goes back: the newest bucket stays the newest at an earlier `now`. But a ring
        that is ahead by more than its window, because the clock was set back far, is emptied.
        """
        if self.is_stale(now):
            self._open(now, limit)
            return
        steps = now // self.bucket_ms - self.newest_number
        if steps > 0 and self.borrowed_permits is not None:
            self._rotate_borrowed(self.borrowed_permits, self.newest_number + steps, limit)
        elif steps > 0:
            passed, counters = self._closed_passed, self._counters
            oldest = self.newest_number + 1 - self.span + steps
            expired, any_expired = 0, False
            for number in range(oldest - steps, oldest):
                if number in passed or number in counters:
                    any_expired = True
                    expired += passed.get(number, 0)
            if any_expired:
                passed = {number: count for number, count in passed.items() if number >= oldest}
                counters = counters.since(oldest)
            closing, closed = self.used - self.closed_total, self.used - expired
            # No call follows, so no signal handler can raise in between.
            self.refusal = None
            if closing:
                passed[self.newest_number] = closing
            self._closed_passed, self._counters = passed, counters
            self.newest_number += steps
            self.start = self.shortcut_start = self.newest_number * self.bucket_ms
            self.used = self.closed_total = closed
            self.limit = limit

    def _rotate_borrowed(self, before: BorrowedPermits, newest: int, limit: str) -> None:
        """Open the bucket `newest`. What is borrowed from a bucket up to it has passed in it."""
        oldest = newest + 1 - self.span
        passed = dict(self._closed_passed)
        passed[self.newest_number] = self.used - self.closed_total
        coming = before.borrowed.items()
        passed |= {number: n for number, n in coming if self.newest_number < number <= newest}
        passed = {number: count for number, count in passed.items() if number >= oldest and count}
        counters = self._counters.since(oldest)
        used = sum(passed.values())
        entered = passed.pop(newest, 0)
        after = BorrowedPermits(before.borrowed, passed, newest, self.span)
        start = newest * self.bucket_ms
        shortcut_start = start if after.last == newest else RETIRED_START
        borrowed_permits = after if after.borrowed else None
        # No call follows, so no signal handler can raise in between.
        self.refusal = None
        self._closed_passed, self._counters = passed, counters
        self.newest_number, self.start, self.shortcut_start = newest, start, shortcut_start
        self.used, self.closed_total = used, used - entered
        self.limit = limit
        self.borrowed_permits = borrowed_permits

    @property
    def peak(self) -> int:
        """What a plain call is compared with: `used`, or a fuller window with coming buckets."""
        return (
            self.used
            if self.borrowed_permits is None
            else self.used + self.borrowed_permits.peak_excess
        )

    @property
    def last_number(self) -> int:
        """The last bucket that holds anything: the newest, or the last that is borrowed from."""
        return self.newest_number if self.borrowed_permits is None else self.borrowed_permits.last

    @property
    def expires_at_ms(self) -> int:
        """When nothing that it holds counts any more, ms since the epoch."""
        return (self.last_number + self.span + 1) * self.bucket_ms

    def first_borrowable(self, cost: int, amount: int, max_borrowed: int) -> int | None:
        """Return the first coming bucket from which `cost` permits may be borrowed under a limit of
        `amount`, where no window holds more than `max_borrowed` borrowed permits; None: never.
        """
        if cost > min(amount, max_borrowed):
            return None
        before = self.borrowed_permits or BorrowedPermits({}, {}, self.newest_number, self.span)
        sums = window_sums(self._permits(), self.newest_number, self.used, self.span)
        return before.first_borrowable(
            sums, self.newest_number, self.span, amount - cost, max_borrowed - cost
        )

    def borrow(self, permits: int, number: int) -> None:
        """Borrow `permits` from the coming bucket `number`; none after it is borrowed from."""
        borrowed = {} if self.borrowed_permits is None else dict(self.borrowed_permits.borrowed)
        borrowed[number] = borrowed.get(number, 0) + permits
        self._set_borrowed(borrowed)

    def _set_borrowed(self, borrowed: dict[int, int]) -> None:
        """Replace the borrowed permits by `borrowed`, by bucket number."""
        after = BorrowedPermits(borrowed, self._closed_passed, self.newest_number, self.span)
        shortcut_start = self.start if after.last == self.newest_number else RETIRED_START
        borrowed_permits = after if after.borrowed else None
        # No call follows, so no signal handler can raise in between.
        self.refusal = None
        self.borrowed_permits, self.shortcut_start = borrowed_permits, shortcut_start

    def _permits(self) -> dict[int, int]:
        """Return the permits of every bucket by its number, coming ones included."""
        permits = dict(self._closed_passed)
        permits[self.newest_number] = self.used - self.closed_total
        if self.borrowed_permits is not None:
            coming = self.borrowed_permits.borrowed.items()
            permits |= {number: count for number, count in coming if number > self.newest_number}
        return permits

    def count_blocked(self, permits: int) -> None:
        """Count refused permits in the newest bucket."""
        self._counters.count_blocked(self.newest_number, permits)

    def store_refusal(
        self, amount: int, cost: int, left: int, room_at_ms: int, empty_at_ms: int
    ) -> None:
        """Keep the refusal of a call of `cost` under a limit of `amount`, which has been counted as
        blocked. Greater costs for which there is room at the same moment get the same refusal.
        """
        newest = self.newest_number
        closed = (self._closed_passed.get(n, 0) for n in range(newest + 1 - self.span, newest))
        greatest_cost = greatest_equal_cost(cost, self.used + cost - amount, closed)
        counters = self._counters[self.newest_number]
        self.refusal = (
            amount, self.used, cost, greatest_cost, counters, (left, room_at_ms, empty_at_ms)
        )  # fmt: skip

    def add(self, buckets: Iterable[Bucket]) -> bool:
        """Add counts to the buckets they were counted in; a bucket ahead of the newest counts in
        the newest. Return False if all of them have expired. The ring has to be rotated before.
        """
        newest_expired = self.newest_number - self.span
        live = [b for b in buckets if b.start // self.bucket_ms > newest_expired]
        for bucket in live:
            number = min(self.newest_number, bucket.start // self.bucket_ms)
            passed = min(bucket.passed, MAX_TOTAL - self.used)
            if passed:
                passed_before = self._closed_passed.get(number, 0)
                self.used += passed
                if number < self.newest_number:
                    self.closed_total += passed
                    self._closed_passed[number] = passed_before + passed
            self._counters.add(number, bucket)
        if live and self.borrowed_permits is not None:
            self._set_borrowed(self.borrowed_permits.borrowed)
        return bool(live)

    def passed_by_start(self) -> dict[int, int]:
        """Return the passes by bucket start (ms); the newest bucket is always among them."""
        passed = {
            number * self.bucket_ms: count for number, count in self._closed_passed.items() if count
        }
        passed[self.start] = self.used - self.closed_total
        return passed

    def refund(self, permits: int, start: int, *, borrowed: bool = False) -> int:
        """Take up to `permits` out of the bucket that begins at `start`; return how many. With
        `borrowed` they were borrowed from this bucket, which may not have begun yet.
        """
        self.refusal = None
        number = start // self.bucket_ms
        if self.borrowed_permits is None:
            return self._take_out(permits, number)
        # On a copy, so that a signal handler that raises in between leaves this ring as it was.
        twin = self.copy()
        taken = twin._refund_borrowed(permits, number, self.borrowed_permits, borrowed=borrowed)
        self.replace_with(twin)
        return taken

    def _refund_borrowed(
        self, permits: int, number: int, before: BorrowedPermits, *, borrowed: bool
    ) -> int:
        known = dict(before.borrowed)
        was_borrowed = known.get(number, 0)
        if borrowed and number > self.newest_number:
            taken = min(permits, was_borrowed)
        else:
            taken = self._take_out(permits, number)
        left = max(0, was_borrowed - taken) if borrowed else was_borrowed
        if number <= self.newest_number:
            left = min(left, self._permits().get(number, 0))
        known[number] = left
        self._set_borrowed(known)
        return taken

    def _take_out(self, permits: int, number: int) -> int:
        """Take up to `permits` out of a bucket that has begun; return how many."""
        if number == self.newest_number:
            taken = min(permits, self.used - self.closed_total)
        elif self.newest_number - self.span < number < self.newest_number:
            taken = min(permits, self._closed_passed.get(number, 0))
            if taken:
                self._closed_passed[number] -= taken
                self.closed_total -= taken
        else:
            return 0
        self.used -= taken
        return taken

    def room_at_ms(self, need: int) -> int:
        """Return when there is room for a plain call that is `need` permits above its limit: when
        the oldest buckets that together hold so many have expired, if nothing is borrowed.
        """
        if self.borrowed_permits is not None and self.borrowed_permits.last > self.newest_number:
            sums = window_sums(self._permits(), self.newest_number, self.used, self.span)
            room = self.borrowed_permits.room_at(
                sums, self.newest_number, self.span, self.peak - need
            )
            return room * self.bucket_ms
        for number in range(self.newest_number + 1 - self.span, self.newest_number):
            need -= self._closed_passed.get(number, 0)
            if need <= 0:
                return (number + self.span) * self.bucket_ms
        return (self.newest_number + self.span) * self.bucket_ms

    def empty_at_ms(self) -> int:
        """Return when the newest bucket that holds a permit expires; 0 if none does."""
        if self.last_number > self.newest_number:
            return (self.last_number + self.span) * self.bucket_ms
        if self.used > self.closed_total:
            return (self.newest_number + self.span) * self.bucket_ms
        if self.used == 0:
            return 0
        newest = max(number for number, passed in self._closed_passed.items() if passed)
        return (newest + self.span) * self.bucket_ms

    def state(self) -> RingState:
        """Return everything that the ring holds."""
        passed = dict(self._closed_passed)
        passed[self.newest_number] = self.used - self.closed_total
        borrowed = {} if self.borrowed_permits is None else self.borrowed_permits.borrowed
        buckets = []
        for number in sorted(passed.keys() | self._counters.keys()):
            start, count = number * self.bucket_ms, passed.get(number, 0)
            bucket = self._counters.bucket(number, start, count, borrowed.get(number, 0))
            if count or bucket.blocked or bucket.success or bucket.error:
                buckets.append(bucket)
        coming = [
            Bucket(number * self.bucket_ms, borrowed=borrowed[number])
            for number in sorted(borrowed)
            if number > self.newest_number
        ]
        return RingState(
            self.start, self.used, self.closed_total, self.limit, tuple(buckets), tuple(coming)
        )


class RingCounters(dict[int, list[int]]):
    """[blocked, success, error, rt_sum_ms, rt_min_ms] by bucket number, of the buckets in which any
    of them was counted. A dictionary, so that it takes no more memory than one.
    """

    __slots__ = ()

    def count_blocked(self, number: int, permits: int) -> None:
        """Count refused permits in the bucket of this number."""
        self.setdefault(number, [0, 0, 0, 0, 0])[0] += permits

    def add(self, number: int, added: Bucket) -> None:
        """Add what `added` counts to the bucket of this number."""
        if not (added.blocked or added.success or added.error):
            return
        counters = self.setdefault(number, [0, 0, 0, 0, 0])
        counters[0] += added.blocked
        if added.success or added.error:
            rt_min_ms = added.rt_min_ms or 0
            if counters[1] or counters[2]:
                rt_min_ms = min(counters[4], rt_min_ms)
            counters[4] = rt_min_ms
            counters[1] += added.success
            counters[2] += added.error
            counters[3] += added.rt_sum_ms

    def since(self, oldest: int) -> RingCounters:
        """Return the counters of the buckets from number `oldest` on."""
        return RingCounters({number: each for number, each in self.items() if number >= oldest})

    def twin(self) -> RingCounters:
        """Return a copy that can be counted in without changing this one."""
        return RingCounters({number: list(each) for number, each in self.items()})

    def bucket(self, number: int, start_ms: int, passed: int, borrowed: int) -> Bucket:
        """Return the bucket of this number as a whole."""
        blocked, success, error, rt_sum, rt_min = self.get(number, (0, 0, 0, 0, 0))
        rt_min_ms = rt_min if success or error else None
        return Bucket(start_ms, passed, blocked, success, error, rt_sum, rt_min_ms, borrowed)


def greatest_equal_cost(cost: int, need: int, closed: Iterable[int]) -> int:
    """Return the greatest cost for which there is room at the same moment as for `cost`, which is
    `need` permits above its limit. `closed`: the permits of the closed buckets, oldest first.
    """
    for permits in closed:
        need -= permits
        if need <= 0:
            break
    # Now `need` is what the greatest of these costs takes less than this one; if it is above 0,
    # there is room when the newest bucket expires, and then for every cost.
    return cost - need if need <= 0 else MAX_TOTAL


class SenderRecords:
    """Which flushes a ring has taken: for each sender the last `seq`, and the newest bucket then.

    They outlive the ring: a flush that was taken before a reset is not taken again after it. A
    record is valid until its bucket has expired, because whatever its sender may send again has
    then expired, too. From then on it is treated as a missing one, so its deletion changes nothing.
    """

    __slots__ = ("_records", "expires_at_ms")

    def __init__(self) -> None:
        self._records: dict[str, tuple[int, int]] = {}
        self.expires_at_ms = 0
        """When all records have expired, ms since the epoch."""

    def has(self, sender: str, seq: int, newest: int, span: int) -> bool:
        """True if this flush of `sender`, or a later one, was taken by a ring of `span` buckets
        whose newest one has the number `newest`.
        """
        last_seq, number = self._records.get(sender, (-1, newest - span))
        return seq <= last_seq and number > newest - span

    def remember(self, sender: str, seq: int, newest: int, span: int, expires_at_ms: int) -> None:
        """Write the record of this flush; a new sender's first record deletes the expired ones."""
        if sender not in self._records:
            self._records = {
                name: record for name, record in self._records.items() if record[1] > newest - span
            }
        self._records[sender] = (seq, newest)
        self.expires_at_ms = expires_at_ms
