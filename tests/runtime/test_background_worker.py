"""One worker for all limiters of a process: when it starts and ends, and that everything due is
sent in one exchange.
"""

from __future__ import annotations

import asyncio
import gc
import threading
from contextlib import AsyncExitStack
from typing import Any

import pytest

from distwindow import AsyncLimiter, Limiter
from tests.harness import Harness, admin, used
from tests.lifecycle.worker_options import MODES, NEVER, SOON, forks
from tests.servers import Cluster, Proxy, Standalone, until
from tests.stores.test_transport_fork import Child


def workers() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "distwindow"]


def worker_tasks() -> list[asyncio.Task[Any]]:
    return [task for task in asyncio.all_tasks() if task.get_name() == "distwindow"]


@forks
def test_one_thread_started_by_the_first_that_needs_it(redis_url: str, prefix: str) -> None:
    """Run in a child process, because this process has a worker already."""

    def work(child: Child) -> list[int]:
        seen = [len(workers())]
        limiters = [
            Limiter(redis_url, "2/hour", prefix=f"{prefix}-{n}", consistency=MODES[n % 3], **SOON)
            for n in range(9)
        ]
        seen.append(len(workers()))
        limiters[0].try_acquire("k")  # nothing to flush
        seen.append(len(workers()))
        for limiter in limiters:
            for _ in range(5):
                limiter.try_acquire("k")
        seen.append(len(workers()))
        for limiter in limiters:
            limiter.close()
        return seen

    assert Child(work).result() == [0, 0, 0, 1]


@pytest.mark.parametrize("mode", ["direct", "leased", "eventual"])
async def test_one_task_a_loop_that_ends_when_there_is_nothing(
    redis_url: str, prefix: str, mode: Any
) -> None:
    # A key is polled for the length of its window.
    limits = "2/50ms 1 bucket" if mode == "eventual" else "2/hour"
    async with AsyncExitStack() as stack:
        limiters = [
            AsyncLimiter(redis_url, limits, prefix=f"{prefix}-{n}", consistency=mode, **SOON)
            for n in range(5)
        ]
        for limiter in limiters:
            await stack.enter_async_context(limiter)
        assert worker_tasks() == []
        tasks = len(asyncio.all_tasks())
        for limiter in limiters:
            for _ in range(5):
                await limiter.try_acquire("k")
        assert len(worker_tasks()) == 1
        assert len(asyncio.all_tasks()) - tasks <= 1 + len(
            limiters
        )  # one reader for each connection
        await asyncio.wait(worker_tasks(), timeout=20)
        assert worker_tasks() == []
        for _ in range(3):
            await limiters[0].try_acquire("k")
        assert len(worker_tasks()) == 1


@pytest.mark.event_loops
def test_each_loop_has_its_own(redis_url: str, prefix: str) -> None:
    """Counts that a closed loop has not sent are sent by the next loop."""
    limiter = AsyncLimiter(redis_url, "2/hour", prefix=prefix, timeout=5, flush_interval=0.3)

    async def refused() -> None:
        for _ in range(4):
            await limiter.try_acquire("k")
        assert len(worker_tasks()) == 1

    async def last() -> None:
        await limiter.try_acquire("k")
        assert (await limiter.stats("k")).blocked == 2 + 4 * 2 + 1
        await limiter.aclose()

    for _ in range(3):
        asyncio.run(refused())
    asyncio.run(last())
    gc.collect()


@pytest.mark.parametrize("mode", MODES)
def test_many_keys_are_one_exchange(
    harness: Harness, proxy: Proxy, redis_url: str, prefix: str, mode: str
) -> None:
    limiter = harness.limiter(
        proxy.url, "3/hour", prefix=prefix, consistency=mode, timeout=5, **NEVER
    )
    keys = [f"k{n}" for n in range(100)]
    for _ in range(5):
        limiter.each(keys)
    before = proxy.requests
    limiter.flush()
    # About 25 KB are written at once, and the proxy may read them in several chunks.
    assert 0 < proxy.requests - before <= 8
    if mode == "eventual":
        limiter.flush()  # the first flush has fetched the server's time
    else:
        before = proxy.requests
        limiter.flush()
        assert proxy.requests == before
    with admin(redis_url) as server:
        assert used(server, prefix) == 300
    assert all(limiter.stats(key).blocked == 2 for key in keys[::50])


@pytest.mark.slow
def test_many_keys_of_a_cluster_are_flushed(
    harness: Harness, cluster: Cluster, cluster_url: str, prefix: str
) -> None:
    for mode in MODES:
        options: dict[str, Any] = {"prefix": f"{prefix}-{mode}", "consistency": mode, "timeout": 5}
        limiter = harness.limiter(cluster_url, "3/hour", **options, **NEVER)
        keys = [f"k{n}" for n in range(30)]
        for _ in range(5):
            limiter.each(keys)
        for _ in range(3):
            limiter.flush()
        other = harness.limiter(cluster_url, "3/hour", **options)
        assert {(s.passed, s.blocked) for s in map(other.stats, keys)} == {(3, 2)}


def test_a_flush_reloads_scripts_that_the_server_lost(
    harness: Harness, redis_url: str, prefix: str
) -> None:
    with Standalone() as own, own.client() as server:
        limiter = harness.limiter(own.url, "1/hour", prefix=prefix, timeout=5, **NEVER)
        keys = [f"k{n}" for n in range(100)]
        for _ in range(3):
            limiter.each(keys)
        server.script_flush()
        limiter.flush()
        assert {limiter.stats(key).blocked for key in keys} == {2}


@pytest.mark.slow
def test_a_stalled_server_delays_other_limiters_by_one_timeout(redis_url: str, prefix: str) -> None:
    """There is one worker, so the other limiters are flushed later by one timeout."""
    with Standalone() as own:
        stalled = Limiter(own.url, "1/hour", prefix=prefix, timeout=0.2, **SOON)
        reachable = Limiter(redis_url, "1/hour", prefix=prefix, **SOON)
        for limiter in (stalled, reachable):
            assert limiter.try_acquire("k")
        own.pause()
        try:
            for limiter in (stalled, reachable):
                for _ in range(10):
                    try:
                        limiter.try_acquire("k")
                    except Exception:
                        assert limiter is stalled
            with Limiter(redis_url, "1/hour", prefix=prefix) as other:
                until(lambda: other.stats("k").blocked == 10, timeout=20)
        finally:
            own.resume()
        reachable.close()
        stalled.close()


def test_flushes_from_many_threads(harness: Harness, redis_url: str, prefix: str) -> None:
    """The flushes run beside the worker and each other: nothing is counted twice, and no call is
    delayed.
    """
    limiter = harness.limiter(redis_url, "1/hour", prefix=prefix, timeout=5, flush_interval=0.001)
    keys = [f"k{n}" for n in range(20)]
    limiter.each(keys)
    failed: list[BaseException] = []

    def work() -> None:
        try:
            for _ in range(10):
                limiter.each(keys)
                limiter.flush()
        except BaseException as exc:  # whatever a thread raises has to fail the test
            failed.append(exc)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert failed == []
    limiter.flush()
    assert {limiter.stats(key).blocked for key in keys} == {40}
