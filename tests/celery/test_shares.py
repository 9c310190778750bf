"""Limited tasks and tasks without limits share the slots of a worker's pool."""

from __future__ import annotations

import threading
from typing import Literal

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from distwindow.contrib.celery import pool_slots
from distwindow.contrib.celery.pool_slots import CountedSlots
from distwindow.stores.memory import MemoryStore
from tests.celery.simulated import (
    OneWorker,
    SimulatedRequest,
    SimulatedTask,
    SimulatedWorker,
    Timeline,
)

Pool = Literal["prefork", "threads", "solo", "gevent"]
FREE = SimulatedTask("free")


@settings(max_examples=40, deadline=None)
@given(
    st.sampled_from(["prefork", "threads"]),
    st.integers(1, 4),
    st.sampled_from([100, 200, 400]),
    st.sampled_from([1, 4]),
)
def test_neither_kind_of_task_starves_the_other(
    pool: Pool, slots: int, duration_ms: int, multiplier: int
) -> None:
    """The broker has more of both than the worker can run. Half of the slots are for each, and of
    those for limited tasks as many are used as there are permits.
    """
    timeline = Timeline()
    duration_s = duration_ms / 1000

    def refill(request: SimulatedRequest) -> None:
        if request.task is FREE:
            worker.receive(SimulatedRequest(0, FREE, "", duration_s))

    limited = SimulatedTask("limited", limits="5/second", limit_key="{key}")
    worker = SimulatedWorker(
        timeline, MemoryStore(timeline.clock), [limited, FREE],
        slots=slots, pool=pool, on_end=refill,
    )  # fmt: skip
    for _ in range(slots * multiplier):  # as many as the prefetch count lets in
        worker.receive(SimulatedRequest(0, FREE, "", duration_s))
    for number in range(200):
        worker.receive(SimulatedRequest(number, limited, "a", duration_s))
    seconds = 20.0
    timeline.run_for(seconds)
    starts = [request.task.name for request, _ in worker.started]
    per_s = slots / duration_s
    backlog_s = multiplier * duration_s  # inside the pool, before the first limited task came
    expected = min(5.0, per_s / 2) * (seconds - backlog_s - 1.0)
    # A permit that comes while all slots are taken waits until one of their tasks ends, and here
    # all end together.
    assert starts.count("limited") >= 0.6 * expected
    assert starts.count("free") >= 0.95 * per_s / 2 * seconds - slots - 16
    assert len(worker.running) <= slots


@pytest.mark.parametrize("pool", ["prefork", "threads", "solo"])
def test_tasks_without_limits_do_not_wait_once_no_limited_task_is_there(pool: Pool) -> None:
    worker = OneWorker("1/second", slots=2, pool=pool)
    worker.receive_all(range(3), duration_s=0.1)
    for number in range(50):
        worker.receive(SimulatedRequest(number, FREE, "", 0.1))
    worker.run_for(60.0)
    assert [request.number for request, _ in worker.started if request.task is FREE] == [*range(50)]
    assert len(worker.started) == 53


@pytest.mark.parametrize("pool", ["threads", "solo"])
def test_no_task_is_kept_after_its_end(pool: Pool) -> None:
    worker = OneWorker(None, slots=2, pool=pool)
    worker.receive_all(range(500), duration_s=0.01)
    worker.run_for(60.0)
    assert len(worker.started) == 500
    assert isinstance(worker.slots, CountedSlots)
    assert worker.slots._in_pool == set()


@pytest.mark.parametrize("pool", ["prefork", "threads"])
def test_tasks_that_wait_for_a_slot_are_forgotten_with_their_connection(pool: Pool) -> None:
    worker = OneWorker("1/minute", slots=1, pool=pool)
    worker.receive_all([0, 1], duration_s=1.0)
    for number in range(10):
        worker.receive(SimulatedRequest(number, FREE, "", 1.0))
    worker.semaphore.clear()
    worker.gate.close()
    worker.run_for(60.0)
    assert len(worker.started) == 1
    worker.gate.open()
    worker.receive(SimulatedRequest(10, FREE, "", 1.0))
    worker.run_for(5.0)
    assert worker.numbers == [0, 10]


def test_a_line_that_waits_for_a_slot_is_forgotten_with_its_connection() -> None:
    """It would be granted the slot for which a line of the next connection waits."""
    worker = OneWorker("9/second", "{key}", slots=1)
    worker.receive_all([0, 1], "ab", 1.0)
    worker.semaphore.clear()
    worker.gate.close()
    worker.gate.open()
    worker.receive_all([2], "b", 1.0)
    worker.run_for(5.0)
    assert worker.numbers == [0, 2]


@pytest.mark.parametrize("pool", ["prefork", "threads", "gevent"])
def test_limited_tasks_use_all_slots(pool: Pool) -> None:
    worker = OneWorker("10/second", slots=4, pool=pool)
    worker.receive_all(range(4), duration_s=1.0)
    worker.run_for(0.5)
    assert len(worker.running) == 4


def held_receiver() -> tuple[OneWorker, threading.Thread]:
    """Return a green worker whose one slot is taken for a second while a limited task is here, and
    the thread, in the place of a greenlet, that has received one more task without a limit.
    """
    worker = OneWorker("1/minute", slots=1, pool="gevent")
    for number in range(2):
        worker.receive_all([number])
        worker.run_for(0.1)
    worker.receive(SimulatedRequest(2, FREE, "", 1.0))  # is run at once: nobody is held
    receiver = threading.Thread(
        target=worker.receive, args=[SimulatedRequest(3, FREE, "", 0.0)], daemon=True
    )
    receiver.start()
    receiver.join(0.1)
    return worker, receiver


def test_a_green_pool_holds_the_receiver_while_a_task_waits_for_a_slot(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As it does without a gate. Otherwise the prefetch count would be used up."""
    monkeypatch.setattr(pool_slots, "_LONGEST_HOLD_S", 60.0)
    worker, receiver = held_receiver()
    assert receiver.is_alive()
    worker.run_for(1.0)  # the task ends
    receiver.join(30.0)
    assert not receiver.is_alive()
    assert worker.numbers == [0, 2, 3]


def test_a_receiver_is_held_no_longer_than_its_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool_slots, "_LONGEST_HOLD_S", 60.0)
    worker, receiver = held_receiver()
    assert receiver.is_alive()
    worker.gate.close()
    receiver.join(30.0)
    assert not receiver.is_alive()


def test_a_receiver_is_not_held_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where threads were not patched, it would hold the greenlet that is to wake it."""
    monkeypatch.setattr(pool_slots, "_LONGEST_HOLD_S", 0.01)
    _, receiver = held_receiver()
    receiver.join(30.0)
    assert not receiver.is_alive()
