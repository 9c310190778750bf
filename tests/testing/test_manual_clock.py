"""`distwindow.testing.ManualClock`: time passes only when it is moved."""

from __future__ import annotations

import asyncio
import threading

import pytest

from distwindow import AsyncLimiter, Limiter, RateLimitExceeded
from distwindow.ring.clock import AsyncClock
from distwindow.testing import ManualClock
from tests.servers.wait import until


def test_time_stands_still_until_it_is_advanced() -> None:
    clock = ManualClock(1_000)
    begin = clock.monotonic()
    assert (clock.now_ms(), clock.monotonic()) == (1_000, begin)
    clock.advance(0.25)
    assert clock.now_ms() == 1_250
    assert clock.monotonic() - begin == pytest.approx(0.25, abs=1e-9)


def test_tenths_of_a_second_add_up_exactly() -> None:
    clock = ManualClock(0)
    for _ in range(1_000):
        clock.advance(0.1)
    assert clock.now_ms() == 100_000


@pytest.mark.parametrize("seconds", [-1, -0.001, float("nan")])
async def test_it_moves_forward_only(seconds: float) -> None:
    with pytest.raises(ValueError, match="forward only"):
        ManualClock().advance(seconds)
    with pytest.raises(ValueError, match="forward only"):
        await ManualClock().advance_async(seconds)


def test_a_limit_is_tested_without_sleeping() -> None:
    clock = ManualClock()
    limiter = Limiter("memory://", "2/minute", time=clock)
    assert [limiter.try_acquire("k").allowed for _ in range(3)] == [True, True, False]
    clock.advance(limiter.try_acquire("k").retry_after - 0.001)
    assert not limiter.try_acquire("k")
    clock.advance(0.001)
    assert limiter.try_acquire("k")


def test_a_sleep_moves_the_clock_by_itself() -> None:
    clock = ManualClock()
    limiter = Limiter("memory://", "1/minute", time=clock)
    begin = clock.now_ms()
    for _ in range(3):
        limiter.acquire("k")
    assert clock.now_ms() - begin == 120_000
    assert clock.slept == [60.0, 60.0]


async def test_a_sleep_of_a_task_moves_the_clock_by_itself() -> None:
    clock = ManualClock()
    limiter = AsyncLimiter("memory://", "1/minute", time=clock)
    for _ in range(3):
        await limiter.acquire("k")
    assert clock.slept == [60.0, 60.0]


def test_without_auto_advance_threads_sleep_until_it_is_advanced() -> None:
    clock = ManualClock(auto_advance=False)
    limiter = Limiter("memory://", "1/minute", time=clock)
    limiter.acquire("k")
    thread = threading.Thread(target=limiter.acquire, args=["k"], daemon=True)
    thread.start()
    until(lambda: clock.slept, what="the thread sleeps")
    clock.advance(59.999)
    assert thread.is_alive()
    clock.advance(0.001)
    thread.join(10)
    assert not thread.is_alive()


async def test_without_auto_advance_tasks_sleep_until_it_is_advanced() -> None:
    clock = ManualClock(auto_advance=False)
    limiter = AsyncLimiter("memory://", "1/minute", time=clock)
    await limiter.acquire("k")
    task = asyncio.create_task(limiter.acquire("k"))
    await clock.advance_async(59.999)
    assert not task.done()
    await clock.advance_async(0.001)
    assert task.done()
    assert (await task).allowed


async def test_advance_async_stops_at_the_end_of_each_sleep() -> None:
    clock = ManualClock(0, auto_advance=False)
    limiter = AsyncLimiter("memory://", "1/second 1 buckets", time=clock)
    served: list[int] = []

    async def wait() -> None:
        served.append((await limiter.acquire("k")).now_ms)

    tasks = [asyncio.create_task(wait()) for _ in range(5)]
    await clock.advance_async(10)
    assert served == [0, 1_000, 2_000, 3_000, 4_000]
    assert clock.now_ms() == 10_000
    await asyncio.gather(*tasks)


async def test_sleeping_tasks_wake_in_the_order_of_their_time() -> None:
    clock = ManualClock(auto_advance=False)
    woken: list[float] = []

    async def sleep(seconds: float) -> None:
        await clock.sleep_async(seconds)
        woken.append(seconds)

    tasks = [asyncio.create_task(sleep(seconds)) for seconds in (3, 1, 2, 0, -1)]
    await clock.advance_async(0)
    assert woken == [0, -1]
    clock.advance(3)  # all at once
    await asyncio.gather(*tasks)
    assert woken == [0, -1, 1, 2, 3]


def test_a_sleeping_task_whose_loop_is_closed_is_skipped() -> None:
    clock = ManualClock(auto_advance=False)

    async def leave_a_sleeper() -> None:
        task = asyncio.create_task(clock.sleep_async(1))
        await asyncio.sleep(0)
        task.cancel()

    asyncio.run(leave_a_sleeper())
    clock.advance(2)


def test_a_wait_that_is_too_long_is_refused_without_sleeping() -> None:
    clock = ManualClock()
    limiter = Limiter("memory://", "1/minute", time=clock)
    limiter.acquire("k")
    with pytest.raises(RateLimitExceeded) as caught:
        limiter.acquire("k", timeout=59)
    assert caught.value.retry_after == 60.0
    assert clock.slept == []


def test_it_is_a_clock_of_tasks_too() -> None:
    assert isinstance(ManualClock(), AsyncClock)
