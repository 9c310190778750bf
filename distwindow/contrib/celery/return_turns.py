"""When a task that is sent back is to come again: its turn.

    why it is sent back            its turn
    it was kept for too long       the worker's own
    the worker has no room for it  the fleet's; the worker's own where that is unknown: while the
                                   store is away, under paced limits, once its line may ask, and
                                   for a line whose key cannot be served

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
from .lines import Entry

_SHORTEST_SENT_BACK_S = 1.0


class ReturnTurns:
    """Gives out the turns of one worker's tasks. Moments are those of the gate's clock."""

    def __init__(self, admission: Admission, max_hold_s: float) -> None:
        self._admission = admission
        # While its eta is to come, another worker keeps it, and half of the time is left then.
        self._longest_s = max_hold_s / 2

    def own_s(self, entry: Entry[Any], now_s: float) -> float:
        """Return the worker's own turn for this task."""
        return max(self._earliest_s(now_s), entry.line.turn_s)

    def of_fleet_s(
        self, entry: Entry[Any], limits: tuple[Limit, ...], now_s: float
    ) -> float | None:
        """Return the fleet's turn, or the worker's own where that is unknown; None if the limiter
        has admitted the task, which is to start then.
        """
        if entry.line.state != "waiting" or entry.line.failures:
            return self.own_s(entry, now_s)
        answer = self._admission.take_turn(entry.line.key, limits, entry.cost)
        if answer is None:
            return self.own_s(entry, now_s)
        return None if answer.admitted else max(self._earliest_s(now_s), now_s + answer.wait_s)

    def delay_s(self, turn_s: float, now_s: float) -> float:
        """Return how long the task stays away: no longer than another worker may keep it."""
        return min(turn_s - now_s, self._longest_s)

    def follow(self, entry: Entry[Any], limits: tuple[Limit, ...], turn_s: float) -> None:
        """Let the worker's own next turn follow that of this task, which has been sent back."""
        seconds = [entry.cost * limit.per / limit.amount for limit in limits]
        entry.line.turn_s = turn_s + max(seconds, default=0.0)

    def _earliest_s(self, now_s: float) -> float:
        return now_s + min(_SHORTEST_SENT_BACK_S, self._longest_s)
