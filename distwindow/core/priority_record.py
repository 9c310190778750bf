"""What priority calls have taken of one ring, and what plain calls have asked of it: so that plain
calls get the part of the limit that priority calls may not borrow.

    held         permits of priority calls in a bucket: borrowed, or taken while there was room
    asked        permits that plain calls asked for in a window: passed, and refused. Where a bucket
                 has refused any, what it passed counts twice, because some refusals are repeated
                 in processes, and arrive late or never: so `asked` doubles in each window whose
                 buckets all refuse plain calls, until it is what they ask for.
    contended    plain calls were refused in this window, or `asked` is kept from an earlier one
    period       `span` buckets; while it is contended, the most that was `asked` is kept for this
                 period and for the next one
    reserve      the most that was asked in this period and the one before, where it is contended
    cap          how much priority calls may hold in a window: the whole limit but the reserve, and
                 in any case `max_borrowed`

A window in which a priority call counts holds at most `cap` of priority permits after it. So a
window that refuses a plain call of cost c holds more than the reserve (at most the limit less
`max_borrowed`) less c plain permits (docs/guarantees.md). It is the specification of
`lua/shared/priority.lua`.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import takewhile

from .reservations import window_sums
from .ring import MAX_TOTAL, Ring
from .stats import RingState


class PriorityRecord:
    """What a store keeps of one ring with priority calls, beside the ring."""

    __slots__ = ("asked", "asked_before", "expires_at_ms", "period", "refused", "taken")

    def __init__(self) -> None:
        self.taken: dict[int, int] = {}
        """Permits that priority calls have taken while there was room, by bucket number. A refund
        does not lower it, because it does not say that the permits were those of such a call.
        """
        self.refused: dict[int, int] = {}
        """Permits of priority calls that were refused, by bucket number. They count as blocked in
        the ring, and are no demand of plain calls.
        """
        self.period = 0
        self.asked = self.asked_before = 0
        """The most that plain calls have asked for in a window, in this period and the one before;
        0 where it was not contended.
        """
        self.expires_at_ms = 0
        """From then on it is as if there was none."""

    def add(self, ring: Ring, *, taken: int = 0, refused: int = 0) -> None:
        """Count permits in the newest bucket of `ring`, and drop buckets that have expired."""
        newest, span = ring.newest_number, ring.span
        for counts, permits in ((self.taken, taken), (self.refused, refused)):
            for number in [n for n in counts if not newest - span < n <= newest]:
                del counts[number]
            if permits:
                counts[newest] = counts.get(newest, 0) + permits
        self.expires_at_ms = (newest + 2 * span + 1) * ring.bucket_ms

    def held_by_number(self, state: RingState, bucket_ms: int) -> dict[int, int]:
        """Return the priority permits of each bucket, by number, coming ones included."""
        held = {bucket.start // bucket_ms: bucket.borrowed for bucket in state.reserved}
        for bucket in state.buckets:
            number = bucket.start // bucket_ms
            held[number] = min(bucket.passed, bucket.borrowed + self.taken.get(number, 0))
        return held

    def observe(self, ring: Ring) -> None:
        """Keep what plain calls have asked for in the window that ends with the newest bucket of
        `ring`, where it is contended.
        """
        state, bucket_ms = ring.state(), ring.bucket_ms
        held = self.held_by_number(state, bucket_ms)
        asked, any_refused = 0, False
        for bucket in state.buckets:
            number = bucket.start // bucket_ms
            of_plain = bucket.passed - held[number]
            refused = max(0, bucket.blocked - self.refused.get(number, 0))
            asked += of_plain + refused
            if refused:
                asked += of_plain
                any_refused = True
        period = ring.newest_number // ring.span
        if period != self.period:
            self.asked_before = self.asked if period == self.period + 1 else 0
            self.asked, self.period = 0, period
        if any_refused or self.asked or self.asked_before:
            self.asked = max(self.asked, min(asked, MAX_TOTAL))


class PriorityWindows:
    """The priority permits in the windows of one ring, and their cap. Made for each priority call,
    once the ring has been rotated, and once its record has observed it.
    """

    def __init__(self, ring: Ring, record: PriorityRecord, amount: int, max_borrowed: int) -> None:
        self._ring, self._record = ring, record
        self._amount, self._max_borrowed = amount, max_borrowed
        self._held = record.held_by_number(ring.state(), ring.bucket_ms)
        newest = ring.newest_number
        self._held_now = sum(held for number, held in self._held.items() if number <= newest)
        fullest = self._held_now
        for number, held in self.sums():
            if number > min(ring.last_number, newest + ring.span - 1):
                break
            fullest = max(fullest, held)
        self.fullest = fullest
        """What the fullest window holds in which a call in the newest bucket counts."""

    def sums(self) -> Iterator[tuple[int, int]]:
        """Yield the number of the newest bucket and of each coming one, with the priority permits
        of the window that ends with it, without end.
        """
        return window_sums(self._held, self._ring.newest_number, self._held_now, self._ring.span)

    def cap_at(self, moment_ms: int) -> int:
        """Return how much priority calls may hold in a window at this moment, if nobody calls until
        then.
        """
        number = max(self._ring.newest_number, moment_ms // self._ring.bucket_ms)
        record, period = self._record, number // self._ring.span
        reserve = 0
        if period == record.period:
            reserve = max(record.asked, record.asked_before)
        elif period == record.period + 1:
            reserve = record.asked
        return max(min(self._amount, self._max_borrowed), self._amount - reserve)

    def cap_changes_ms(self) -> tuple[int, int]:
        """Return when the cap rises, if nobody calls until then."""
        period_ms = self._ring.span * self._ring.bucket_ms
        return (self._record.period + 1) * period_ms, (self._record.period + 2) * period_ms

    def room_at_ms(self, cost: int, now: int) -> int:
        """Return from when on the priority permits leave room for a call of `cost` in the newest
        bucket, if nobody calls until then; `now` if they do not keep it out.
        """
        rooms = []
        for moment in (now, *self.cap_changes_ms()):
            most = self.cap_at(moment) - cost
            if most >= 0:
                rooms.append(max(moment, now, self._room_at(most) * self._ring.bucket_ms))
        return min(rooms, default=now)

    def _room_at(self, most: int) -> int:
        """Return the first bucket from which on no window holds more than `most` priority permits;
        0 if none does now.
        """
        last = self._ring.last_number + self._ring.span
        coming = takewhile(lambda pair: pair[0] <= last, self.sums())
        return max((number + 1 for number, held in coming if held > most), default=0)
