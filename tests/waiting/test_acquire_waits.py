"""How long `acquire` waits, and in which order threads and tasks are served."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import pytest

from distwindow import AsyncLimiter, Decision, Limiter, RateLimitExceeded
from tests.clock_and_stores import ManualClock, fresh_key
from tests.servers import until


def test_acquire_waits_its_exact_time() -> None:
    clock = ManualClock()
    limiter = Limiter("memory://", "5/minute", time=clock)
    clock.move(3_000)
    for _ in range(5):
        assert limiter.acquire("key").allowed
    assert clock.slept == []
    decision = limiter.acquire("key", 5)
    # Buckets are 6 s wide: the bucket of T0 + 3 s leaves the window at T0 + 60 s.
    assert clock.slept == [pytest.approx(57.0 - (clock.now_ms() - decision.now_ms) / 1000)]
    assert decision.now_ms % 6_000 == 0
    assert limiter.stats("key").passed == 5


async def test_a_task_waits_its_exact_time() -> None:
    clock = ManualClock()
    async with AsyncLimiter("memory://", "5/minute", time=clock) as limiter:
        for _ in range(5):
            await limiter.acquire("key")
        decision = await limiter.acquire("key", 5)
    assert len(clock.slept) == 1
    assert decision.now_ms == clock.now_ms()


def in_line(limiter: Any) -> int:
    return sum(len(line.waiting) for line in limiter.decider.queues.by_name.values())


def test_threads_are_served_in_the_order_they_came() -> None:
    clock = ManualClock(auto_advance=False)
    limiter = Limiter("memory://", "1/second 1 buckets", time=clock)
    limiter.acquire("key")
    served: list[tuple[int, int]] = []

    def wait(number: int) -> None:
        served.append((number, limiter.acquire("key").now_ms))

    threads = [threading.Thread(target=wait, args=[number]) for number in range(6)]
    for number, thread in enumerate(threads):
        thread.start()
        # mypy cannot infer a lambda whose parameter has a default.
        until(lambda n=number: in_line(limiter) == n + 1, what="in line")  # type: ignore[misc]
    begin = clock.now_ms()
    for number in range(6):
        # mypy cannot infer a lambda whose parameter has a default.
        until(lambda n=number: len(clock.slept) == n + 1, what="the head sleeps")  # type: ignore[misc]
        clock.move(1_000)
        # mypy cannot infer a lambda whose parameter has a default.
        until(lambda n=number: len(served) == n + 1, what="the head is served")  # type: ignore[misc]
    for thread in threads:
        thread.join(10)
    assert served == [(n, begin + 1_000 * (n + 1)) for n in range(6)]
    assert in_line(limiter) == 0


async def loop_turns(times: int = 25) -> None:
    for _ in range(times):
        await asyncio.sleep(0)


async def test_tasks_are_served_in_the_order_they_came() -> None:
    clock = ManualClock(auto_advance=False)
    limiter = AsyncLimiter("memory://", "1/second 1 buckets", time=clock)
    await limiter.acquire("key")
    served: list[tuple[int, int]] = []

    async def wait(number: int) -> None:
        served.append((number, (await limiter.acquire("key")).now_ms))

    tasks = [asyncio.create_task(wait(number)) for number in range(6)]
    begin = clock.now_ms()
    for _ in range(6):
        await loop_turns()
        clock.move(1_000)
    await asyncio.gather(*tasks)
    assert served == [(n, begin + 1_000 * (n + 1)) for n in range(6)]


@pytest.mark.parametrize("dropped", [{0}, {2}, {4}, {0, 1}, {1, 3}, {0, 1, 2, 3, 4}])
async def test_a_cancelled_waiter_leaves_the_queue_intact(dropped: set[int]) -> None:
    clock = ManualClock(auto_advance=False)
    limiter = AsyncLimiter("memory://", "1/second 1 buckets", time=clock)
    await limiter.acquire("key")
    served: list[int] = []

    async def wait(number: int) -> None:
        await limiter.acquire("key")
        served.append(number)

    tasks = [asyncio.create_task(wait(number)) for number in range(5)]
    await loop_turns()
    for number in dropped:
        tasks[number].cancel()
    for _ in range(5):
        await loop_turns()
        clock.move(1_000)
    done = await asyncio.gather(*tasks, return_exceptions=True)
    assert {n for n, end in enumerate(done) if isinstance(end, asyncio.CancelledError)} == dropped
    assert served == [n for n in range(5) if n not in dropped]
    assert in_line(limiter) == 0
    assert (await limiter.stats("key")).passed <= 1, "the dropped were not charged"


def test_a_wait_that_is_too_long_is_refused_at_once() -> None:
    clock = ManualClock()
    limiter = Limiter("memory://", "5/minute", time=clock)
    limiter.acquire("key", 5)
    for timeout in (0, 1, 59.0):
        with pytest.raises(RateLimitExceeded) as caught:
            limiter.acquire("key", timeout=timeout)
        assert isinstance(caught.value.decision, Decision)
        assert caught.value.retry_after == 60.0
        assert "5/minute" in str(caught.value)
        assert "'key'" in str(caught.value)
    assert clock.slept == []
    assert limiter.stats("key").blocked == 3
    assert limiter.acquire("key", timeout=60.0).allowed, "just long enough"


async def test_a_tasks_wait_that_is_too_long_is_refused_at_once_also_behind_others() -> None:
    clock = ManualClock(auto_advance=False)
    limiter = AsyncLimiter("memory://", "1/minute 1 buckets", time=clock)
    await limiter.acquire("key")
    head = asyncio.create_task(limiter.acquire("key"))
    await loop_turns()
    with pytest.raises(RateLimitExceeded) as caught:
        await limiter.acquire("key", timeout=5.0)
    assert caught.value.retry_after == 60.0
    clock.move(60_000)
    assert (await head).allowed


def test_each_key_has_a_queue_of_its_own() -> None:
    clock = ManualClock(auto_advance=False)
    limiter = Limiter("memory://", "1/minute", time=clock)
    limiter.acquire("busy")
    waiting = threading.Thread(target=limiter.acquire, args=["busy"])
    waiting.start()
    until(lambda: clock.slept, what="asleep")
    assert limiter.acquire("free").allowed
    assert limiter.try_acquire("busy").allowed is False, "try_acquire never waits"
    clock.move(60_000)
    waiting.join(10)
    assert not waiting.is_alive()


@pytest.mark.parametrize("timeout", [-1, -0.001, float("nan"), "1", True, object()])
def test_a_timeout_that_is_none(timeout: Any) -> None:
    with pytest.raises(ValueError, match=r"timeout=.* is not a number of seconds"):
        Limiter("memory://", "5/minute").acquire("key", timeout=timeout)


def test_no_timeout_can_be_written_in_two_ways() -> None:
    clock = ManualClock()
    limiter = Limiter("memory://", "1/minute", time=clock)
    for timeout in (None, float("inf"), None):
        assert limiter.acquire("key", timeout=timeout).allowed


def test_waiting_on_a_server_with_its_own_clock(redis_url: str) -> None:
    with Limiter(redis_url, "5/100ms 1 buckets", timeout=10) as limiter:
        key = fresh_key()
        times = [limiter.acquire(key, timeout=20).now_ms for _ in range(13)]
    assert times == sorted(times)
    for bucket in {at // 100 for at in times}:
        assert sum(at // 100 == bucket for at in times) <= 5
