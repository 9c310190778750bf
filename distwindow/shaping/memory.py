"""Paced and warming limits on `MemoryStore`; specifies `acquire_shaped` and `peek_shaped`."""

from __future__ import annotations

from typing import NamedTuple

from ..ring.commands import Read
from ..ring.decision import Charge
from ..ring.key import shaping_name
from ..ring.memory_rings import (
    Handlers,
    MemoryRings,
    MemoryValues,
    bucket_starts,
    limit_text,
    reset_ms,
)
from ..ring.replies import AcquireReply, ReadReply
from ..ring.ring import Ring
from .commands import AcquireShaped, PeekShaped, ReadShaped, max_wait_ms_of
from .shaping import Shaping, ShapingState, shaping_of


class MemoryShaping:
    """The commands under limits that are paced or warm up. Callers hold the lock of the store."""

    def __init__(self, values: MemoryValues, rings: MemoryRings) -> None:
        self._values, self._rings = values, rings
        self.handlers: Handlers = {
            "acquire_shaped": self._acquire,
            "peek_shaped": self._peek,
            "read": self._read,
        }

    def _acquire(self, command: AcquireShaped, now: int) -> AcquireReply:
        charges = command.charges
        rings = [self._rings.ring_at(charge, now) for charge in charges]
        names = [shaping_name(charge.ring) for charge in charges]
        states = [self._values.get(name) for name in names]
        call = decide_shaped(charges, rings, states, command.cap_ms, now)
        for charge, ring in zip(charges, rings, strict=True):
            if command.write_limit:
                ring.limit = limit_text(charge.limit)
        for name, state in zip(names, call.count_call(), strict=True):
            if state is not None:
                self._values.put(name, state)
        return call.reply()

    def _peek(self, command: PeekShaped, now: int) -> AcquireReply:
        charges = command.charges
        states = [self._values.get(shaping_name(charge.ring)) for charge in charges]
        call = decide_shaped(charges, self._rings.copies_at(charges, now), states, None, now)
        return call.reply()._replace(bucket_starts_ms=None)  # nothing is counted

    def _read(self, command: Read, now: int) -> ReadReply:
        reply = self._rings.read(command, now)
        if not isinstance(command, ReadShaped):
            return reply
        found = [
            self._values.get(shaping_name(charge.ring)) if charge.limit.is_shaped else None
            for charge in command.charges
        ]
        # As a hash has it: without the time at which it expires.
        shapings = [None if state is None else state._replace(expires_at_ms=0) for state in found]
        return reply._replace(shapings=tuple(shapings))


class _ShapedRing:
    """One ring of a call, with the shaping of its limit (None: neither paced nor warming)."""

    def __init__(
        self, charge: Charge, ring: Ring, stored: ShapingState | None, cap_ms: int | None, now: int
    ) -> None:
        limit = charge.limit
        self.amount, self.cost, self.ring = limit.amount, charge.cost, ring
        self.shaping: Shaping | None = None
        if limit.is_shaped:
            self.shaping = shaping_of(limit, max_wait_ms_of(limit, cap_ms))
            self.state = self.shaping.at(stored, now)
            self.is_refilled = self.shaping.refills(stored, now)

    def admits(self, now: int) -> bool:
        if self.shaping is None:
            return self.ring.peak + self.cost <= self.amount
        return self.shaping.admits(self.state, self.ring.peak, self.cost, now)

    def wait_us(self, now: int) -> int:
        if self.shaping is None or not self.shaping.is_paced:
            return 0
        return self.shaping.wait_us(self.state, self.shaping.rate(self.state), self.cost, now)

    def left(self, now: int) -> int:
        if self.shaping is None:
            return self.amount - self.ring.peak
        return self.shaping.left(self.state, self.ring.peak, now)

    def retry_at(self, now: int) -> int:
        if self.shaping is None:
            return self.ring.room_at_ms(self.ring.peak + self.cost - self.amount)
        if self.shaping.is_paced:
            return self.shaping.paced_retry_at(self.state, self.cost, now)
        return self.shaping.window_retry_at(
            self.state, self.ring.peak, self.cost, now, self.ring.room_at_ms
        )


class ShapedCall(NamedTuple):
    """One call, decided; nothing is counted yet."""

    rings: list[_ShapedRing]
    now: int
    waits_us: int
    """How long it waits."""
    binding: int | None
    """The index of the ring that it waits for, or that refuses it; None if it need not wait."""
    retry_ms: int | None
    """When it would be admitted; None if it is."""

    def count_call(self) -> list[ShapingState | None]:
        """Count the call in its rings. Return each ring's new shaping; None where there is none."""
        now, states = self.now, list[ShapingState | None]()
        for each in self.rings:
            if self.retry_ms is None:
                each.ring.used += each.cost
            else:
                each.ring.count_blocked(each.cost)
            stored: ShapingState | None = None
            if each.shaping is not None and self.retry_ms is None:
                stored = each.shaping.admitted(each.state, each.cost, now, self.waits_us)
            elif each.shaping is not None and each.is_refilled:
                stored = each.shaping.stored(each.state, now)
            if stored is not None:
                each.state = stored
            states.append(stored)
        return states

    def reply(self) -> AcquireReply:
        """Return the reply. Its `left` is what is left now: after `count_call`, by the call."""
        rings, now, index = self.rings, self.now, self.binding
        left = [each.left(now) for each in rings]
        if index is None:
            index = left.index(min(left))
        reset = reset_ms(rings[index].ring, now)
        if self.retry_ms is not None:
            reset = max(reset, self.retry_ms)
            return AcquireReply(0, index, left[index], reset, self.retry_ms, now, None, None, 0)
        starts = bucket_starts([each.ring for each in rings], now)
        return AcquireReply(
            1, index, max(0, left[index]), reset, 0, now, None, starts, self.waits_us
        )


def decide_shaped(
    charges: tuple[Charge, ...],
    rings: list[Ring],
    states: list[ShapingState | None],
    cap_ms: int | None,
    now: int,
) -> ShapedCall:
    """Decide one call on `rings`, which were rotated. `states`: the stored shaping of each."""
    shaped = [
        _ShapedRing(charge, ring, state, cap_ms, now)
        for charge, ring, state in zip(charges, rings, states, strict=True)
    ]
    refusing = [index for index, each in enumerate(shaped) if not each.admits(now)]
    if refusing:
        retry_at = {index: shaped[index].retry_at(now) for index in refusing}
        latest = max(refusing, key=lambda index: retry_at[index])  # of equal ones the first
        return ShapedCall(shaped, now, 0, latest, retry_at[latest] - now)
    waits = [each.wait_us(now) for each in shaped]
    longest = max(waits)
    return ShapedCall(shaped, now, longest, waits.index(longest) if longest else None, None)
