"""A model of the rings, written from the documentation and not from the code: simple and slow.

A ring is a list of what was counted, with the numbers of the buckets. Every reply is a sum over
that list, so there are no running totals that could be wrong.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple


class Part(NamedTuple):
    """One ring of a call: its name, its limit, and what one call costs there."""

    ring: str
    amount: int
    bucket_ms: int
    span: int
    cost: int


class Outcome(NamedTuple):
    """The reply of acquire, peek and lease, as far as it is compared. `ring` counts from 0."""

    admitted: int
    ring: int
    left: int
    reset_ms: int
    retry_ms: int
    admitted_by: tuple[int, int, int] | None = None


class Counted(NamedTuple):
    """What one command has counted in a bucket."""

    number: int
    passed: int = 0
    blocked: int = 0
    success: int = 0
    error: int = 0
    rt_sum_ms: int = 0
    rt_min_ms: int | None = None


@dataclass
class Ring:
    """All that was counted in a ring, and the number of its newest bucket."""

    newest: int | None = None
    log: list[Counted] = field(default_factory=list)
    taken: dict[str, tuple[int, int]] = field(default_factory=dict)
    """The last flush of each sender that was counted, and the newest bucket then."""

    def is_stale(self, now: int, bucket_ms: int, span: int) -> bool:
        """True if it holds nothing at `now`: it was never made, all its buckets have expired, or it
        is ahead of the clock by more than its window, which counts as lost state.
        """
        if self.newest is None:
            return True
        start = self.newest * bucket_ms
        return now // bucket_ms - self.newest >= span or start - now > span * bucket_ms

    def at(self, now: int, part: Part) -> Ring:
        """Return the ring as a call finds it at `now`, without the expired buckets. A clock
        that was set back does not change the newest bucket.
        """
        number, span = now // part.bucket_ms, part.span
        if self.newest is None or self.is_stale(now, part.bucket_ms, span):
            return Ring(number)
        newest = max(self.newest, number)
        inside = [one for one in self.log if newest - span < one.number <= newest]
        return Ring(newest, inside, self.taken)

    def passed(self, number: int | None = None) -> int:
        """Return the permits in the window, or in one of its buckets."""
        return sum(one.passed for one in self.log if number in (None, one.number))


class Model:
    """All rings. Each method executes a command and returns what is compared of its reply."""

    def __init__(self) -> None:
        self.rings: dict[str, Ring] = {}

    def acquire(self, parts: Sequence[Part], now: int, calls: int = 1) -> Outcome:
        rings = self._open(parts, now)
        admitted = 0
        while admitted < calls and _fits(parts, rings):
            _add(parts, rings, [part.cost for part in parts])
            admitted += 1
        by = _binding(parts, rings, now) if admitted else None
        if admitted == calls:
            assert by is not None
            return Outcome(calls, *by, 0)
        for part, ring in zip(parts, rings, strict=True):
            assert ring.newest is not None
            ring.log.append(Counted(ring.newest, blocked=part.cost * (calls - admitted)))
        return Outcome(admitted, *_refusal(parts, rings, now), by)

    def peek(self, parts: Sequence[Part], now: int) -> Outcome:
        rings = self._view(parts, now)
        if _fits(parts, rings):
            return Outcome(1, *_binding(parts, rings, now), 0)
        return Outcome(0, *_refusal(parts, rings, now))

    def lease(
        self, parts: Sequence[Part], now: int, extra: int, prefetch: bool
    ) -> tuple[Outcome, int, int]:
        """Return the outcome, the permits beyond the cost, and the ms until the bucket ends."""
        rings = self._open(parts, now)
        if not _fits(parts, rings):
            for part, ring in zip(parts, rings, strict=True):
                assert ring.newest is not None
                if not prefetch:
                    ring.log.append(Counted(ring.newest, blocked=part.cost))
            return Outcome(0, *_refusal(parts, rings, now)), 0, 0
        rest = min(
            part.amount - ring.passed() - part.cost for part, ring in zip(parts, rings, strict=True)
        )
        granted = min(extra, rest // 2)
        _add(parts, rings, [part.cost + granted for part in parts])
        ends = min(
            (ring.newest or 0) * part.bucket_ms + part.bucket_ms - now
            for part, ring in zip(parts, rings, strict=True)
        )
        return Outcome(1, *_binding(parts, rings, now), 0), granted, ends

    def flush(
        self,
        parts: Sequence[Part],
        now: int,
        counts: Sequence[Sequence[tuple[int, ...]]],
        sender: str,
        seq: int,
        pull: bool,
    ) -> list[dict[int, int]]:
        """`counts`: for each ring (start, passed, blocked, success, error, rt_sum, rt_min)...

        Return the passed permits of each ring by bucket start; nothing for a ring that is not
        pulled.
        """
        pulled: list[dict[int, int]] = []
        for part, seen in zip(parts, counts, strict=True):
            ring = self.rings.get(part.ring, Ring()).at(now, part)
            exists = self._exists(part, now)
            newest = ring.newest
            assert newest is not None
            live = []
            for start, *rest in seen:
                number = min(newest, start // part.bucket_ms)
                if number > newest - part.span:
                    live.append(Counted(number, *rest))
            last = ring.taken.get(sender) if sender else None
            new = bool(live) and (last is None or seq > last[0])
            if new:
                ring.log += live
                if sender:
                    ring.taken = {**ring.taken, sender: (seq, newest)}
            if new or (pull and exists):
                self.rings[part.ring] = ring
            sums: dict[int, int] = {}
            for one in ring.log if pull and (exists or new) else ():
                if one.passed:
                    start = one.number * part.bucket_ms
                    sums[start] = sums.get(start, 0) + one.passed
            pulled.append({start: passed for start, passed in sums.items() if passed})
        return pulled

    def refund(self, parts: Sequence[Part], now: int, numbers: Sequence[int]) -> int:
        """Take each cost out of the bucket in `numbers`; return the most that a ring gave back."""
        most = 0
        for part, number in zip(parts, numbers, strict=True):
            back = 0
            if self._exists(part, now):
                ring = self.rings[part.ring].at(now, part)
                self.rings[part.ring] = ring
                back = min(part.cost, ring.passed(number))
                ring.log.append(Counted(number, passed=-back))
            most = max(most, back)
        return most

    def newest(self, part: Part, now: int) -> int:
        """Return the number of the bucket in which a call would count."""
        ring = self.rings.get(part.ring, Ring()).at(now, part)
        assert ring.newest is not None
        return ring.newest

    def reset(self, parts: Sequence[Part]) -> int:
        removed = [self.rings.pop(part.ring, None) for part in parts]
        return sum(ring is not None for ring in removed)

    def read(self, part: Part) -> list[tuple[int, ...]] | None:
        """Return the start and the sums of each stored bucket, oldest first."""
        ring = self.rings.get(part.ring)
        if ring is None or ring.newest is None:
            return None
        rows = []
        for number in range(ring.newest - part.span + 1, ring.newest + 1):
            here = [one for one in ring.log if one.number == number]
            names = ("passed", "blocked", "success", "error", "rt_sum_ms")
            sums = [sum(getattr(one, name) for one in here) for name in names]
            ends = [one.rt_min_ms or 0 for one in here if one.success or one.error]
            if sums[:4] != [0, 0, 0, 0]:
                least = min(ends, default=-1)
                rows.append((number * part.bucket_ms, *sums, least))
        return rows

    def taken(self, part: Part, sender: str, now: int) -> tuple[int, bool] | None:
        """Return the last seq of `sender` that was counted, and True if its record must exist."""
        ring = self.rings.get(part.ring, Ring()).at(now, part)
        last = ring.taken.get(sender)
        assert ring.newest is not None
        return None if last is None else (last[0], last[1] > ring.newest - part.span)

    def _exists(self, part: Part, now: int) -> bool:
        return not self.rings.get(part.ring, Ring()).is_stale(now, part.bucket_ms, part.span)

    def _view(self, parts: Sequence[Part], now: int) -> list[Ring]:
        return [self.rings.get(part.ring, Ring()).at(now, part) for part in parts]

    def _open(self, parts: Sequence[Part], now: int) -> list[Ring]:
        rings = self._view(parts, now)
        for part, ring in zip(parts, rings, strict=True):
            self.rings[part.ring] = ring
        return rings


def _fits(parts: Sequence[Part], rings: Sequence[Ring]) -> bool:
    return all(
        ring.passed() + part.cost <= part.amount for part, ring in zip(parts, rings, strict=True)
    )


def _add(parts: Sequence[Part], rings: Sequence[Ring], amounts: Sequence[int]) -> None:
    for ring, amount in zip(rings, amounts, strict=True):
        assert ring.newest is not None
        ring.log.append(Counted(ring.newest, passed=amount))


def _reset_ms(part: Part, ring: Ring, now: int) -> int:
    """Return the ms until the newest bucket that holds permits expires."""
    numbers = {one.number for one in ring.log}
    held = [number for number in numbers if ring.passed(number) > 0]
    return max(0, (max(held) + part.span) * part.bucket_ms - now) if held else 0


def _binding(parts: Sequence[Part], rings: Sequence[Ring], now: int) -> tuple[int, int, int]:
    """Return the ring with the fewest permits left, these permits, and its reset, ms."""
    lefts = [part.amount - ring.passed() for part, ring in zip(parts, rings, strict=True)]
    index = lefts.index(min(lefts))
    return index, lefts[index], _reset_ms(parts[index], rings[index], now)


def _refusal(parts: Sequence[Part], rings: Sequence[Ring], now: int) -> tuple[int, int, int, int]:
    """Return, of the rings that refuse, the one that has room last: its index, the permits left
    there, its reset and its retry, ms.
    """
    rooms: dict[int, int] = {}
    for index, (part, ring) in enumerate(zip(parts, rings, strict=True)):
        if ring.passed() + part.cost > part.amount:
            assert ring.newest is not None
            number = ring.newest - part.span + 1
            # Drop the oldest buckets one by one until the call fits.
            while sum(o.passed for o in ring.log if o.number > number) + part.cost > part.amount:
                number += 1
            rooms[index] = (number + part.span) * part.bucket_ms
    latest = max(rooms.values())
    index = next(index for index, room in rooms.items() if room == latest)
    left = parts[index].amount - rings[index].passed()
    return index, left, _reset_ms(parts[index], rings[index], now), latest - now
