"""A simulated fleet whose calls arrive at given times, and whose commands and replies take time."""

from __future__ import annotations

import itertools
import random
from bisect import bisect_left
from collections.abc import Callable, Iterable
from functools import partial
from heapq import heappop, heappush
from typing import Any, NamedTuple

from distwindow.ring.decision import Decision
from distwindow.ring.limit import Limit
from tests.simulation.admissions import Admission
from tests.simulation.process import MakeStrategy, OperationRun, Process, SimulatedStore
from tests.simulation.scripted import RecordingStore, bucket_start_of

NEVER = float("inf")


class Arrival(NamedTuple):
    """One call."""

    at_ms: float
    """Since the beginning."""
    process: int


def poisson_arrivals(rates: Iterable[float], seconds: float, rng: random.Random) -> list[Arrival]:
    """Return arrivals at these rates per second, one rate for each process."""
    arrivals = []
    for process, rate in enumerate(rates):
        at_ms = rng.expovariate(rate / 1000) if rate else NEVER
        while at_ms < seconds * 1000:
            arrivals.append(Arrival(at_ms, process))
            at_ms += rng.expovariate(rate / 1000)
    return sorted(arrivals)


def most_arrivals(arrivals: list[Arrival], interval_ms: float) -> int:
    """Return the most arrivals in any interval of this length."""
    times = [arrival.at_ms for arrival in arrivals]
    return max((bisect_left(times, at + interval_ms) - i for i, at in enumerate(times)), default=0)


class TimedFleet:
    """Processes whose commands and replies take `delay_ms`, and whose workers flush when due."""

    def __init__(
        self, store: SimulatedStore, processes: list[Process], delay_ms: Callable[[], float]
    ) -> None:
        self.store, self.processes, self._delay_ms = store, processes, delay_ms
        self.admitted: list[Admission] = []
        self._began_ms = store.ms
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._order = itertools.count()
        self._flushing = [False] * len(processes)
        self._flush_at_ms = [NEVER] * len(processes)

    def run(self, arrivals: Iterable[Arrival], key: str = "k") -> None:
        """Make calls of cost 1."""
        for at_ms, process in arrivals:
            self.wait_until(at_ms)
            found = self.processes[process].call(key)
            if isinstance(found, OperationRun):
                self._send(found, partial(self._on_call_ended, process))
            else:
                self._on_decision(process, found)
            self._schedule_flush(process)

    def wait_until(self, at_ms: float) -> None:
        """Let time pass until `at_ms` since the beginning."""
        until = self._began_ms + at_ms
        while self._events and self._events[0][0] <= until:
            self.store.ms, _, event = heappop(self._events)
            event()
        self.store.ms = until

    def _on_call_ended(self, process: int, run: OperationRun) -> None:
        self._on_decision(process, run.result)

    def _on_decision(self, process: int, decision: Any) -> None:
        if isinstance(decision, Decision):
            if decision.allowed:
                key = str(decision.key)
                bucket_start_ms = bucket_start_of(self.processes[process], key)
                source = decision.source
                at_ms = decision.now_ms if source == "store" else int(self.store.ms)
                admission = Admission(process, key, at_ms, decision.cost, source, bucket_start_ms)
                self.admitted.append(admission)
            self._schedule_flush(process)

    def _at(self, at_ms: float, event: Callable[[], None]) -> None:
        heappush(self._events, (at_ms, next(self._order), event))

    def _send(self, run: OperationRun, done: Callable[[OperationRun], None]) -> None:
        """Send the commands of `run` one after the other, and then call `done`."""
        if run.done:
            done(run)
            return

        def deliver() -> None:
            run.deliver()
            self._send(run, done)

        def execute() -> None:
            run.execute()
            self._at(self.store.ms + self._delay_ms(), deliver)

        self._at(self.store.ms + self._delay_ms(), execute)

    def _schedule_flush(self, process: int) -> None:
        """Have the worker of this process flush when it is due."""
        if self._flushing[process]:
            return
        # A little later: an event that the error of a float makes too early finds nothing due.
        at_ms = max(self.processes[process].due_at_ms(), self.store.ms) + 0.01
        if at_ms < self._flush_at_ms[process]:
            self._flush_at_ms[process] = at_ms
            self._at(at_ms, lambda: self._flush(process))

    def _flush(self, process: int) -> None:
        self._flush_at_ms[process] = NEVER
        if self._flushing[process]:
            return
        if self.processes[process].due_at_ms() > self.store.ms:
            self._schedule_flush(process)
            return

        def on_flush_ended(run: OperationRun) -> None:
            self._flushing[process] = False
            self._schedule_flush(process)

        self._flushing[process] = True
        self._send(self.processes[process].flush(), on_flush_ended)


class Simulation(NamedTuple):
    """The result of `simulate`."""

    store: RecordingStore
    arrivals: list[Arrival]
    admitted: list[Admission]


def simulate(
    make_strategy: MakeStrategy,
    limit: Limit,
    rates: list[float],
    seconds: float,
    *,
    seed: int,
    delay_ms: Callable[[random.Random], float] = lambda rng: 0.25,
    warm_up_s: float = 0.0,
) -> Simulation:
    """Simulate Poisson arrivals at these rates per second, one rate for each process. In the
    `warm_up_s` before that each process calls once on another key, so that it has had a reply of
    the store.
    """
    store, rng = RecordingStore(1_700_000_040_000.3), random.Random(seed)
    origin = store.monotonic() - 50.0
    processes = [Process(store, limit, make_strategy, origin=origin) for _ in rates]
    fleet = TimedFleet(store, processes, lambda: delay_ms(rng))
    if warm_up_s:
        first = [Arrival(rng.uniform(0, 250 * warm_up_s), number) for number in range(len(rates))]
        fleet.run(sorted(first), "elsewhere")
        fleet.wait_until(1000 * warm_up_s)
    arrivals = [
        Arrival(1000 * warm_up_s + at_ms, process)
        for at_ms, process in poisson_arrivals(rates, seconds, rng)
    ]
    fleet.run(arrivals)
    fleet.wait_until(1000 * (warm_up_s + seconds + 1))
    return Simulation(store, arrivals, [one for one in fleet.admitted if one.key == "k"])
