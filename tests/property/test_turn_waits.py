"""Waiting by turns, in many processes at a time that is only counted: every waiter runs the
operation that `acquire` runs, over one store.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Generator
from itertools import count
from random import Random
from typing import Any, NamedTuple

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from distwindow import Decision, Limit, RateLimitExceeded
from distwindow.consistency.in_process import InProcess
from distwindow.operations.acquire import wait_until_admitted
from distwindow.operations.command_cache import CommandCache
from distwindow.operations.steps import Sleep
from distwindow.operations.turns import Turns, wait_for_turn
from distwindow.operations.wait_queue import QueueSlot, WaitQueues
from distwindow.protocol.commands import Acquire
from distwindow.protocol.frames import Command
from distwindow.store.memory import MemoryStore
from tests.unit.clock_and_stores import T0, ManualClock

LENIENT = settings(deadline=None, suppress_health_check=list(HealthCheck), print_blob=True)
TRIP_MS = 1
"""How long a call takes."""


class Admission(NamedTuple):
    waiter: int
    at_ms: int


class Waiter:
    """One call of `acquire`, as a generator that has not begun yet."""

    def __init__(self, process: Process, number: int, cost: int, timeout: float | None) -> None:
        self.process, self.number = process, number
        self.timeout = timeout
        self.arrived_ms = 0
        self.command = process.commands.acquire_command("key", cost)
        self.slot = QueueSlot(process.queues, self.command, timeout)
        self.operation: Generator[Any, Any, Decision] | None = None
        self.ended = False

    def begin(self) -> None:
        by_turns = self.process.fleet.by_turns and self.process.turns.serve(self.command)
        self.operation = (
            wait_for_turn(self.command, self.process.turns, self.slot)
            if by_turns
            else wait_until_admitted(self.command, self.slot)
        )


class Process:
    def __init__(self, fleet: Fleet) -> None:
        self.fleet = fleet
        self.commands = CommandCache("turns", fleet.limit)
        self.queues = WaitQueues(fleet.clock)
        strategy = InProcess(self.commands, fleet.store.attempt)
        self.turns = Turns(self.commands, strategy, "store", fleet.clock)


class Fleet:
    """Processes that share a limit. Events happen in the order of their times."""

    def __init__(self, limit: Limit, processes: int, *, by_turns: bool = True) -> None:
        self.limit, self.by_turns = limit, by_turns
        self.clock = ManualClock(auto_advance=False)
        self.store = MemoryStore(self.clock)
        self.processes = [Process(self) for _ in range(processes)]
        self.events: list[tuple[int, int, Waiter, Any]] = []
        self.numbers = count()
        self.waiters: list[Waiter] = []
        self.admitted: list[Admission] = []
        self.refused: list[tuple[int, RateLimitExceeded]] = []
        self.calls = 0

    def fill(self) -> None:
        command = CommandCache("turns", self.limit).acquire_command("key")
        while self.store.attempt(command):
            pass

    def arrive(
        self, after_ms: int, process: int, cost: int = 1, timeout: float | None = None
    ) -> None:
        waiter = Waiter(self.processes[process], len(self.waiters), cost, timeout)
        self.waiters.append(waiter)
        self.at(T0 + after_ms, waiter, "arrives")

    def at(self, when_ms: int, waiter: Waiter, what: Any) -> None:
        heapq.heappush(self.events, (when_ms, next(self.numbers), waiter, what))

    def run(self) -> Fleet:
        while self.events:
            when_ms, _, waiter, what = heapq.heappop(self.events)
            if when_ms > self.clock.now_ms():
                self.clock.move(when_ms - self.clock.now_ms())
            if waiter.ended:
                continue
            if what == "arrives":
                waiter.arrived_ms = when_ms
                waiter.slot._deadline = (
                    None if waiter.timeout is None else self.clock.monotonic() + waiter.timeout
                )
                waiter.slot._join()
                if waiter.timeout is not None:
                    self.at(when_ms + int(waiter.timeout * 1000), waiter, "looks")
                self.look(waiter)
            elif what == "looks":
                self.look(waiter)
            elif what == "vanishes":
                self.end(waiter)
            else:
                self.step(waiter, what)
        return self

    def look(self, waiter: Waiter) -> None:
        """Do what `QueueSlot.wait` does when it is woken."""
        if waiter.operation is not None:
            return
        try:
            begins = waiter.slot._is_head() or waiter.slot._remaining_s_or_raise() == 0.0
        except RateLimitExceeded as refused:
            self.refused.append((waiter.number, refused))
            self.end(waiter)
            return
        remaining = waiter.slot.remaining_s
        if not begins and remaining is not None and remaining < TRIP_MS / 1000:
            self.at(self.clock.now_ms() + TRIP_MS, waiter, "looks")  # as it is not yet over
        if begins:
            waiter.begin()
            self.step(waiter, None)

    def step(self, waiter: Waiter, reply: Any) -> None:
        assert waiter.operation is not None
        try:
            step = waiter.operation.send(reply)
        except StopIteration as end:
            self.admitted.append(Admission(waiter.number, end.value.now_ms))
            self.end(waiter)
            return
        except RateLimitExceeded as refused:
            self.refused.append((waiter.number, refused))
            self.end(waiter)
            return
        now = self.clock.now_ms()
        if isinstance(step, Sleep):
            assert step.seconds > 0
            self.at(now + max(1, round(step.seconds * 1000)), waiter, None)
            return
        self.calls += 1
        assert self.calls < 5_000, "it never ends"
        self.at(now + TRIP_MS, waiter, self.execute(step))

    def execute(self, command: Command[Any]) -> Any:
        if isinstance(command, Acquire):
            return self.store.attempt(command)
        return self.store.execute(command)

    def end(self, waiter: Waiter) -> None:
        waiter.ended = True
        waiter.slot.leave()
        queue = waiter.process.queues._queues.get(waiter.command.charges[0].ring)
        if queue is not None:
            for other in self.waiters:
                if other.slot is queue.waiting[0]:
                    self.look(other)


def crowd(limit: Limit, *, by_turns: bool, full: bool, seed: int = 1) -> Fleet:
    """Eight processes with 25 waiters each, who come within 50 ms."""
    random, fleet = Random(seed), Fleet(limit, 8, by_turns=by_turns)
    begin_ms = 0
    if full:  # one after the other, as they will be admitted
        window_ms = limit.span * limit.bucket_ms
        begin_ms = window_ms
        for number in range(limit.amount):
            fleet.arrive(number * window_ms // limit.amount, 0)
    for number in sorted(random.randrange(50) for _ in range(200)):
        fleet.arrive(begin_ms + number, random.randrange(8))
    fleet.run()
    assert len(fleet.admitted) == len(fleet.waiters)
    return fleet


def order(fleet: Fleet) -> float:
    """Return the rank correlation of arrival and admission."""
    numbers = [admission.waiter for admission in fleet.admitted]
    n = len(numbers)
    return 1 - 6 * sum((i - number) ** 2 for i, number in enumerate(numbers)) / (n * (n * n - 1))


@pytest.mark.parametrize("limit", ["20/second", "20/second strict", "5/second"])
def test_a_crowd_costs_at_most_two_calls_for_each_admission(limit: str) -> None:
    """Where the window was filled evenly, as by a crowd that waits for long."""
    turns = crowd(Limit(limit), by_turns=True, full=True)
    plain = crowd(Limit(limit), by_turns=False, full=True)
    assert turns.calls <= 2 * len(turns.admitted)
    assert plain.calls >= 3 * len(plain.admitted)


@pytest.mark.parametrize("full", [True, False])
@pytest.mark.parametrize("limit", ["20/second", "20/second strict", "5/second", "100/second"])
def test_a_crowd_is_admitted_in_about_its_order_and_at_the_limits_rate(
    limit: str, full: bool
) -> None:
    turns = crowd(Limit(limit), by_turns=True, full=full)
    plain = crowd(Limit(limit), by_turns=False, full=full)
    assert order(turns) > 0.9
    last, plain_last = turns.admitted[-1].at_ms, plain.admitted[-1].at_ms
    window_ms = Limit(limit).span * Limit(limit).bucket_ms
    assert last <= plain_last + window_ms, "one window later at most, however long the line"


@pytest.mark.parametrize("costs", [(1, 2), (1, 10), (1, 50), (1, 100), (1, 1, 1, 200)])
def test_a_crowd_of_different_costs_is_done_a_window_later_at_most(costs: tuple[int, ...]) -> None:
    ends = []
    for by_turns in (True, False):
        random, fleet = Random(1), Fleet(Limit("200/second"), 8, by_turns=by_turns)
        for number in sorted(random.randrange(50) for _ in range(60 + 1500 // sum(costs))):
            fleet.arrive(number, random.randrange(8), random.choice(costs))
        fleet.run()
        assert len(fleet.admitted) == len(fleet.waiters)
        ends.append(fleet.admitted[-1].at_ms)
    assert ends[0] <= ends[1] + 1000


def test_one_process_alone_waits_no_longer_than_without_turns() -> None:
    """All permits of a burst become free at once, and nobody else is in the line."""
    ends = []
    for by_turns in (True, False):
        fleet = Fleet(Limit("100/minute"), 1, by_turns=by_turns)
        fleet.fill()
        for _ in range(30):
            fleet.arrive(0, 0)
        fleet.run()
        ends.append(fleet.admitted[-1].at_ms)
    assert ends[0] <= ends[1] + 2 * TRIP_MS


limits = st.builds(
    lambda amount, buckets, bound: Limit(amount, 0.6, buckets, bound),
    st.one_of(st.integers(1, 12), st.just(60)),  # under the last all costs wait by turns
    st.sampled_from([1, 2, 3, 6, 10]),
    st.sampled_from(["leap", "strict"]),
)
arrival = st.tuples(
    st.integers(0, 1500),
    st.integers(0, 3),
    st.integers(1, 3),
    st.one_of(st.none(), st.none(), st.integers(0, 3000).map(lambda ms: ms / 1000)),
    st.sampled_from([None, None, None, None, 0, 100, 700]),
)


@settings(LENIENT, max_examples=60)
@given(limit=limits, arrivals=st.lists(arrival, min_size=1, max_size=20), full=st.booleans())
def test_every_waiter_is_admitted_once_or_its_timeout_ends(
    limit: Limit, arrivals: list[Any], full: bool
) -> None:
    """Waiters vanish, too, and leave their places to those behind them."""
    fleet = Fleet(limit, 4)
    if full:
        fleet.fill()
    vanish = set()
    for number, (after_ms, process, cost, timeout, vanishes) in enumerate(
        sorted(arrivals, key=str)
    ):
        fleet.arrive(after_ms, process, min(cost, limit.amount), timeout)
        if vanishes is not None:
            vanish.add(number)
            fleet.at(T0 + after_ms + vanishes, fleet.waiters[-1], "vanishes")
    fleet.run()
    admitted = Counter(admission.waiter for admission in fleet.admitted)
    assert set(admitted.values()) <= {1}
    refused = {number for number, _ in fleet.refused}
    assert not refused & set(admitted)
    for waiter in fleet.waiters:
        number = waiter.number
        assert number in admitted or number in refused or number in vanish
        if waiter.timeout is None:
            assert number not in refused
    for number, at_ms in fleet.admitted:
        waiter = fleet.waiters[number]
        if waiter.timeout is not None:
            # The last call is sent when the timeout ends, and that is a ms late at most.
            assert at_ms <= waiter.arrived_ms + waiter.timeout * 1000 + 2 * TRIP_MS
    for _, refusal in fleet.refused:
        assert refusal.retry_after >= 0  # 0 where the head is asking


@settings(LENIENT, max_examples=40)
@given(
    limit=limits,
    arrivals=st.lists(st.tuples(st.integers(0, 300), st.integers(0, 3)), min_size=1, max_size=40),
)
def test_waiters_of_one_process_are_admitted_in_the_order_they_came(
    limit: Limit, arrivals: list[tuple[int, int]]
) -> None:
    fleet = Fleet(limit, 4)
    for after_ms, process in sorted(arrivals):
        fleet.arrive(after_ms, process)
    fleet.run()
    for process in range(4):
        own = [
            a.waiter
            for a in fleet.admitted
            if fleet.waiters[a.waiter].process is fleet.processes[process]
        ]
        assert own == sorted(own)


def test_a_turn_after_the_timeout_is_no_refusal() -> None:
    """Its caller asks once more when its timeout ends: those before it may have vanished."""
    fleet = Fleet(Limit("1/second 1 buckets"), 4)
    fleet.fill()
    for process in range(3):
        fleet.arrive(process, process)
        fleet.at(T0 + 500, fleet.waiters[-1], "vanishes")
    fleet.arrive(10, 3, timeout=1.5)
    fleet.run()
    (admission,) = fleet.admitted
    assert admission.waiter == 3
    assert T0 + 1500 <= admission.at_ms <= T0 + 1500 + 10 + TRIP_MS


def test_a_timeout_that_ends_before_there_is_room_is_refused_at_once() -> None:
    fleet = Fleet(Limit("1/second 1 buckets"), 2)
    fleet.fill()
    fleet.arrive(0, 0, timeout=0.9)
    fleet.run()
    ((_, refusal),) = fleet.refused
    assert refusal.retry_after == 1.0
    assert fleet.clock.now_ms() <= T0 + 900
    assert fleet.calls == 1


def test_who_is_refused_in_the_end_is_told_its_turn() -> None:
    fleet = Fleet(Limit("1/second 1 buckets"), 4)
    fleet.fill()
    for process in range(3):
        fleet.arrive(process, process)
    fleet.arrive(10, 3, timeout=2.5)
    fleet.run()
    ((_, refusal),) = fleet.refused
    assert refusal.retry_after == pytest.approx(1.5, abs=0.02)


def test_places_of_vanished_callers_hold_nobody_up_for_more_than_ten_windows() -> None:
    fleet = Fleet(Limit("1/second 1 buckets"), 2)
    fleet.fill()
    turns = fleet.processes[0].turns
    for _ in range(500):  # they never come
        operation = turns.attempt("key", 1, True, False)
        command = next(operation)
        with pytest.raises(StopIteration):
            operation.send(fleet.execute(command))  # type: ignore[arg-type]  # it is one
    fleet.arrive(0, 1)
    fleet.run()
    assert fleet.admitted[0].at_ms <= T0 + 11_000 + 2 * TRIP_MS
