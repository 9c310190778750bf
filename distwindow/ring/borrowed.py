"""Borrowing: permits that are borrowed from buckets which have not begun.

    closed buckets        newest    coming buckets
    .. 3  0  2  1  4  |     5    |   2   0   3        permits; those of coming buckets are borrowed
                            ^            ^-- last: the last bucket that is borrowed from
                            `newest`

    S(j)          the permits of the `span` buckets that end with bucket j; S(newest) is `used`
    borrow        takes the first bucket j from `last` on (or from the one after `newest`) where
                  S(j) and the cost are at most the limit. Nothing lies after j, so no later window
                  holds more than S(j): only this one has to be checked.
    plain call    has to leave room for what is borrowed: S(j) and the cost have to be at most the
                  limit for each j from `newest` to `last` whose window contains the newest bucket.
                  The fullest of these windows holds `peak_excess` more than `used`.
    opening j     makes what is borrowed from it the first permits that it has passed

What has entered its bucket is remembered as borrowed until that bucket has expired, because no
window may hold more borrowed permits than the limit's share for them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping


class BorrowedPermits:
    """The borrowed permits of a ring, by the number of their bucket: of coming buckets, and of
    those in the window. Never changed: the ring makes a new one.
    """

    __slots__ = ("borrowed", "last", "peak_excess")

    def __init__(
        self, borrowed: Mapping[int, int], closed: Mapping[int, int], newest: int, span: int
    ) -> None:
        """`borrowed` and `closed`: borrowed permits, and permits of the closed buckets, by bucket
        number. `newest`: the number of the newest bucket.
        """
        self.borrowed = {n: count for n, count in borrowed.items() if count and n > newest - span}
        """Without buckets that have expired."""
        self.last = max(newest, max(self.borrowed, default=newest))
        """The last bucket that is borrowed from; the newest one if there is none."""
        self.peak_excess = 0
        """The permits that the fullest window with the newest bucket holds beyond `used`."""
        excess = 0
        for number in range(newest + 1, min(self.last, newest + span - 1) + 1):
            excess += self.borrowed.get(number, 0) - closed.get(number - span, 0)
            self.peak_excess = max(self.peak_excess, excess)

    def first_borrowable(
        self, sums: Iterable[tuple[int, int]], newest: int, span: int, most: int, most_borrowed: int
    ) -> int:
        """Return the first coming bucket, not before `last`, whose window holds at most `most`
        permits, and at most `most_borrowed` borrowed ones; neither is negative. `sums`: the
        `window_sums` of the ring.
        """
        first = max(newest + 1, self.last)
        begun = sum([count for number, count in self.borrowed.items() if number <= newest])
        of_borrowed = window_sums(self.borrowed, newest, begun, span)
        return next(
            number
            for (number, held), (_, borrowed) in zip(sums, of_borrowed, strict=True)
            if number >= first and held <= most and borrowed <= most_borrowed
        )

    def room_at(self, sums: Iterable[tuple[int, int]], newest: int, span: int, most: int) -> int:
        """Return the first coming bucket from which on no window holds more than `most` permits; if
        that is negative, the first one in whose window there is no bucket of the ring.
        """
        room = newest + 1
        for number, held in sums:
            if number == self.last + span:
                break
            if held > most:
                room = number + 1
        return room


def window_sums(
    permits: Mapping[int, int], newest: int, used: int, span: int
) -> Iterator[tuple[int, int]]:
    """Yield (number, S(number)) for the newest bucket and the coming ones, without end. `permits`:
    of all buckets, by number; `used`: S(newest).
    """
    number, held = newest, used
    while True:
        yield number, held
        number += 1
        held += permits.get(number, 0) - permits.get(number - span, 0)
