"""Turns on `MemoryStore`: the specification of `lua/acquire_turn.lua`."""

from __future__ import annotations

from ..ring.commands import Acquire
from ..ring.decision import Charge
from ..ring.key import line_name
from ..ring.memory_replies import acquire_reply, binding_ring
from ..ring.memory_rings import Handlers, MemoryRings, MemoryValues
from ..ring.replies import AcquireReply
from ..ring.ring import Ring
from .commands import AcquireTurn, TurnReply
from .line import VirtualQueue, keep_turn, line_expires_in_ms, queued_permits, tail_at, take_turn


class MemoryLines:
    """The command of calls that take places in lines. Callers hold the lock of the store."""

    def __init__(self, values: MemoryValues, rings: MemoryRings) -> None:
        self._values, self._rings = values, rings
        self.handlers: Handlers = {"acquire_turn": self._turn}

    def _turn(self, command: AcquireTurn, now: int) -> TurnReply:
        reply = self._rings.acquire(Acquire(command.charges), now)
        rings = [self._rings.ring_at(charge, now) for charge in command.charges]
        charges = command.charges
        windows = [charge.limit.span * charge.limit.bucket_ms for charge in charges]
        tails = [
            tail_at(self._values.get(line_name(charge.ring)), window_ms, now)
            for charge, window_ms in zip(charges, windows, strict=True)
        ]
        turn_ms, queued = now, 0
        if not reply.admitted or command.takes_next:
            index, room_at_ms = _last_room(command.charges, reply, rings, now)
            limit, cost = charges[index].limit, charges[index].cost
            terms = limit.amount, windows[index], now
            if reply.admitted:
                queued = queued_permits(tails[index], command.held_ms, *terms)
            kept = None
            if not reply.admitted:
                kept = keep_turn(command.held_ms, room_at_ms, limit.bucket_ms, now)
            if kept is None:
                turn_ms, tails[index] = take_turn(tails[index], room_at_ms, cost, *terms)
            else:
                turn_ms = kept
        for charge, tail_us, window_ms in zip(charges, tails, windows, strict=True):
            if tail_us > now * 1000.0:
                expires_at_ms = now + line_expires_in_ms(window_ms) + 1
                queue = VirtualQueue(tail_us, now, expires_at_ms)
                self._values.put(line_name(charge.ring), queue)
        return TurnReply(reply, turn_ms - now, queued)


def _last_room(
    charges: tuple[Charge, ...], reply: AcquireReply, rings: list[Ring], now: int
) -> tuple[int, int]:
    """Return the index of the ring that has room last, and when: for the refused call, or for one
    more call like the admitted one.
    """
    if reply.admitted:
        fits = [
            ring.peak + charge.cost <= charge.limit.amount
            for charge, ring in zip(charges, rings, strict=True)
        ]
        if all(fits):
            return binding_ring(charges, rings, now)[0], now
        reply = acquire_reply(charges, rings, 1, 0, now)
    return reply.binding_index, now + reply.retry_ms
