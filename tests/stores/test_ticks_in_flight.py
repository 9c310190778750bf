"""Ticks that were sent are dropped once they are answered, and time out otherwise."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from distwindow import Limit
from distwindow.ring.commands import Acquire, charges_of
from distwindow.stores.redis.asyncio import Batch, LoopTick, TicksInFlight


class Setup:
    def __init__(self) -> None:
        self.now = 100.0
        self.timed_out: list[Batch] = []
        self.timers: list[float] = []
        loop: Any = self
        self.ticks = TicksInFlight(loop, lambda: self.now, self._time_out)
        self.run_timer: Callable[[], None] = lambda: None

    def call_later(self, seconds: float, function: Callable[[], None]) -> Any:
        """In place of the event loop's."""
        self.timers.append(seconds)
        self.run_timer = function
        return SimpleNamespace(cancel=lambda: None)

    def send(self, deadline: float, batches: int = 2) -> LoopTick:
        handler: Any = None
        tick = LoopTick(handler, deadline)
        command = Acquire(charges_of("k", b"p", [Limit("5/minute")], 1))
        tick.batches += [Batch(tick, command, True) for _ in range(batches)]
        self.ticks.add(tick)
        self.ticks.ensure_timer(deadline)
        return tick

    def _time_out(self, batch: Batch) -> None:
        batch.done = True
        self.timed_out.append(batch)


def answer(tick: LoopTick) -> None:
    for batch in tick.batches:
        batch.done = True


def test_an_answered_tick_is_dropped_with_the_next_one() -> None:
    """With its batches, which refer to it: no garbage collection is needed to free them."""
    setup = Setup()
    tick = setup.send(101.0)
    answer(tick)
    setup.send(102.0)
    assert tick.batches == []
    setup.now = 101.0
    setup.run_timer()
    assert setup.timed_out == []


def test_a_tick_with_one_call_unanswered_stays_until_its_deadline() -> None:
    setup = Setup()
    tick = setup.send(101.0)
    tick.batches[1].done = True
    setup.send(102.0)
    setup.now = 101.0
    setup.run_timer()
    assert setup.timed_out == [tick.batches[0]]


def test_the_timer_is_set_again_for_an_earlier_deadline_and_after_it_for_the_next() -> None:
    setup = Setup()
    answer(setup.send(105.0))
    late = setup.send(106.0)
    assert setup.timers == [5.0], "the timer of an answered tick may stay: it runs earlier"
    early = setup.send(102.0)
    assert setup.timers == [5.0, 2.0]
    setup.now = 102.5
    setup.run_timer()
    assert setup.timed_out == early.batches
    assert setup.timers == [5.0, 2.0, 3.5]
    setup.now = 106.0
    setup.run_timer()
    assert setup.timed_out == early.batches + late.batches
