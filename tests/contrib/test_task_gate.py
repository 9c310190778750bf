"""Whether a task may start: both gates, while the limiter works and while it fails."""

from __future__ import annotations

import asyncio
import logging
import sys
from typing import Any

import pytest

from distwindow import (
    AsyncLimiter,
    ConfigurationError,
    Limiter,
    RateLimitExceeded,
    StoreUnavailable,
)
from distwindow.contrib.tasks import (
    HOLD_S,
    MAX_DELAY_S,
    MIN_DELAY_S,
    AsyncTaskGate,
    TaskGate,
    TaskLimits,
    WhileStoreIsAway,
)
from distwindow.stores.memory import AsyncMemoryStore, MemoryStore
from distwindow.testing import ManualClock


def job() -> None: ...


TASK = TaskLimits("job", job, "2/second")


class FailingStore(MemoryStore):
    """A store in memory whose calls raise `failure` while it is set, and count as `asked`. From
    the call of the number `fails_until` on they do not.
    """

    failure: Exception | None = None
    fails_until = sys.maxsize
    asked = 0

    def decide(self, *args: Any, **kwargs: Any) -> Any:
        asked = self.asked + 1
        self._ask()
        decision = super().decide(*args, **kwargs)  # which may execute the command
        self.asked = asked
        return decision

    def execute(self, *args: Any, **kwargs: Any) -> Any:
        self._ask()
        return super().execute(*args, **kwargs)

    def _ask(self) -> None:
        self.asked += 1
        if self.failure is not None and self.asked < self.fails_until:
            raise self.failure


class World:
    """A gate for threads or for tasks, with one function `delay` that asks it."""

    def __init__(self, kind: str, on_store_error: WhileStoreIsAway = "hold") -> None:
        self.clock = ManualClock()
        self.store = FailingStore(self.clock)
        if kind == "threads":
            gate = TaskGate(self.store, on_store_error=on_store_error, time=self.clock)
            gate.add(TASK)
            self.delay = lambda: gate.delay(TASK, (), {})
        else:
            awaited = AsyncTaskGate(
                AsyncMemoryStore(self.store), on_store_error=on_store_error, time=self.clock
            )
            awaited.add(TASK)
            self.delay = lambda: asyncio.run(awaited.wait(TASK, (), {}, 0.0))


@pytest.fixture(params=["threads", "tasks"])
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def test_refused_calls_have_turns_at_the_rate_of_the_limit(kind: str) -> None:
    world = World(kind)
    assert [world.delay() for _ in range(6)] == [0.0, 0.0, 1.0, 1.5, 2.0, 2.5]


def test_a_call_at_its_turn_is_admitted(kind: str) -> None:
    world = World(kind)
    assert [world.delay() for _ in range(3)] == [0.0, 0.0, 1.0]
    world.clock.advance(1.0)
    assert world.delay() == 0.0


@pytest.mark.parametrize("limits", ["1/30 days", "1/hour"])
def test_no_delay_is_longer_than_a_day(limits: str) -> None:
    clock = ManualClock()
    gate = TaskGate("memory://", time=clock)
    task = gate.add(TaskLimits("report", job, limits))
    assert task is not None
    delays = [gate.delay(task, (), {}) for _ in range(40)]
    assert delays[0] == 0.0
    assert min(delays[1:]) > 0.0
    assert max(delays) == MAX_DELAY_S


def test_while_the_limiter_fails_tasks_are_held_and_it_is_asked_once_a_second(
    kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    world = World(kind)
    world.store.failure = StoreUnavailable("connection refused")
    with caplog.at_level(logging.WARNING, "distwindow"):
        assert world.delay() == HOLD_S
        world.clock.advance(0.25)
        assert world.delay() == HOLD_S - 0.25
        assert world.store.asked == 1
        world.clock.advance(HOLD_S)
        assert world.delay() == HOLD_S
        assert world.store.asked == 2
        world.store.failure = None
        world.clock.advance(HOLD_S)
        assert world.delay() == 0.0
    first, last = (record.getMessage() for record in caplog.records)
    assert first == (
        "asking the limits of task 'job' failed (StoreUnavailable: connection refused); tasks are "
        "held, and the next try is in 1 s"
    )
    assert last == "limits of tasks can be asked again"


def test_with_run_tasks_start_uncounted_while_the_limiter_fails(kind: str) -> None:
    world = World(kind, "run")
    world.store.failure = StoreUnavailable("connection refused")
    assert [world.delay() for _ in range(9)] == [0.0] * 9
    assert world.store.asked == 1
    world.store.failure = None
    world.clock.advance(HOLD_S)
    assert [world.delay() for _ in range(3)] == [0.0, 0.0, 1.0]


@pytest.mark.parametrize("failure", [ConfigurationError("no permission"), RuntimeError("a bug")])
def test_what_is_no_store_error_opens_no_limit_and_holds_no_other_task(
    kind: str, failure: Exception, caplog: pytest.LogCaptureFixture
) -> None:
    world = World(kind, "run")
    world.store.failure = failure
    assert [world.delay() for _ in range(3)] == [HOLD_S] * 3
    assert world.store.asked == 3
    world.store.failure = None
    assert world.delay() == 0.0  # whoever is next is asked for at once
    assert [record.getMessage() for record in caplog.records] == [
        f"the limit key 'job' of task 'job' cannot be asked for ({type(failure).__name__}: "
        f"{failure}); its tasks are held"
    ]


@pytest.mark.parametrize("gate", [TaskGate, AsyncTaskGate])
def test_wrong_options_are_errors_at_once(gate: Any) -> None:
    with pytest.raises(ConfigurationError, match='neither "hold" nor "run"'):
        gate("memory://", on_store_error="deny")
    with pytest.raises(ConfigurationError, match="timeout=0 is not a number of seconds above 0"):
        gate("memory://", timeout=0)
    with pytest.raises(ConfigurationError, match="store URL"):
        gate("redis://localhost:6379/0?nonsense=1").add(TASK)


async def test_a_task_waits_for_as_long_as_it_may() -> None:
    clock = ManualClock()
    gate = AsyncTaskGate(AsyncMemoryStore(MemoryStore(clock)), time=clock)
    gate.add(TASK)
    began = clock.monotonic()
    started = []
    for _ in range(5):
        assert await gate.wait(TASK, (), {}, 1.0) == 0.0
        started.append(round(clock.monotonic() - began, 3))
    assert started == [0.0, 0.0, 1.0, 1.0, 2.0]


@pytest.mark.parametrize("turn_s", [0.0, None])
async def test_a_wait_that_ends_without_permits_is_no_start(
    monkeypatch: pytest.MonkeyPatch, turn_s: float | None
) -> None:
    """A waiter's time may end in the moment in which the permits of the one before it are free; its
    `retry_after` is 0.0 then, and a delay of 0.0 would start the task without being counted.
    """
    clock = ManualClock()
    store = AsyncMemoryStore(MemoryStore(clock))
    gate = AsyncTaskGate(store, time=clock)
    gate.add(TASK)
    async with AsyncLimiter(store, "1/second", time=clock) as other:
        await other.try_acquire("other")
        refused = (await other.try_acquire("other"))._replace(retry_after=0.0)

    async def ends_in_vain(*args: Any, **kwargs: Any) -> None:
        raise RateLimitExceeded(refused)

    async def refuse(*args: Any, **kwargs: Any) -> Any:
        return refused

    limiter = gate._limiter(TASK)
    with monkeypatch.context() as patch:
        patch.setattr(limiter, "acquire", ends_in_vain)
        if turn_s is not None:
            patch.setattr(limiter, "try_acquire", refuse)
        delay = await gate.wait(TASK, (), {}, 1.0)
    counted = 2 - (await limiter.peek("job")).remaining
    # Where there is room again when the call asks for its turn, it starts, and is counted.
    assert (delay, counted) == ((0.0, 1) if turn_s is None else (MIN_DELAY_S, 0))


def test_a_refused_call_asks_once(kind: str) -> None:
    world = World(kind)
    for asked in (1, 2, 3):
        world.delay()
        assert world.store.asked == asked


def test_a_reset_of_the_key_forgets_the_turns(kind: str) -> None:
    world = World(kind)
    assert [world.delay() for _ in range(20)][-1] > 5.0
    with Limiter(world.store, "2/second", time=world.clock) as limiter:
        limiter.reset("job")
    assert [world.delay() for _ in range(4)] == [0.0, 0.0, 1.0, 1.5]


async def test_hold_returns_a_delay_only_when_the_time_is_over() -> None:
    clock = ManualClock()
    gate = AsyncTaskGate(AsyncMemoryStore(MemoryStore(clock)), time=clock)
    task = gate.add(TaskLimits("report", job, "1/minute"))
    assert await gate.hold(task, (), {}, 10.0) == 0.0
    began = clock.monotonic()
    assert await gate.hold(task, (), {}, 10.0) == pytest.approx(50.0)
    assert clock.monotonic() - began == pytest.approx(10.0)


async def test_hold_goes_on_when_the_limiter_works_again() -> None:
    clock = ManualClock()
    store = FailingStore(clock)
    gate = AsyncTaskGate(AsyncMemoryStore(store), time=clock)
    gate.add(TASK)
    store.failure, store.fails_until = StoreUnavailable("connection refused"), 3
    assert await gate.hold(TASK, (), {}, 60.0) == 0.0
