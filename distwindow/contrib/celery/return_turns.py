"""When a task that is sent back is to come again: its turn.

    why it is sent back            its turn
    it was kept for too long       the worker's own
    the worker has no room for it  the fleet's; the worker's own where that is unknown: while the
                                   store is away, under paced limits, once its line may ask, for a
                                   cost that is not that of the first in the line, and for a line
                                   whose key cannot be served

Turns of a worker are as far apart as the limit admits tasks. Several workers that gave out turns
for want of room would give the same moments, and the tasks come back as many times too early as
there are workers, to find no room again. What was kept for too long has half of `max_hold` when it
comes back, whenever that is within the other half: how often that goes back does not depend on its
turn, so it costs no call.
"""

from __future__ import annotations

from typing import Any

from ... import Limit
from .admission import Admission
from .lines import Entry, Lines

_SHORTEST_SENT_BACK_S = 1.0


class ReturnTurns:
    """Gives out the turns of one worker's tasks. Moments are those of the gate's clock."""

    def __init__(self, admission: Admission, lines: Lines[Any], max_hold_s: float) -> None:
        self._admission = admission
        self._lines = lines
        # While its eta is to come, another worker keeps it, and half of the time is left then.
        self._longest_s = max_hold_s / 2

    def turn_s(self, entry: Entry[Any], limits: tuple[Limit, ...], now_s: float) -> float:
        """Return when this task is to come again."""
        return (
            self._own_turn_s(entry, now_s) if entry.has_room else self._fleet_turn_s(entry, limits)
        )

    def _own_turn_s(self, entry: Entry[Any], now_s: float) -> float:
        """Return the worker's own turn for this task."""
        return self._postponed_s(entry.line.next_turn_s, now_s)

    def _fleet_turn_s(self, entry: Entry[Any], limits: tuple[Limit, ...]) -> float:
        """Return the fleet's turn for this task, or the worker's own where that is unknown.

        The limiter may admit the call. Then the first task of the line has its permits, and may
        start: so only a task of the same cost asks.
        """
        line, head = entry.line, entry.line.head
        asks = line.state == "waiting" and not line.failures
        answer = None
        if asks and head is not None and head.cost == entry.cost:
            answer = self._admission.take_turn(line.key, limits, entry.cost)
        now_s = self._admission.monotonic()
        if answer is not None and not answer.admitted:
            return self._postponed_s(now_s + answer.wait_s, now_s)
        if answer is not None and head is not None:
            head.admit()
            self._lines.stop_waiting(line)
        return self._own_turn_s(entry, now_s)

    def _postponed_s(self, turn_s: float, now_s: float) -> float:
        """Return the turn, or a later moment: a task stays away for a while."""
        return max(now_s + min(_SHORTEST_SENT_BACK_S, self._longest_s), turn_s)

    def delay_s(self, turn_s: float, now_s: float) -> float:
        """Return how long the task stays away: no longer than another worker may keep it."""
        return min(turn_s - now_s, self._longest_s)

    def note_sent_back(self, entry: Entry[Any], limits: tuple[Limit, ...], turn_s: float) -> None:
        """Let the worker's own next turn follow the one at which this task comes back."""
        seconds = [min(entry.cost, limit.amount) * limit.per / limit.amount for limit in limits]
        entry.line.next_turn_s = turn_s + max(seconds, default=0.0)
