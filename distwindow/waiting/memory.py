"""Turns on `MemoryStore`: the specification of `lua/acquire_turn.lua`."""

from __future__ import annotations

import math
from typing import NamedTuple

from ..ring.commands import Acquire
from ..ring.decision import Charge
from ..ring.key import line_name
from ..ring.memory_rings import Handlers, MemoryRings, MemoryValues, acquire_reply, binding_ring
from ..ring.replies import AcquireReply
from ..ring.ring import Ring
from .commands import AcquireTurn, TurnReply


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
    """Return which ring has room last, and when, for this call or one more like it."""
    if reply.admitted:
        fits = [
            ring.peak + charge.cost <= charge.limit.amount
            for charge, ring in zip(charges, rings, strict=True)
        ]
        if all(fits):
            return binding_ring(charges, rings, now)[0], now
        reply = acquire_reply(charges, rings, 1, 0, now)
    return reply.binding_index, now + reply.retry_ms


MAX_LINE_WINDOWS = 1000
"""No line is longer than this many windows: its last turn is then given out again and again, so
that callers that take places and never come cannot push it ever further away.
"""


class VirtualQueue(NamedTuple):
    """The virtual line of a ring, as it is stored: who was refused takes a place in it, and is told
    a turn.

    It is the specification of `lua/shared/line.lua`. A line is not a list of callers. It is one
    number, the last turn, and so costs the same for any number of callers:

        turn   when the holder of a place should ask again: when its permits become free, as those
               before it in the line take theirs
        tail   the last turn that was given out

    A turn is not before there is room, and as far after the one before as the limit needs to admit
    its cost: `cost * window / amount`. Turns are a hint: admission never depends on the line.

    A line is forgotten when nobody has asked for two windows. Those who keep their turns come at
    least once in a window, as no turn is further than that from the one before; so if nobody has
    come for longer, nobody will.
    """

    tail_us: float
    """The last turn, us since the epoch: a whole number as a float, as scripts count in doubles."""
    seen_ms: int
    """When somebody last asked, ms since the epoch."""
    expires_at_ms: int = 0
    """When it is forgotten, ms since the epoch. Not stored: the hash itself expires."""


def take_turn(
    tail_us: float, room_at_ms: int, cost: int, amount: int, window_ms: int, now: int
) -> tuple[int, float]:
    """Take the place at the end of the line, for a caller that has room at `room_at_ms`. Return
    when to ask, ms since the epoch, and the same in us: the end of the line from now on.
    """
    longest = now * 1000.0 + MAX_LINE_WINDOWS * (window_ms * 1000.0)
    turn_us = max(room_at_ms * 1000.0, tail_us + spacing_us(cost, amount, window_ms))
    turn_us = min(turn_us, longest)
    return math.ceil(turn_us / 1000), turn_us


def keep_turn(held_ms: int, room_at_ms: int, bucket_ms: int, now: int) -> int | None:
    """Return when a caller that was refused although it holds the turn `held_ms` (0: it holds none)
    should ask again, ms since the epoch; None if it has to take a new place.

    Who comes before its turn keeps it. Who has room within a bucket waits for that: others came a
    little before it, and it would lose its place for a small error of a clock.
    """
    if held_ms >= room_at_ms:
        return held_ms
    return room_at_ms if held_ms and room_at_ms - now <= bucket_ms else None


def line_expires_in_ms(window_ms: int) -> int:
    """Return for how long a line is kept after somebody has asked, ms."""
    return 2 * window_ms


def tail_at(line: VirtualQueue | None, window_ms: int, now: int) -> float:
    """Return the last turn of the line, us since the epoch; 0 where there is none. A line that was
    last seen more than a window ahead of `now` is from before the clock was set back.
    """
    if line is None or not -window_ms <= now - line.seen_ms <= line_expires_in_ms(window_ms):
        return 0.0
    return line.tail_us


def spacing_us(cost: int, amount: int, window_ms: int) -> float:
    """Return the time in which a limit of `amount` permits in a window admits `cost`, us."""
    return float(math.ceil(float(cost) * (window_ms * 1000.0) / amount))


def queued_permits(tail_us: float, held_ms: int, amount: int, window_ms: int, now: int) -> int:
    """Return the permits of turns after now, and after the caller's (`held_ms`; 0: it has none)."""
    begin = max(now * 1000.0, held_ms * 1000.0)
    return math.floor(max(0.0, tail_us - begin) * amount / (window_ms * 1000.0) + 0.5)
