"""An observer that adds up what it is told."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Coroutine, Sequence
from typing import Any

from distwindow import Counts, Decision, Level, Observer, ObserverEvent, StoreCall
from distwindow.support.async_use import run_at_once


def run(in_tasks: bool, calls: Coroutine[Any, Any, None]) -> None:
    if in_tasks:
        asyncio.run(calls)
    else:
        run_at_once(calls)  # it awaits nothing


class Told(Observer):
    """What was told: calls and permits by what was decided, and all else as it is."""

    def __init__(self) -> None:
        self.calls: Counter[Any] = Counter()
        """By limit, result, reason and source."""
        self.permits: Counter[Any] = Counter()
        self.counts: list[Counts] = []
        self.waited: list[float] = []
        self.store_calls: list[StoreCall] = []
        self.events: list[ObserverEvent] = []
        self.levels: list[Level] = []

    def on_counts(self, batch: Sequence[Counts]) -> None:
        for counts in batch:
            what = (counts.limit, counts.result, counts.reason, counts.source)
            self.calls[what] += counts.calls
            self.permits[what] += counts.permits
            self.waited += counts.waited
            self.counts.append(counts)

    def on_store_call(self, call: StoreCall) -> None:
        self.store_calls.append(call)

    def on_event(self, event: ObserverEvent) -> None:
        self.events.append(event)

    def on_levels(self, batch: Sequence[Level]) -> None:
        self.levels += batch


class Seen:
    """What an application has seen, in the same words."""

    def __init__(self) -> None:
        self.calls: Counter[Any] = Counter()
        self.permits: Counter[Any] = Counter()

    @staticmethod
    def name_of(decision: Decision) -> tuple[str, ...]:
        result = "allowed" if decision.allowed else "refused"
        return str(decision.limit), result, decision.reason, decision.source

    def note(self, decision: Decision) -> None:
        self._add(self.name_of(decision), decision.cost)

    def note_error(self, limits: Sequence[Any], cost: int) -> None:
        limit = ", ".join(map(str, limits))
        self._add((limit, "error", "store_down", "policy"), cost)

    def _add(self, what: tuple[str, ...], cost: int) -> None:
        self.calls[what] += 1
        self.permits[what] += cost
