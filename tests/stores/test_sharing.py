"""Concurrent calls of one key share script calls, which does not change their decisions.

The decisions must be those of *some* serial order of the calls: `remaining` of the admitted ones
counts down one after the other, and for each refused one too little was left for its cost.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from typing import Any
from unittest.mock import patch

import pytest
import redis
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from distwindow import AsyncLimiter, Decision, Limit, Limiter
from distwindow.lifecycle.connect import open_async_store
from distwindow.ring.commands import Acquire, Read, charges_of
from distwindow.ring.key import ring_name_prefix
from distwindow.runtime.options import Options
from distwindow.stores.memory import MemoryStore
from distwindow.stores.redis import connections as thread_connections
from tests.clock_and_stores import T0, fresh_key

FOREVER = 3650 * 86400
LENIENT = settings(deadline=None, suppress_health_check=list(HealthCheck), print_blob=True)


def check_serial(decisions: list[Decision], amount: int) -> None:
    """Raise `AssertionError` unless some serial order has these decisions."""
    admitted = sorted((d for d in decisions if d.allowed), key=lambda d: -d.remaining)
    left, seen = amount, {amount}
    for decision in admitted:
        left -= decision.cost
        assert decision.remaining == left
        seen.add(left)
    for decision in decisions:
        if not decision.allowed:
            assert decision.remaining in seen
            assert decision.remaining < decision.cost
            assert decision.retry_after > 0


def in_threads(limiter: Limiter, key: str, costs: list[int]) -> list[Decision]:
    start, decisions = threading.Barrier(len(costs)), list[Decision]()

    def call(cost: int) -> None:
        start.wait(10)
        decisions.append(limiter.try_acquire(key, cost))

    threads = [threading.Thread(target=call, args=[cost]) for cost in costs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(decisions) == len(costs)
    return decisions


@pytest.fixture(scope="module", params=["memory", "redis", "cluster"])
def url(request: pytest.FixtureRequest) -> str:
    if request.param == "memory":
        return "memory://"
    found: str = request.getfixturevalue(f"{request.param}_url")
    return found


@pytest.mark.parametrize("few_threads", [0, 12])
@settings(LENIENT, max_examples=15)
@given(amount=st.integers(5, 60), costs=st.lists(st.integers(1, 5), min_size=2, max_size=24))
def test_decisions_of_threads_are_those_of_a_serial_order(
    url: str, amount: int, costs: list[int], few_threads: int
) -> None:
    with (
        patch.object(thread_connections, "_FEW_THREADS", few_threads),
        Limiter(url, Limit(amount, per=FOREVER, buckets=1), timeout=30) as limiter,
    ):
        key = fresh_key()
        limiter.peek(key)  # opens the connection
        check_serial(in_threads(limiter, key, costs), amount)


@pytest.mark.event_loops
@settings(LENIENT, max_examples=15)
@given(
    amount=st.integers(5, 60),
    several=st.lists(st.lists(st.integers(1, 5), max_size=40), min_size=1, max_size=3),
)
def test_decisions_of_tasks_are_those_of_a_serial_order(
    examples_url: str, amount: int, several: list[list[int]]
) -> None:
    async def scenario() -> list[Decision]:
        limits = Limit(amount, per=FOREVER, buckets=1)
        async with AsyncLimiter(examples_url, limits, timeout=30) as limiter:
            key, decisions = fresh_key(), []
            for costs in several:
                calls = (limiter.try_acquire(key, cost) for cost in costs)
                decisions += await asyncio.gather(*calls)
            return decisions

    check_serial(asyncio.run(scenario()), amount)


@pytest.mark.event_loops
@settings(LENIENT, max_examples=30)
@given(
    used=st.integers(0, 12),
    calls=st.lists(st.integers(1, 4), min_size=1, max_size=30),
    limits=st.sampled_from(
        [
            (Limit(12, per=600, buckets=10),),
            (Limit(12, per=600, buckets=10, bound="strict"),),
            (Limit(12, per=60, buckets=1), Limit(15, per=600, buckets=5)),
        ]
    ),
)
def test_calls_of_one_tick_get_the_replies_of_some_serial_order(
    examples_url: str, used: int, calls: list[int], limits: tuple[Limit, ...]
) -> None:
    """Field by field; and equal calls are served in the order in which they were made."""
    key, specification = fresh_key(), MemoryStore().execute
    kinds = {
        cost: Acquire(charges_of(key, ring_name_prefix("sharing", key), limits, cost), T0)
        for cost in set(calls)
    }
    before = Acquire(charges_of(key, ring_name_prefix("sharing", key), limits, 1), T0)

    async def scenario() -> tuple[list[Any], Any]:
        store = open_async_store(examples_url, Options(clock="client", timeout=30))
        for _ in range(used):
            await store.execute(before)
        replies = await asyncio.gather(*(store.execute(kinds[cost]) for cost in calls))
        state = await store.execute(Read(before.charges, T0))
        await store.aclose()
        return replies, state

    replies, state = asyncio.run(scenario())
    queues = {
        cost: [reply for reply, c in zip(replies, calls, strict=True) if c == cost]
        for cost in kinds
    }
    served: list[Acquire] = [before] * used

    def next_reply(command: Acquire) -> Any:
        """Return the reply that `command` would get after those that are served."""
        store = MemoryStore().execute
        return [store(one) for one in (*served, command)][-1]

    while any(queues.values()):
        next_costs = [
            c for c, queue in queues.items() if queue and queue[0] == next_reply(kinds[c])
        ]
        assert next_costs, "no serial order has these replies"
        # Refused calls first, because they do not change the replies of the others.
        cost = min(next_costs, key=lambda cost: queues[cost][0].admitted)
        queues[cost].pop(0)
        served.append(kinds[cost])
    for command in served:
        specification(command)
    assert state == specification(Read(before.charges, T0))


@pytest.mark.event_loops
def test_many_calls_of_one_tick_are_one_script_call(examples_url: str) -> None:
    """Two hundred tasks in one tick are one EVALSHA."""

    async def scenario() -> list[Decision]:
        async with AsyncLimiter(examples_url, Limit(150, per=FOREVER, buckets=1), timeout=30) as it:
            await it.try_acquire(key)  # the first call of a key is sent alone
            client.config_resetstat()
            return await asyncio.gather(*(it.try_acquire(key) for _ in range(200)))

    key = fresh_key()
    with redis.Redis.from_url(examples_url) as client:
        decisions = asyncio.run(scenario())
        stats: Any = client.info("commandstats")
    assert stats["cmdstat_evalsha"]["calls"] == 1
    assert [d.allowed for d in decisions] == [True] * 149 + [False] * 51
    assert [d.remaining for d in decisions] == [*range(148, -1, -1)] + [0] * 51


async def test_calls_of_the_largest_cost_share_a_script_call(examples_url: str) -> None:
    """Of fifteen calls of the largest cost there is, one is admitted and the others are refused."""
    limit = Limit(10**12, per=FOREVER, buckets=1)
    async with AsyncLimiter(examples_url, limit, timeout=30) as limiter:
        key = fresh_key()
        calls = (limiter.try_acquire(key, 10**12) for _ in range(15))
        decisions = await asyncio.gather(*calls)
    assert [d.allowed for d in decisions] == [True] + [False] * 14


@pytest.fixture(autouse=True)
def _no_threads_left() -> Iterator[None]:
    before = _callers()
    yield
    assert _callers() <= before


def _callers() -> set[threading.Thread]:
    """The threads of tests. Those that limiters start have no `Thread`, and end when they can."""
    return {thread for thread in threading.enumerate() if type(thread) is threading.Thread}
