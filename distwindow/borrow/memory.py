"""Priority calls on `MemoryStore`: the specification of `lua/borrow.lua`."""

from __future__ import annotations

from collections.abc import Sequence

from ..ring.memory_rings import Handlers, MemoryRings, acquire_reply, bucket_starts
from ..ring.ring import Ring
from .commands import Borrow, BorrowReply


class MemoryBorrowing:
    """The command of priority calls. Callers hold the lock of the store."""

    def __init__(self, rings: MemoryRings) -> None:
        self._rings = rings
        self.handlers: Handlers = {"borrow": self._borrow}

    def _borrow(self, command: Borrow, now: int) -> BorrowReply:
        """Admit the call at once, or as soon as each ring has room, or count a block."""
        rings = [self._rings.ring_at(charge, now) for charge in command.charges]
        charges = command.charges
        places = [
            _Place(ring, charge.cost, charge.limit.amount, max_borrowed)
            for ring, charge, max_borrowed in zip(rings, charges, command.max_borrowed, strict=True)
        ]
        if all(place.fits_now for place in places):
            for place in places:
                place.charge_at(now)
            reply = acquire_reply(charges, rings, 1, 1, now)
            return BorrowReply(reply._replace(bucket_starts_ms=bucket_starts(rings, now)))
        # Nothing is borrowed from more than a window ahead, so that a bucket's slot is its own.
        window_ms = min(ring.span * ring.bucket_ms for ring in rings)
        max_wait_ms = min(command.max_wait_ms, window_ms)
        moment = _first_moment(places, now)
        if moment is None or moment - now > max_wait_ms:
            for place in places:
                place.ring.count_blocked(place.cost)
            reply = acquire_reply(charges, rings, 1, 0, now)
            if moment is not None:
                reply = reply._replace(retry_ms=min(reply.retry_ms, moment - max_wait_ms - now))
            return BorrowReply(reply)
        counted = [place.charge_at(moment) for place in places]
        reply = acquire_reply(charges, rings, 1, 1, now)
        starts = tuple(start for start, _ in counted)
        return BorrowReply(
            reply._replace(left=max(0, reply.left), bucket_starts_ms=starts),
            moment - now,
            tuple(is_borrowed for _, is_borrowed in counted),
        )


class _Place:
    """One ring of a call, and when the call may be counted in it."""

    def __init__(self, ring: Ring, cost: int, amount: int, max_borrowed: int) -> None:
        self.ring, self.cost = ring, cost
        self.fits_now = ring.peak + cost <= amount
        number = ring.first_borrowable(cost, amount, max_borrowed)
        self.borrowable_at_ms = None if number is None else number * ring.bucket_ms
        """From when on it may be counted in a coming bucket; None: never."""

    def is_newest_at(self, moment_ms: int) -> bool:
        """True if a call at this moment counts in the newest bucket, which has room for it."""
        return self.fits_now and moment_ms < self.ring.start + self.ring.bucket_ms

    def charge_at(self, moment_ms: int) -> tuple[int, bool]:
        """Count the call now. Return the start of its bucket, and whether it was borrowed."""
        if self.is_newest_at(moment_ms):
            self.ring.used += self.cost
            return self.ring.start, False
        number = moment_ms // self.ring.bucket_ms
        self.ring.borrow(self.cost, number)
        return number * self.ring.bucket_ms, True


def _first_moment(places: Sequence[_Place], now: int) -> int | None:
    """Return the first moment, ms, at which the call can be counted in every ring; None: never."""
    moment = now
    while True:
        later = moment
        for place in places:
            # A ring with room counts the call in its newest bucket for as long as that lasts.
            if not place.is_newest_at(moment):
                if place.borrowable_at_ms is None:
                    return None
                later = max(later, place.borrowable_at_ms)
        if later == moment:
            return moment
        moment = later
