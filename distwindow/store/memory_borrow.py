"""How `MemoryStore` decides a priority call: the specification of `lua/borrow.lua`."""

from __future__ import annotations

from collections.abc import Sequence

from ..core.priority_record import PriorityRecord, PriorityWindows
from ..core.ring import Ring
from ..protocol.borrowing import Borrow, BorrowReply
from ..protocol.replies import AcquireReply
from .memory_replies import acquire_reply, bucket_starts, reset_ms


class _Place:
    """One ring of a call, and when the call may be counted in it."""

    def __init__(
        self, ring: Ring, record: PriorityRecord, cost: int, amount: int, max_borrowed: int
    ) -> None:
        self.ring, self.cost = ring, cost
        record.observe(ring)
        self.windows = PriorityWindows(ring, record, amount, max_borrowed)
        self._record, self._amount, self._max_borrowed = record, amount, max_borrowed

    def fits(self, moment_ms: int) -> bool:
        """True if the newest bucket has room for the call under the cap of this moment."""
        cap = self.windows.cap_at(moment_ms)
        return (
            self.ring.peak + self.cost <= self._amount and self.windows.fullest + self.cost <= cap
        )

    def borrowable_at_ms(self, moment_ms: int) -> int | None:
        """Return when the first bucket begins from which the call may borrow, under the cap of this
        moment; None: there is none.
        """
        cap = self.windows.cap_at(moment_ms)
        number = self.ring.first_borrowable(
            self.cost, self._amount, self._max_borrowed, self.windows.sums(), cap
        )
        return None if number is None else number * self.ring.bucket_ms

    def left(self, now: int) -> int:
        """Return how many permits a priority call finds now, without borrowing."""
        return min(self._amount - self.ring.peak, self.windows.cap_at(now) - self.windows.fullest)

    def room_at_ms(self, now: int) -> int:
        """Return from when on there is room for the call, if nobody calls until then."""
        need = self.ring.peak + self.cost - self._amount
        room = self.ring.room_at_ms(need) if need > 0 else now
        return max(room, self.windows.room_at_ms(self.cost, now))

    def charge_at(self, moment_ms: int, now: int) -> tuple[int, bool]:
        """Count the call at this moment. Return the start of its bucket, and whether it was
        borrowed from a coming one.
        """
        ring = self.ring
        if self.fits(now) and moment_ms < ring.start + ring.bucket_ms:
            ring.used += self.cost
            self._record.add(ring, taken=self.cost)
            return ring.start, False
        number = moment_ms // ring.bucket_ms
        ring.borrow(self.cost, number)
        self._record.add(ring)
        return number * ring.bucket_ms, True

    def refuse(self) -> None:
        """Count the call as refused."""
        self.ring.count_blocked(self.cost)
        self._record.add(self.ring, refused=self.cost)


def borrow(
    command: Borrow, rings: list[Ring], records: list[PriorityRecord], now: int
) -> BorrowReply:
    """Admit the call of `command` at once, or as soon as every ring has room for it, or refuse it
    and count a block. The rings have been rotated; `records` are those of the rings.
    """
    charges = command.charges
    places = [
        _Place(ring, record, charge.cost, charge.limit.amount, max_borrowed)
        for ring, record, charge, max_borrowed in zip(
            rings, records, charges, command.max_borrowed, strict=True
        )
    ]
    if all(place.fits(now) for place in places):
        for place in places:
            place.charge_at(now, now)
        reply = acquire_reply(charges, rings, 1, 1, now)
        return BorrowReply(reply._replace(bucket_starts_ms=bucket_starts(rings, now)))
    # Nothing is reserved more than a window ahead, so that a bucket's slot is its own.
    window_ms = min(ring.span * ring.bucket_ms for ring in rings)
    max_wait_ms = min(command.max_wait_ms, window_ms)
    moment = _first_moment(places, now, now)
    if moment is None or moment - now > max_wait_ms:
        for place in places:
            place.refuse()
        return BorrowReply(_refusal(places, max_wait_ms, now))
    counted = [place.charge_at(moment, now) for place in places]
    reply = acquire_reply(charges, rings, 1, 1, now)
    starts = tuple(start for start, _ in counted)
    return BorrowReply(
        reply._replace(left=max(0, reply.left), bucket_starts_ms=starts),
        moment - now,
        tuple(is_borrowed for _, is_borrowed in counted),
    )


def _refusal(places: Sequence[_Place], max_wait_ms: int, now: int) -> AcquireReply:
    """Return the refusal. It names the ring that has room last, and the first moment at which the
    call would be admitted if nobody called until then.
    """
    refusing = [i for i, place in enumerate(places) if not place.fits(now)]
    index = max(refusing, key=lambda i: places[i].room_at_ms(now))
    retry_at = places[index].room_at_ms(now)
    # What may be borrowed is more once the cap of a ring has risen.
    changes = {change for place in places for change in place.windows.cap_changes_ms()}
    for moment in (now, *changes):
        proceeds_at = _first_moment(places, max(moment, now), now)
        if proceeds_at is not None:
            retry_at = min(retry_at, max(moment, proceeds_at - max_wait_ms))
    ring, left = places[index].ring, places[index].left(now)
    return AcquireReply(0, index, left, reset_ms(ring, now), retry_at - now, now, None)


def _first_moment(places: Sequence[_Place], asked_at: int, now: int) -> int | None:
    """Return the first moment, ms, at which a call of `asked_at` can be counted in every ring, if
    nobody calls until then; None: never.
    """
    moment = asked_at
    while True:
        later = moment
        for place in places:
            # A ring with room counts the call in its newest bucket for as long as that lasts.
            if not (place.fits(asked_at) and moment < place.ring.start + place.ring.bucket_ms):
                borrowable_at = place.borrowable_at_ms(asked_at)
                if borrowable_at is None:
                    return None
                later = max(later, borrowable_at)
        if later == moment:
            return moment
        moment = later
