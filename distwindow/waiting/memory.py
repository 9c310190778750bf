"""How `MemoryStore` gives out turns: the specification of `lua/acquire_turn.lua`."""

from __future__ import annotations

from ..ring.decision import Charge
from ..ring.key import line_name
from ..ring.memory_replies import acquire_reply, binding_ring
from ..ring.replies import AcquireReply
from ..ring.ring import Ring
from .commands import AcquireTurn, TurnReply
from .line import Line, keep_turn, line_expires_in_ms, queued_permits, tail_at, take_turn


class MemoryLines:
    """The virtual lines in this process, by their `line_name`."""

    def __init__(self, lines: dict[bytes, Line] | None) -> None:
        """`lines`: where to keep them; None: in this object."""
        self._lines: dict[bytes, Line] = {} if lines is None else lines
        self._expires_at_ms: dict[bytes, int] = {}

    def turn(
        self, command: AcquireTurn, reply: AcquireReply, rings: list[Ring], now: int
    ) -> TurnReply:
        """Return the reply to a call that was decided by `reply`, and counted in `rings`."""
        charges = command.charges
        windows = [charge.limit.span * charge.limit.bucket_ms for charge in charges]
        tails = [
            tail_at(self._lines.get(line_name(charge.ring)), window_ms, now)
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
                name = line_name(charge.ring)
                self._lines[name] = Line(tail_us, now)
                self._expires_at_ms[name] = now + line_expires_in_ms(window_ms)
        return TurnReply(reply, turn_ms - now, queued)

    def remove(self, name: bytes) -> bool:
        """Remove the line of this name. Return True if there was one."""
        self._expires_at_ms.pop(name, None)
        return self._lines.pop(name, None) is not None

    def sweep(self, now: int) -> None:
        """Drop the lines that have expired."""
        for name in [name for name, at in self._expires_at_ms.items() if now > at]:
            self.remove(name)


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
