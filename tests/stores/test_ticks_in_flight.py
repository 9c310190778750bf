"""Ticks that were sent are dropped once they are answered, and time out otherwise."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

import pytest

from distwindow import Limit
from distwindow.ring.commands import Acquire, charges_of
from distwindow.ring.replies import PAST_DEADLINE
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


# -- callers that were cancelled ------------------------------------------------------------------


class Called:
    """A batch with so many callers, and what its handler is told."""

    def __init__(self, callers: int, *, wants_decision: bool) -> None:
        self.unknown = 0
        self.late: list[Any] = []
        self.command = Acquire(charges_of("k", b"p", [Limit("5/minute")], 1))
        handler: Any = self
        self.batch = Batch(LoopTick(handler, 1.0), self.command, wants_decision, self.late.append)
        futures: list[Any] = [Future() for _ in range(callers)]
        self.batch.futures += futures

    def count_unknown(self, calls: int) -> None:
        self.unknown += calls


def test_who_is_cancelled_before_a_tick_is_sent_is_not_charged() -> None:
    called = Called(3, wants_decision=True)
    first, second, third = called.batch.futures
    second.cancel()
    assert called.batch.drop_cancelled()
    combined: Any = called.batch.combined()
    assert (combined.calls, called.batch.futures) == (2, [first, third])


def test_the_reply_for_a_caller_that_was_cancelled_is_given_back() -> None:
    """Otherwise the permits of its lease would be lost."""
    called = Called(1, wants_decision=False)
    called.batch.futures[0].cancel()
    called.batch.resolve("a lease")
    assert (called.late, called.unknown) == (["a lease"], 1)


@pytest.mark.parametrize(("left", "replies"), [(PAST_DEADLINE, 0), (4, 1)])
def test_a_late_reply_counts_only_if_the_command_was_executed(left: int, replies: int) -> None:
    called = Called(1, wants_decision=False)
    called.batch.done = True  # its time was over
    request: Any = SimpleNamespace(stamp=b"stamp")
    called.batch.request = request
    called.batch.on_reply([b"stamp", left, 1])
    called.batch.on_reply([b"another", 4, 1])
    assert len(called.late) == replies
