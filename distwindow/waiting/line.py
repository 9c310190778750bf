"""The virtual line of a ring: who was refused takes a place in it, and is told a turn.

It is the specification of `lua/shared/line.lua`. A line is not a list of callers. It is one number,
the last turn, and so costs the same for any number of callers:

    turn   when the holder of a place should ask again: when its permits become free, as those
           before it in the line take theirs
    tail   the last turn that was given out

A turn is not before there is room, and as far after the one before as the limit needs to admit its
cost: `cost * window / amount`. Turns are a hint: admission never depends on the line.

A line is forgotten when nobody has asked for two windows. Those who keep their turns come at least
once in a window, as no turn is further than that from the one before; so if nobody has come for
longer, nobody will.
"""

from __future__ import annotations

import math
from typing import NamedTuple

MAX_LINE_WINDOWS = 1000
"""No line is longer than this many windows: its last turn is then given out again and again, so
that callers that take places and never come cannot push it ever further away.
"""


class VirtualQueue(NamedTuple):
    """The line of a ring, as it is stored."""

    tail_us: float
    """The last turn, us since the epoch: a whole number as a float, as scripts count in doubles."""
    seen_ms: int
    """When somebody last asked, ms since the epoch."""
    expires_at_ms: int = 0
    """When it is forgotten, ms since the epoch. Not stored: the hash itself expires."""


class Turn(NamedTuple):
    """A turn as it is told to a caller."""

    turn_ms: int
    """When to ask again, ms since the epoch."""
    tail_us: float
    """The same, us: the end of the line from now on."""


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


def take_turn(
    tail_us: float, room_at_ms: int, cost: int, amount: int, window_ms: int, now: int
) -> Turn:
    """Take the place at the end of the line, for a caller that has room at `room_at_ms`."""
    longest = now * 1000.0 + MAX_LINE_WINDOWS * (window_ms * 1000.0)
    turn_us = max(room_at_ms * 1000.0, tail_us + spacing_us(cost, amount, window_ms))
    turn_us = min(turn_us, longest)
    return Turn(math.ceil(turn_us / 1000), turn_us)


def keep_turn(held_ms: int, room_at_ms: int, bucket_ms: int, now: int) -> int | None:
    """Return when a caller that was refused although it holds the turn `held_ms` (0: it holds none)
    should ask again, ms since the epoch; None if it has to take a new place.

    Who comes before its turn keeps it. Who has room within a bucket waits for that: others came a
    little before it, and it would lose its place for a small error of a clock.
    """
    if held_ms >= room_at_ms:
        return held_ms
    return room_at_ms if held_ms and room_at_ms - now <= bucket_ms else None


def queued_permits(tail_us: float, held_ms: int, amount: int, window_ms: int, now: int) -> int:
    """Return how many permits those wait for whose turns come after now, and after that of the
    caller, `held_ms` (0: it has none).
    """
    begin = max(now * 1000.0, held_ms * 1000.0)
    return math.floor(max(0.0, tail_us - begin) * amount / (window_ms * 1000.0) + 0.5)
