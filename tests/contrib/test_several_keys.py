"""Limits of one task with keys of their own, in the gates of all queues: all or none, on each kind
of store.
"""

from __future__ import annotations

import asyncio
import heapq
from collections.abc import AsyncIterator
from typing import Any

import pytest

from distwindow import AsyncLimiter, Key, Limiter, StoreUnavailable
from distwindow.contrib.tasks import (
    AsyncTaskGate,
    TaskGate,
    TaskLimits,
    acquire_all,
    acquire_all_async,
)
from distwindow.stores.memory import AsyncMemoryStore, MemoryStore
from distwindow.support.async_use import result_of
from distwindow.testing import ManualClock
from tests.clock_and_stores import fresh_key

STORES = ["memory", "redis", "cluster"]
KEYS = ["of one slot", "as they are"]


@pytest.fixture(params=["blocking", "asyncio"])
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(params=STORES)
def url(request: pytest.FixtureRequest) -> str:
    name = str(request.param)
    return "memory://" if name == "memory" else str(request.getfixturevalue(f"{name}_url"))


class Awaited:
    """`acquire_all`, and the limiter, of either kind."""

    def __init__(self, kind: str, url: str) -> None:
        clock = ManualClock(1_700_000_040_000)
        made: Any = Limiter if kind == "blocking" else AsyncLimiter
        self.limiter = made(url, "1/second", clock="client", time=clock, timeout=10.0)
        self._is_async = kind != "blocking"

    async def acquire(self, items: Any, enqueue: bool = False) -> Any:
        if self._is_async:
            return await acquire_all_async(self.limiter, items, enqueue)
        return acquire_all(self.limiter, items, enqueue)

    async def passed(self, key: Any, limits: Any) -> int:
        decision = await result_of(self.limiter.try_acquire_all([(key, limits, 1)]))
        assert decision.allowed
        await result_of(self.limiter.refund(decision))
        return int(limits[0].amount) - 1 - int(decision.remaining)

    async def close(self) -> None:
        await result_of(self.limiter.aclose() if self._is_async else self.limiter.close())


@pytest.fixture
async def awaited(kind: str, url: str) -> AsyncIterator[Awaited]:
    made = Awaited(kind, url)
    yield made
    await made.close()


@pytest.mark.parametrize("keys", KEYS)
@pytest.mark.parametrize("order", [1, -1])
@pytest.mark.parametrize("enqueue", [False, True])
async def test_what_one_refuses_is_not_charged_to_the_others(
    awaited: Awaited, keys: str, order: int, enqueue: bool
) -> None:
    tag = fresh_key()
    names: list[Any] = [f"{tag}-{name}" for name in "abc"]
    if keys == "of one slot":
        names = [Key(name, tag=tag) for name in names]
    limits = [TaskLimits("t", lambda: None, text).limits for text in ("9/m", "3/m", "7/m")]
    items = tuple(zip(names, limits, (1, 1, 2), strict=True))[::order]
    decisions = [await awaited.acquire(items, enqueue) for _ in range(6)]
    assert [decision.allowed for decision in decisions] == [True] * 3 + [False] * 3
    assert {decision.key for decision in decisions[3:]} <= {names[1], names[2]}
    assert all(decision.retry_after > 0 for decision in decisions[3:])
    # The narrowest: of the last one admitted nothing is left.
    assert decisions[2].remaining == 0
    assert await awaited.passed(names[0], limits[0]) == 3
    assert await awaited.passed(names[2], limits[2]) == 6
    turns = [decision.retry_after for decision in decisions[3:]]
    assert turns == sorted(turns)
    assert (len(set(turns)) == 3) == enqueue  # each is told a turn of its own


@pytest.mark.parametrize("url", ["cluster"], indirect=True)
async def test_what_fails_in_the_middle_gives_the_first_back(
    awaited: Awaited, monkeypatch: pytest.MonkeyPatch
) -> None:
    tag = fresh_key()
    limits = TaskLimits("t", lambda: None, "9/m").limits
    items = [(f"{tag}-{name}", limits, 1) for name in "abcdefgh"]
    await awaited.acquire(items)
    ask = awaited.limiter.try_acquire_all

    def fail(asked: Any, *options: Any) -> Any:
        if len(asked) == 1 and asked[0][0].endswith("g"):
            raise StoreUnavailable("its node is away", charged=False)
        return ask(asked, *options)

    monkeypatch.setattr(awaited.limiter, "try_acquire_all", fail)
    with pytest.raises(StoreUnavailable):
        await awaited.acquire(items)
    monkeypatch.undo()
    assert [await awaited.passed(key, limits) for key, *_ in items] == [1] * len(items)


def send(tenant: str) -> None: ...


@pytest.mark.parametrize("workers", [1, 3])
def test_jobs_keep_each_limit_and_come_back_at_a_turn_of_their_own(kind: str, workers: int) -> None:
    clock = ManualClock()
    store = MemoryStore(clock)
    task = TaskLimits("send", send, ["10/second", ("tenant:{tenant}", "2/second")])
    made: Any = TaskGate if kind == "blocking" else AsyncTaskGate
    of_kind = store if kind == "blocking" else AsyncMemoryStore(store)
    gates = [made(of_kind, time=clock) for _ in range(workers)]
    for gate in gates:
        gate.add(task)
    began_s, sent_back, started = clock.monotonic(), 0, []
    waiting = [(0.0, number) for number in range(100)]
    while waiting:
        due_s, number = heapq.heappop(waiting)
        clock.advance(max(0.0, due_s - (clock.monotonic() - began_s)))
        now_s, tenant = clock.monotonic() - began_s, str(number % 20)
        delay = asyncio.run(gates[number % workers].wait(task, (tenant,), {}, 0.0))
        if delay:
            sent_back += 1
            heapq.heappush(waiting, (now_s + delay, number))
        else:
            started.append((now_s, tenant))
    for key, amount in [(None, 10), *((str(number), 2) for number in range(20))]:
        moments = [at_s for at_s, tenant in started if key in (None, tenant)]
        assert all(
            late - early > 0.9 for early, late in zip(moments, moments[amount:], strict=False)
        )
    assert started[-1][0] < 13.0  # at the best 9 s
    assert sent_back < 200


async def test_a_task_waits_for_as_long_as_it_may_and_asks_at_its_turn() -> None:
    clock = ManualClock()
    gate = AsyncTaskGate(AsyncMemoryStore(MemoryStore(clock)), time=clock)
    task = TaskLimits("send", send, ["4/second", ("tenant:{tenant}", "1/second")])
    gate.add(task)
    began_s = clock.monotonic()
    moments = []
    for max_wait in (0.5, 1.5, 0.5, 60.0):
        delay = await gate.wait(task, ("acme",), {}, max_wait)
        moments.append((round(delay, 3), round(clock.monotonic() - began_s, 3)))
    assert await gate.hold(task, ("acme",), {}, 10.0) == 0.0
    # Who cannot be admitted in time is told so at once, and has waited for nothing.
    assert moments == [(0.0, 0.0), (0.0, 1.0), (1.0, 1.0), (0.0, 3.0)]
