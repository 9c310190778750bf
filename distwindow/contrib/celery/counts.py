"""What an observer is told of the tasks of one Celery worker; see `queue_counts.py`."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from ...observer import Tally
from ..queue_counts import (
    DecidedTask,
    WaitingTasks,
    count_task,
    decided_task,
    tell_waiting,
    text_of,
)
from .admission import RUN, Answer
from .lines import ParkedTask, Permits, TaskQueue, TaskQueues
from .worker import CeleryWorkerPort


class GateCounts:
    """Counts what a gate does with tasks, and how many wait."""

    def __init__(
        self, tally: Tally | None, lines: TaskQueues[Any], worker: CeleryWorkerPort, source: str
    ) -> None:
        """`source` is what decides: "store", or "local" for one in this process."""
        self._tally, self._lines, self._worker, self._source = tally, lines, worker, source
        if tally is not None:
            tell_waiting(tally, self._waiting)

    def changed(self) -> None:
        """Have it told how many wait: there is one more, or less."""
        if self._tally is not None:
            self._tally.level_changed()

    def started(self, entry: ParkedTask[Any], answer: Answer) -> None:
        reason, source = "ok", self._source
        if entry.admitted:
            reason = "paced"
        elif answer is RUN:
            reason, source = "store_down", "policy"
        waited: tuple[float, ...] = ()
        if entry.parked:
            waited = (self._worker.monotonic() - self._worker.received_s(entry.item),)
        if answer.in_shadow is not None:
            asked = decided_task(answer.in_shadow)
        else:
            asked = _asked(entry, answer.permits, "allowed", reason, source)
        count_task(self._tally, entry.line.task, asked, waited)

    def parked(self, line: TaskQueue[Any], entries: Iterable[ParkedTask[Any]]) -> None:
        permits = None if line.used_up is None else line.used_up.permits
        how: tuple[Any, str, str] = "refused", "over_limit", self._source
        if line.waits_for_store:
            how = "refused", "store_down", "policy"
        elif line.failures:
            how = "error", "key_error", self._source
        for entry in entries:
            if not entry.admitted:  # otherwise it waits for its moment, and then starts
                count_task(self._tally, line.task, _asked(entry, permits, *how))

    def sent_back(self, entry: ParkedTask[Any]) -> None:
        """Count a task that is sent back to its queue, if it has not waited for its limits."""
        if not entry.parked:
            asked = _asked(entry, None, "refused", "sent_back", "local")
            count_task(self._tally, entry.line.task, asked)

    def _waiting(self) -> Iterator[WaitingTasks]:
        """Yield what waits. Called by the thread of the worker of limiters, while the gate may
        change its lines: what it changes meanwhile is told the next time.
        """
        now_s = self._worker.monotonic()
        for line in self._lines:
            parked = [entry for entry in list(line.entries) if entry.parked and not entry.left]
            if parked:
                oldest_s = max(now_s - self._worker.received_s(one.item) for one in parked)
                reason = "store_down" if line.waits_for_store else "over_limit"
                yield WaitingTasks(line.task, reason, len(parked), oldest_s)


def _asked(
    entry: ParkedTask[Any], permits: Permits | None, result: Any, reason: str, source: str
) -> DecidedTask:
    if permits is not None:
        return DecidedTask(*permits, result, reason, source)
    key, _, cost = entry.items[0]
    limits = text_of(limit for _, of_key, _ in entry.items for limit in of_key)
    return DecidedTask(key, limits, cost, result, reason, source)
