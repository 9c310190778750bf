"""Tasks and event loops: one connection for each loop, cancellations that do not affect other
calls, and loops that end.
"""

from __future__ import annotations

import asyncio
import gc
import random
import threading
import time
from collections.abc import Awaitable
from typing import Any

import pytest

from distwindow import AsyncLimiter, Decision, StoreError, StoreTimeout
from tests.harness import PLENTY, STALLS, Call, admin, in_time, used
from tests.servers import Delay, DropReply, Proxy, Silent, until, until_async

SCRIPT = b"EVALSHA"


def named(server: Any, name: str) -> int:
    """Return the number of connections with a name."""
    return sum(client["name"] == name for client in server.client_list())


async def outcome(call: Awaitable[Decision]) -> Decision | StoreError:
    try:
        return await call
    except StoreError as exc:
        return exc


# -- connections ----------------------------------------------------------------------------------


@pytest.mark.compat
async def test_all_tasks_use_one_connection(redis_url: str, prefix: str) -> None:
    async with AsyncLimiter(redis_url, PLENTY, prefix=prefix, name=prefix, timeout=5) as limiter:
        keys = [f"k{i % 50}" for i in range(1000)]
        decisions = await asyncio.gather(*(limiter.try_acquire(key) for key in keys))
        assert [decision.key for decision in decisions] == keys
        with admin(redis_url) as server:
            assert named(server, prefix) == 1
            assert used(server, prefix) == 1000
    with admin(redis_url) as server:
        until(lambda: named(server, prefix) == 0, what="closed")


@pytest.mark.event_loops
@pytest.mark.compat
def test_one_limiter_in_one_loop_after_another(redis_url: str, prefix: str) -> None:
    limiter = AsyncLimiter(redis_url, PLENTY, prefix=prefix, name=prefix)

    async def some() -> None:
        assert all(await asyncio.gather(*(limiter.try_acquire("k") for _ in range(10))))

    with admin(redis_url) as server:
        for _ in range(5):
            asyncio.run(some())
            until(lambda: named(server, prefix) <= 1, what="earlier loops' connections")
        assert used(server, prefix) == 50

        async def last() -> None:
            await some()
            await limiter.aclose()

        asyncio.run(last())
        until(lambda: named(server, prefix) == 0, what="all closed")
        gc.collect()


@pytest.mark.event_loops
@pytest.mark.compat
def test_one_limiter_in_many_loops_at_once(redis_url: str, prefix: str) -> None:
    limiter = AsyncLimiter(redis_url, PLENTY, prefix=prefix, name=prefix, timeout=5)
    ready, done = threading.Barrier(5, timeout=20), threading.Barrier(5, timeout=20)

    async def some() -> None:
        for _ in range(10):
            assert all(await asyncio.gather(*(limiter.try_acquire("k") for _ in range(10))))
        await asyncio.to_thread(ready.wait)
        await asyncio.to_thread(done.wait)
        await limiter.aclose()

    threads = [threading.Thread(target=lambda: asyncio.run(some())) for _ in range(4)]
    for thread in threads:
        thread.start()
    ready.wait()
    with admin(redis_url) as server:
        assert named(server, prefix) == 4
        assert used(server, prefix) == 400
        done.wait()
        for thread in threads:
            thread.join()
        until(lambda: named(server, prefix) == 0, what="each loop's own closed")


async def test_aclose_ends_calls_in_flight_and_refuses_later_ones(
    proxy: Proxy, prefix: str
) -> None:
    limiter = AsyncLimiter(proxy.url, PLENTY, prefix=prefix, timeout=10)
    await limiter.try_acquire("k")
    before = proxy.affected
    with proxy.inject(Delay(only=SCRIPT, replies=1.0)):
        call = asyncio.ensure_future(outcome(limiter.try_acquire("k")))
        await until_async(lambda: proxy.affected > before, what="the request is sent")
        await limiter.aclose()
        ended = await asyncio.wait_for(call, 0.5)
    assert isinstance(ended, StoreError)
    assert ended.charged is None
    with pytest.raises(ValueError, match="closed"):
        await limiter.try_acquire("k")
    await limiter.aclose()


# -- cancellation ---------------------------------------------------------------------------------


async def test_a_task_cancelled_before_its_call_is_sent_charges_nothing(
    redis_url: str, prefix: str
) -> None:
    async with AsyncLimiter(redis_url, PLENTY, prefix=prefix) as limiter:
        await limiter.try_acquire("k")
        await limiter.try_acquire("k")
        tasks = [asyncio.ensure_future(_acquire(limiter, "k")) for _ in range(10)]
        await asyncio.sleep(0)  # the calls have been made, and nothing has been written yet
        for task in tasks[::2]:
            task.cancel()
        ended = await asyncio.gather(*tasks, return_exceptions=True)
        assert sum(isinstance(end, asyncio.CancelledError) for end in ended) == 5
        with admin(redis_url) as server:
            assert used(server, prefix) == 2 + 5


async def _acquire(limiter: AsyncLimiter, key: str) -> Decision:
    return await limiter.try_acquire(key)


async def test_a_cancelled_call_does_not_disturb_the_replies_of_others(
    proxy: Proxy, redis_url: str, prefix: str
) -> None:
    async with AsyncLimiter(proxy.url, PLENTY, prefix=prefix, timeout=5, name=prefix) as limiter:
        await asyncio.gather(*(limiter.try_acquire(f"k{i}") for i in range(20)))
        with proxy.inject(Delay(only=SCRIPT, replies=0.1)):
            tasks = [asyncio.ensure_future(_acquire(limiter, f"k{i}")) for i in range(20)]
            # All 20 requests are sent by then, in chunks of any number, and no reply has arrived.
            await asyncio.sleep(0.03)
            for task in tasks[::3]:
                task.cancel()
            ended = await asyncio.gather(*tasks, return_exceptions=True)
        for i, end in enumerate(ended):
            if i % 3 == 0:
                assert isinstance(end, asyncio.CancelledError)
            else:
                assert isinstance(end, Decision)
                assert end.key == f"k{i}"
                assert end.remaining == 1_000_000 - 2
        await limiter._store.drain()  # what is given back
        with admin(redis_url) as server:
            assert named(server, prefix) == 1
            assert used(server, prefix) == 40 - 7


async def test_if_the_first_caller_is_cancelled_while_connecting_the_others_still_connect(
    proxy: Proxy, prefix: str
) -> None:
    async with AsyncLimiter(proxy.url, PLENTY, prefix=prefix, timeout=10) as limiter:
        with proxy.inject(Delay(replies=0.05)):
            first = asyncio.ensure_future(_acquire(limiter, "k"))
            await until_async(lambda: proxy.open, what="a connection")
            others = [asyncio.ensure_future(_acquire(limiter, f"o{i}")) for i in range(5)]
            await asyncio.sleep(0.01)  # the others wait for that connection, whose replies are late
            first.cancel()
            assert all(await asyncio.gather(*others))


@pytest.mark.slow
@pytest.mark.parametrize("seconds", [0.7, 2.0])
async def test_many_cancellations_at_random_times(
    redis_url: str, prefix: str, seconds: float
) -> None:
    """There is no wrong decision, one connection stays open, and every permit is accounted for."""
    async with AsyncLimiter(redis_url, PLENTY, prefix=prefix, timeout=5, name=prefix) as limiter:
        admitted = cancelled = 0
        live: set[asyncio.Task[None]] = set()

        async def work(key: str) -> None:
            nonlocal admitted, cancelled
            try:
                decision = await limiter.try_acquire(key)
            except asyncio.CancelledError:
                cancelled += 1
                return
            assert decision.key == key
            admitted += decision.allowed

        ends = time.monotonic() + seconds
        while time.monotonic() < ends or cancelled <= 100:
            for _ in range(random.randrange(1, 60)):
                task = asyncio.ensure_future(work(f"k{random.randrange(5)}"))
                live.add(task)
                task.add_done_callback(live.discard)
            await asyncio.sleep(random.choice((0, 0, 0.0005)))
            for task in random.sample(sorted(live, key=id), len(live) // 3):
                task.cancel()
        started = list(live)
        await asyncio.gather(*started)
        print(f"admitted {admitted}, cancelled {cancelled}")
        with admin(redis_url) as server:
            held = used(server, prefix)
            assert named(server, prefix) == 1
        assert admitted <= held <= admitted + cancelled


# -- time -----------------------------------------------------------------------------------------


async def test_calls_behind_a_lost_reply_end_by_their_own_deadlines(
    proxy: Proxy, prefix: str
) -> None:
    STALLS.watch()
    async with AsyncLimiter(proxy.url, PLENTY, prefix=prefix, timeout=0.25) as limiter:
        await limiter.try_acquire("k")
        await limiter.try_acquire("k")

        async def call() -> Call:
            began = time.perf_counter()
            found = await outcome(limiter.try_acquire("k"))
            ended = time.perf_counter()
            return Call("k", found, ended - began, ended)

        with proxy.inject(DropReply(only=SCRIPT, times=1)):
            calls = []
            for _ in range(15):
                calls.append(asyncio.ensure_future(call()))
                await asyncio.sleep(0.03)  # calls at intervals, of which some join those in flight
            ended = await asyncio.gather(*calls)
        in_time(ended, 0.25)
        assert isinstance(ended[0].outcome, StoreTimeout)
        # The link has healed. A stall of the machine may delay some of the calls.
        more = [await outcome(limiter.try_acquire("k")) for _ in range(5)]
        assert any(isinstance(found, Decision) for found in more)


async def test_a_call_whose_time_ran_out_while_connecting_is_never_sent(
    proxy: Proxy, redis_url: str, prefix: str
) -> None:
    """Its error says that it was not charged, with the client's clock, too, whose guard has no
    deadline.
    """
    async with AsyncLimiter(
        proxy.url, PLENTY, prefix=prefix, timeout=0.2, clock="client"
    ) as limiter:
        with proxy.inject(Silent()):
            ended = await asyncio.gather(*(outcome(limiter.try_acquire(k)) for k in "abc"))
        assert {getattr(end, "charged", "admitted") for end in ended} == {False}
        await asyncio.sleep(0.3)  # a request that was sent late would be counted by then
        with admin(redis_url) as server:
            assert used(server, prefix) == 0


async def test_many_tasks_at_once_do_not_time_out(redis_url: str, prefix: str) -> None:
    async with AsyncLimiter(redis_url, PLENTY, prefix=prefix, timeout=5) as limiter:
        calls = (limiter.try_acquire(f"k{i % 7}") for i in range(3000))
        assert all(await asyncio.gather(*calls))
