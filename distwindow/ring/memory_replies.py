"""Replies of `MemoryStore`, by the rings of a call."""

from __future__ import annotations

from .decision import Charge
from .replies import AcquireReply
from .ring import Ring


def acquire_reply(
    charges: tuple[Charge, ...], rings: list[Ring], calls: int, admitted: int, now: int
) -> AcquireReply:
    """The reply to `calls` equal calls, of which the first ones were admitted and counted."""
    if admitted == calls:
        index, left, reset = binding_ring(charges, rings, now)
        return AcquireReply(calls, index, left, reset, 0, now)
    index, latest = 0, -1
    for i, (charge, ring) in enumerate(zip(charges, rings, strict=True)):
        need = ring.peak + charge.cost - charge.limit.amount
        if need > 0:
            room_at = ring.room_at_ms(need)
            if room_at > latest:
                index, latest = i, room_at
    ring = rings[index]
    admitted_by = binding_ring(charges, rings, now) if admitted else None
    left = charges[index].limit.amount - ring.peak
    return AcquireReply(admitted, index, left, reset_ms(ring, now), latest - now, now, admitted_by)


def bucket_starts(rings: list[Ring], now: int) -> tuple[int, ...] | None:
    """The start of each ring's newest bucket if one of them is ahead of a clock that was set back;
    else None.
    """
    ahead = any(ring.start > now for ring in rings)
    return tuple(ring.start for ring in rings) if ahead else None


def binding_ring(charges: tuple[Charge, ...], rings: list[Ring], now: int) -> tuple[int, int, int]:
    """Index, permits left and `reset_ms` of the ring that has the fewest permits left."""
    left = [charge.limit.amount - ring.peak for charge, ring in zip(charges, rings, strict=True)]
    index = left.index(min(left))
    return index, left[index], reset_ms(rings[index], now)


def reset_ms(ring: Ring, now: int) -> int:
    """Ms until the window of `ring` is empty."""
    return max(0, ring.empty_at_ms() - now)
