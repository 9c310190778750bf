"""What an observer is told of tasks is which have started, and which wait, by their names."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from importlib import import_module
from inspect import signature
from typing import Any

import pytest

from distwindow.contrib.tasks import AsyncTaskGate, TaskGate, TaskLimits
from distwindow.stores.memory import AsyncMemoryStore, MemoryStore
from distwindow.support.async_use import result_of
from tests.away.stores import NOT_SENT
from tests.clock_and_stores import ManualClock
from tests.observer.test_counted import Named, rows_of, store_of
from tests.observer.told import run


def job(tenant: str) -> None:
    raise AssertionError("it is not run")


@pytest.mark.parametrize("kind", [TaskGate, AsyncTaskGate])
@pytest.mark.parametrize("answers", ["hold", "run"])
@pytest.mark.parametrize(
    "limits", ["5/second", [("{tenant}", "4/second"), "7/second"]], ids=["one", "several"]
)
def test_tasks_that_start_or_are_sent_back_are_counted(
    kind: Any, answers: Any, limits: Any
) -> None:
    """While the store is away, too, and for keys that cannot be asked for."""
    in_tasks = kind is AsyncTaskGate
    clock, told, seen = ManualClock(), Named(), Counter[str]()
    remote, store = store_of(in_tasks, clock)
    gate = kind(store, on_store_error=answers, time=clock, observer=told, prefix="shop")
    task = gate.add(TaskLimits("send", job, limits))
    chance = random.Random(f"{kind} {answers} {limits}")

    async def start_at_random() -> None:
        for _ in range(200):
            remote.failure = NOT_SENT if chance.random() < 0.05 else None
            call: Any = (task, (f"tenant {chance.randrange(2)}",), {})
            if in_tasks:
                delay = await gate.wait(*call, 0.0)
            else:
                delay = gate.delay(*call)
            seen["refused" if delay else "allowed"] += 1
            remote.failure = None
            clock.advance(chance.choice([0, 0.01, 0.2, 0.7]))
        await result_of(gate._limiters.aclose() if in_tasks else gate._limiters.close())

    run(in_tasks, start_at_random())
    results: Counter[str] = Counter()
    reasons: set[tuple[str, str]] = set()
    for (name, _, result, reason, source), count in told.rows().items():
        assert name == "send"
        assert (source == "policy") == (reason == "store_down")
        results[result] += count
        reasons.add((reason, result))
    assert results == seen
    away = "allowed" if answers == "run" else "refused"
    assert reasons == {
        ("ok", "allowed"), ("over_limit", "refused"), ("store_down", away),
    }  # fmt: skip
    assert {counts.source_kind for counts in told.counts} == {"queue"}
    assert {call.name for call in told.store_calls} == {"shop"}


@pytest.mark.parametrize("answers", ["hold", "run"])
def test_tasks_without_the_store_are_told_by_their_keys_and_costs(answers: Any) -> None:
    """Also those of the second in which it is not asked again."""
    told, clock = Named(), ManualClock(auto_advance=False)
    remote, store = store_of(False, clock)
    gate = TaskGate(store, on_store_error=answers, time=clock, observer=told, key_label=str)
    task = gate.add(TaskLimits("send", job, "9/second", "{tenant}", 5))
    remote.failure = NOT_SENT
    for _ in range(3):
        gate.delay(task, ("acme",), {})
    remote.failure = None
    gate._limiters.close()
    assert [(each.label, each.calls, each.permits) for each in told.counts] == [("acme", 3, 15)]


def test_a_key_that_cannot_be_asked_for_is_an_error() -> None:
    told = Named()
    gate = TaskGate("memory://", observer=told)
    task = gate.add(TaskLimits("send", job, "5/second", "{tenant}"))
    gate._limiters.get(task.parts[0].limits).try_acquire = _raise_type_error
    assert gate.delay(task, ("a",), {}) > 0
    gate._limiters.close()
    assert told.rows() == rows_of(("send", "5/second", "error", "key_error", "store", 1))


def _raise_type_error(*_: Any, **__: Any) -> Any:
    raise TypeError("no key")


def test_tasks_that_wait_in_their_worker_are_levels_until_they_start() -> None:
    told, clock = Named(), ManualClock(auto_advance=False)
    store = AsyncMemoryStore(MemoryStore(clock))
    gate = AsyncTaskGate(store, time=clock, observer=told, key_label=lambda key: f"<{key!s}>")
    task = gate.add(TaskLimits("send", job, "1/second"))

    async def work() -> None:
        waiting = [asyncio.create_task(gate.hold(task, ("a",), {}, 60.0)) for _ in range(3)]
        await _turn()
        clock.advance(0.5)
        await gate._limiters._flushed_with.flush()
        assert _levels(told) == {"tasks_waiting": 2.0, "oldest_wait_s": 0.5}
        assert gate._tally is not None
        assert gate._tally.next_due_at < clock.monotonic() + 1, "it is told again, as it grows"
        for _ in range(6):
            clock.advance(1.0)
            await _turn()
        assert [await one for one in waiting] == [0.0] * 3
        await gate._limiters.aclose()

    asyncio.run(work())
    assert _levels(told) == {"tasks_waiting": 0.0, "oldest_wait_s": 0.0}
    assert {(level.source_kind, level.name, level.limit) for level in told.levels} == {
        ("queue", "send", "over_limit")
    }
    assert sum(told.rows().values()) == 3
    assert len(told.waited) == 3
    assert {counts.label for counts in told.counts} == {"<send>"}


async def _turn() -> None:
    for _ in range(50):
        await asyncio.sleep(0)


def _levels(told: Named) -> dict[str, float]:
    return {level.what: level.value for level in told.levels}


@pytest.mark.parametrize("answers", ["hold", "run"])
def test_celery_counts_starts_and_tasks_that_begin_to_wait(answers: Any) -> None:
    """Those that are sent back without having waited are counted once, too."""
    pytest.importorskip("celery")
    simulated = import_module("tests.celery.simulated")
    tally_of = import_module("distwindow.observer").tally_of
    options = import_module("distwindow.runtime.options").Options
    counts = import_module("distwindow.contrib.celery.counts")
    signals = import_module("distwindow.contrib.celery.gate")
    timeline, told = simulated.Timeline(), Named()
    store = MemoryStore(timeline.clock)
    tasks = [
        simulated.SimulatedTask("plain", limits=["1/second"], limit_key="{key}"),
        simulated.SimulatedTask("paced", limits=["1/second paced 2s"]),
        simulated.SimulatedTask("free"),
    ]
    worker = simulated.SimulatedWorker(
        timeline, store, tasks, max_parked=5, max_hold_s=20.0, on_store_error=answers
    )
    limiter = worker.admission._ask.args[0]
    decide, is_away = limiter.try_acquire_all, False

    def ask(*arguments: Any) -> Any:
        if is_away:
            raise NOT_SENT
        return decide(*arguments)

    limiter.try_acquire_all = ask
    clock = timeline.clock
    tally = tally_of(options(observer=told), "queue", clock.monotonic)
    worker.gate._counts = counts.GateCounts(tally, worker.gate.lines, worker, "local")
    parked: list[Any] = []
    sent_back: list[Any] = []
    admitted: list[Any] = []
    """Those that are parked until the moment of their paced limit."""

    def note_parked(sender: Any, request: Any, **_: Any) -> None:
        parked.append(request)
        entries = [one for line in worker.gate.lines for one in line.entries]
        admitted.extend(one.item for one in entries if one.admitted and one.item is request)

    def note_sent_back(sender: Any, request: Any, **_: Any) -> None:
        sent_back.append(request)

    signals.task_parked.connect(note_parked)
    signals.task_sent_back.connect(note_sent_back)
    chance = random.Random(answers)
    for number in range(150):
        timeline.run_for(chance.choice([0, 0.01, 0.1, 0.4]))
        is_away = chance.random() < 0.1
        task = chance.choice(tasks)
        worker.receive(simulated.SimulatedRequest(number, task, chance.choice("ab"), 0.01))
        if chance.random() < 0.2:
            tally.collect_commands(clock.monotonic(), [])
            assert _sum_of(told, "tasks_waiting") == worker.gate.parked
    is_away = False
    timeline.run_for(600.0)
    tally.collect_commands(clock.monotonic(), [])

    started = [request for request, _ in worker.started if request.task.name != "free"]
    by_result = Counter[str]()
    for (name, _, result, _, _), count in told.rows().items():
        assert name in ("plain", "paced")
        by_result[result] += count
    assert by_result["allowed"] == len(started)
    not_parked = [request for request in sent_back if request not in parked]
    assert by_result["refused"] == len(parked) - len(admitted) + len(not_parked)
    assert len(told.waited) == len([one for one in started if one in parked])
    assert _sum_of(told, "tasks_waiting") == _sum_of(told, "oldest_wait_s") == 0
    assert sent_back
    assert admitted


def _sum_of(told: Named, what: str) -> float:
    latest = {level[:4]: level.value for level in told.levels if level.what == what}
    return sum(latest.values())


@pytest.mark.parametrize("queue", ["arq", "celery", "dramatiq", "rq", "taskiq"])
def test_each_queue_takes_an_observer(queue: str) -> None:
    module = pytest.importorskip(f"distwindow.contrib.{queue}")
    assert {"observer", "key_label"} <= {*signature(module.RateLimits).parameters}
