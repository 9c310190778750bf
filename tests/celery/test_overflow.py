"""Tasks with an eta for which no worker has room: they go back to the broker, and come again at a
turn of the whole fleet.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
from celery.worker import state
from hypothesis import given, settings
from hypothesis import strategies as st

from distwindow import ConfigurationError, Limiter, StoreUnavailable
from distwindow.stores.memory import MemoryStore
from tests.celery.simulated import (
    OneWorker,
    SimulatedRequest,
    SimulatedTask,
    SimulatedWorker,
    Timeline,
)


class Fleet:
    """Workers and their broker, which gives what is sent back to any of them: that one keeps it
    until its eta, as Celery's workers do.
    """

    def __init__(self, count: int, task: SimulatedTask, seed: int = 0, **options: Any) -> None:
        self.timeline = Timeline()
        self.store = MemoryStore(self.timeline.clock)
        self.times_sent_back: Counter[int] = Counter()
        self._random = random.Random(seed)
        self._task = task
        self.workers = [Worker(self.timeline, self.store, [task], **options) for _ in range(count)]
        for worker in self.workers:
            worker.on_sent_back = self._redeliver

    def receive(self, count: int) -> None:
        """Have the workers receive so many tasks whose eta has come."""
        for number in range(count):
            self._deliver(number, self.workers[number % len(self.workers)], 0.0)

    def _redeliver(self, request: SimulatedRequest, delay_s: float) -> None:
        self.times_sent_back[request.number] += 1
        self._deliver(request.number, self._random.choice(self.workers), delay_s)

    def _deliver(self, number: int, worker: Worker, eta_after_s: float) -> None:
        request = SimulatedRequest(number, self._task, "", 0.02, eta=object())
        request.received_s = worker.monotonic()

        def at_eta() -> None:
            state.reserved_requests.add(request)
            worker.gate.process(request)

        self.timeline.call_after(eta_after_s, at_eta)

    @property
    def started(self) -> list[tuple[int, float]]:
        """The numbers of the tasks, and when they started."""
        return [
            (request.number, at_s) for worker in self.workers for request, at_s in worker.started
        ]


class Worker(SimulatedWorker):
    on_sent_back: Callable[[SimulatedRequest, float], None]

    def send_back(self, request: SimulatedRequest, delay_s: float) -> Any:
        eta = super().send_back(request, delay_s)
        self.on_sent_back(request, delay_s)
        return eta


def run(workers: int, count: int, seed: int = 0, *, own_turns: bool = False) -> Fleet:
    """Have so many tasks at 20/s come at once, of which 40 find room in the workers. With
    `own_turns` the line of the fleet cannot be asked.
    """
    task = SimulatedTask("fetch", limits="20/second")
    fleet = Fleet(workers, task, seed, max_parked=40 // workers)
    for worker in fleet.workers if own_turns else ():
        setattr(worker.admission, "take_turn", lambda items: None)  # noqa: B010  # a method
    fleet.receive(count)
    fleet.timeline.run_for(count / 20 + 10.0)
    return fleet


@pytest.mark.slow
@settings(max_examples=25, deadline=None)
@given(st.integers(1, 8), st.integers(100, 600), st.integers(0, 1000))
def test_a_task_for_which_there_is_no_room_goes_back_about_once(
    workers: int, count: int, seed: int
) -> None:
    fleet = run(workers, count, seed)
    assert sorted(number for number, _ in fleet.started) == list(range(count))
    without_room = count - 20 - 40 // workers * workers
    assert fleet.times_sent_back.total() <= 1.25 * without_room + 10
    moments = sorted(at_s for _, at_s in fleet.started)
    assert moments[-1] - moments[0] <= (count - 1) // 20 + 1.5
    assert all(late - early > 0.9 for early, late in zip(moments, moments[20:], strict=False))


def test_with_turns_of_its_own_each_worker_has_them_come_back_too_early() -> None:
    """What the line of the fleet is for."""
    own = run(4, 400, own_turns=True)
    assert len(own.started) == 400
    assert own.times_sent_back.total() > 2 * run(4, 400).times_sent_back.total()


@pytest.mark.slow
@settings(max_examples=25, deadline=None)
@given(st.integers(1, 4), st.integers(0, 3), st.floats(0.0, 10.0))
def test_while_the_store_is_away_workers_give_turns_of_their_own(
    workers: int, seed: int, away_from_s: float
) -> None:
    """Nothing is lost, and a worker that gets no answer asks no more until its pause is over."""
    task = SimulatedTask("fetch", limits="20/second")
    is_away = False
    asked: Counter[str] = Counter()

    def ask(items: Any, enqueue: bool) -> Any:
        asked["turns" if enqueue else "permits"] += is_away
        if is_away:
            raise StoreUnavailable("away", charged=False)
        return limiter.try_acquire_all(items, enqueue)

    fleet = Fleet(workers, task, seed, max_parked=10, ask=ask)
    limiter = Limiter(fleet.store, "1/second", time=fleet.timeline.clock)
    fleet.receive(200)
    fleet.timeline.run_for(away_from_s)
    is_away = True
    fleet.timeline.run_for(5.0)
    is_away = False
    fleet.timeline.run_for(60.0)
    assert sorted(number for number, _ in fleet.started) == list(range(200))
    assert asked.total() <= workers * 7  # after 0, 0.25, 0.75, 1.75, 3.75 s, and two that overlap


def test_a_task_that_is_admitted_instead_of_a_turn_starts() -> None:
    asked: list[Any] = []

    def reset(items: Any) -> None:
        """Do as an operator does, at the last moment."""
        asked.append(items)
        worker.limiter.reset("fetch")

    worker = OneWorker("2/second", slots=3, max_parked=1, before_turn=reset)
    worker.receive_all(range(4), duration_s=0.1, eta=object())
    worker.run_for(0.05)
    assert asked == [(("fetch", worker.limiter.limits, 1),)]
    # The permit is that of the first in the line, so that there is room for the one that asked.
    assert worker.numbers == [0, 1, 2]
    worker.run_for(1.0)
    assert worker.numbers == [0, 1, 2, 3]
    assert worker.sent_back == []


@settings(max_examples=25, deadline=None)
@given(st.integers(1, 5), st.integers(1, 3))
def test_tasks_without_room_overtake_no_costly_one(cost: int, slots: int) -> None:
    timeline = Timeline()
    store = MemoryStore(timeline.clock)
    task = SimulatedTask("fetch", limits="5/second", limit_cost=lambda key: int(key), limit_key="k")
    worker = SimulatedWorker(timeline, store, [task], slots=slots, max_parked=1)
    for number in range(5):
        worker.receive(SimulatedRequest(number, task, "1", 0.0))
    worker.receive(SimulatedRequest(5, task, str(cost), 0.0))
    for number in range(6, 60):
        worker.receive(SimulatedRequest(number, task, "1", 0.0, eta=object()))
        timeline.run_for(0.1)
    assert worker.numbers[:6] == [0, 1, 2, 3, 4, 5]


def test_a_slow_store_delays_the_event_loop_by_one_call_at_a_time() -> None:
    """Under a store that takes 40 ms for each turn, other work is done after two of 300 calls."""
    worker = OneWorker(
        "2/second", max_parked=1, before_turn=lambda items: worker.clock.advance(0.04)
    )
    blocked_s: list[float] = []
    run_pending = worker.gate.run_pending

    def timed() -> None:
        begins_s = worker.monotonic()
        run_pending()
        blocked_s.append(worker.monotonic() - begins_s)

    worker.gate._timer._callback = timed
    for number in range(300):
        worker.gate._arrivals.append(SimulatedRequest(number, worker.task, "", 0.1, eta=object()))
    timed()
    worker.run_for(20.0)
    assert max(blocked_s) <= 0.081
    assert len(worker.sent_back) >= 250


def test_a_connection_that_ends_while_a_turn_is_asked_for_forgets_the_task() -> None:
    """Under gevent. What was sent back then could not be acknowledged, and would run twice."""
    worker = OneWorker(
        "2/second", slots=3, max_parked=1, before_turn=lambda items: worker.gate.close()
    )
    worker.receive_all(range(4), duration_s=0.1, eta=object())
    worker.run_for(10.0)
    assert worker.numbers == [0, 1]
    assert worker.sent_back == []
    assert (worker.gate.lines.size, worker.gate.parked) == (0, 0)


def test_a_turn_that_cannot_be_had_for_one_key_stops_no_other() -> None:
    def fail(items: Any) -> None:
        raise ConfigurationError("NOPERM")

    worker = OneWorker("2/second", "{key}", slots=9, max_parked=1, before_turn=fail)
    worker.receive_all(range(5), "a", 0.1, eta=object())
    assert [(request.number, delay_s) for request, delay_s in worker.sent_back] == [
        (3, 1.0),
        (4, 1.5),
    ]
    worker.receive_all([5], "b", 0.1)
    assert worker.numbers == [0, 1, 5]


@pytest.mark.parametrize("limits", ["10/second paced 500ms", "10/second warmup 10s"])
def test_paced_limits_have_turns_of_the_worker(limits: str) -> None:
    worker = OneWorker(limits, slots=30, max_parked=1)
    worker.receive_all(range(50), eta=object())
    assert worker.sent_back
    assert worker.admission.failures == 0


@pytest.mark.slow
@settings(max_examples=20, deadline=None)
@given(st.integers(200, 800), st.integers(4, 60), st.sampled_from([1, 1000]))
def test_turns_of_the_worker_leave_no_limit_idle(count: int, max_hold_s: int, cost: int) -> None:
    """A turn that is too far away comes earlier, and so do those that follow it."""
    task = SimulatedTask(
        "fetch", limits="20/second paced 500ms", limit_key="k",
        limit_cost=lambda key: cost if key == "costly" else 1,
    )  # fmt: skip
    fleet = Fleet(1, task, max_parked=40, max_hold_s=float(max_hold_s))
    worker = fleet.workers[0]
    for number in range(count):
        key = "costly" if number == 100 else ""
        worker.receive(SimulatedRequest(number, task, key, 0.02, eta=object()))
    fleet.timeline.run_for(count / 20 + 20.0)
    moments = sorted(at_s for _, at_s in fleet.started)
    assert len(moments) == count
    assert moments[-1] - moments[0] <= count / 20 + 6.0
