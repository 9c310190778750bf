"""Processes whose callers wait in `acquire`, at a time that is only counted: every waiter runs the
operation that `acquire` runs, over one store.
"""

from __future__ import annotations

import heapq
from collections.abc import Generator
from itertools import count
from random import Random
from typing import Any, NamedTuple

from distwindow import Decision, Limit, RateLimitExceeded
from distwindow.limiter.decider import wait_until_admitted
from distwindow.local.in_process import InProcess
from distwindow.ring.command import Command
from distwindow.ring.commands import Acquire
from distwindow.runtime.command_cache import CommandCache
from distwindow.runtime.options import Options
from distwindow.runtime.steps import Sleep
from distwindow.stores.memory import MemoryStore
from distwindow.waiting.waiting import PermitWaiter, Turns, WaitQueues, wait_for_turn
from tests.clock_and_stores import T0, ManualClock

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
        self.permit_waiter = PermitWaiter(process.queues, self.command, timeout)
        self.operation: Generator[Any, Any, Decision] | None = None
        self.ended = False

    def begin(self) -> None:
        by_turns = self.process.fleet.by_turns and self.process.turns.applies_to(self.command)
        self.operation = (
            wait_for_turn(self.command, self.process.turns, self.permit_waiter)
            if by_turns
            else wait_until_admitted(self.command, self.permit_waiter)
        )


class Process:
    def __init__(self, fleet: Fleet) -> None:
        self.fleet = fleet
        self.commands = CommandCache("turns", fleet.limit)
        self.queues = WaitQueues(fleet.clock)
        strategy = InProcess(self.commands, fleet.store.decide_at_once, fleet.clock, Options())
        self.turns = Turns(self.commands, strategy, "store", fleet.clock, lambda decision: decision)


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
        while self.store.decide(command):
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
                waiter.permit_waiter._deadline = (
                    None if waiter.timeout is None else self.clock.monotonic() + waiter.timeout
                )
                waiter.permit_waiter._queues.join(waiter.permit_waiter)
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
        """Do what `PermitWaiter.wait` does when it is woken."""
        if waiter.operation is not None:
            return
        try:
            begins = (
                waiter.permit_waiter.is_head or waiter.permit_waiter._remaining_s_or_raise() == 0.0
            )
        except RateLimitExceeded as refused:
            self.refused.append((waiter.number, refused))
            self.end(waiter)
            return
        remaining = waiter.permit_waiter.remaining_s
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
            return self.store.decide(command)
        return self.store.execute(command)

    def end(self, waiter: Waiter) -> None:
        waiter.ended = True
        waiter.permit_waiter.leave()
        queue = waiter.process.queues.by_name.get(waiter.command.charges[0].ring)
        if queue is not None:
            for other in self.waiters:
                if other.permit_waiter is queue.waiting[0]:
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
