"""Priority calls whose reply is lost, or which are cancelled or interrupted while they wait: each
borrows at most once, and what it borrowed counts.
"""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from distwindow import AsyncLimiter, Limiter, StoreError, StoreUnavailable
from tests.clock_and_stores import ManualClock
from tests.servers import Proxy
from tests.servers.faults import DropReply

LIMIT = "10/hour 1 buckets"
OPTIONS: Any = {"timeout": 2.0, "max_wait": 3600.0}


def test_a_call_whose_reply_is_lost_has_borrowed_once(proxy: Proxy, prefix: str) -> None:
    with Limiter(proxy.url, LIMIT, prefix=prefix, **OPTIONS) as limiter:
        limiter.try_acquire("k", 10)
        limiter.try_acquire("other", priority=True)  # so that the server has the script
        with (
            proxy.inject(DropReply(close=True, only=b"EVALSHA", times=1)),
            pytest.raises(StoreError) as lost,
        ):
            limiter.try_acquire("k", 2, priority=True)
        assert (lost.value.charged, limiter.unknown_total) == (None, 1)
        assert limiter.stats("k").borrowed == 2
        assert limiter.try_acquire("k", 3, priority=True).reason == "borrowed"
        assert not limiter.try_acquire("k", 1, priority=True)


def test_a_call_that_was_not_sent_has_borrowed_nothing() -> None:
    with pytest.raises(StoreUnavailable) as refused:
        Limiter("redis://127.0.0.1:1/0", LIMIT).try_acquire("k", priority=True)
    assert refused.value.charged is False


async def test_a_task_that_is_cancelled_while_it_waits_keeps_what_it_borrowed(
    redis_url: str, prefix: str
) -> None:
    async with AsyncLimiter(redis_url, LIMIT, prefix=prefix, **OPTIONS) as limiter:
        await limiter.try_acquire("k", 10)
        waiting = asyncio.ensure_future(limiter.acquire("k", 2, priority=True))
        for _ in range(100):
            if (await limiter.stats("k")).borrowed:
                break
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        assert (await limiter.stats("k")).borrowed == 2
        decision = await limiter.try_acquire("k", 3, priority=True)
        assert decision.reason == "borrowed"
        assert await limiter.refund(decision) == 3


def test_an_interrupted_wait_leaves_no_queue_behind() -> None:
    class Interrupting(ManualClock):
        def sleep(self, seconds: float, /) -> None:
            raise KeyboardInterrupt

    limiter = Limiter("memory://", LIMIT, time=Interrupting(), max_wait=3600)
    limiter.acquire("k", 10)
    for _ in range(2):
        with pytest.raises(KeyboardInterrupt):
            limiter.acquire("k", 2, priority=True)
    assert limiter.decider.queues.by_name == {}
    assert limiter.stats("k").borrowed == 4


async def test_a_loop_of_priority_calls_in_memory_lets_other_tasks_run() -> None:
    turns = 0

    async def other() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    task = asyncio.ensure_future(other())
    async with AsyncLimiter("memory://", LIMIT) as limiter:
        for _ in range(1000):
            await limiter.try_acquire("k", priority=True)
    task.cancel()
    assert turns > 5
