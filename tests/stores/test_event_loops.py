"""`AsyncLimiter` and event loops, of asyncio and of uvloop: many calls at once on one connection,
and loops that end in various ways. The quick tier runs these tests on uvloop, too.
"""

from __future__ import annotations

import asyncio
import gc
import warnings
from collections import Counter
from typing import Any

import fakeredis
import pytest

from distwindow import AsyncLimiter, StoreError
from tests.harness import PLENTY, admin, used
from tests.servers import Delay, Proxy, Silent, until


def test_the_loop_is_the_one_that_the_parameter_names(request: pytest.FixtureRequest) -> None:
    """Without this test, all runs on uvloop could use loops of asyncio without notice."""
    with pytest.raises(AssertionError, match="runs on one kind only"):
        asyncio.new_event_loop()


async def test_a_coroutine_runs_on_it(event_loop_kind: str) -> None:
    module = type(asyncio.get_running_loop()).__module__.partition(".")[0]
    assert module == event_loop_kind


@pytest.mark.event_loops
def test_asyncio_run_uses_it_too(event_loop_kind: str) -> None:
    async def module() -> str:
        return type(asyncio.get_running_loop()).__module__.partition(".")[0]

    assert asyncio.run(module()) == event_loop_kind


# -- many calls on one connection -----------------------------------------------------------------


async def test_calls_do_not_wait_for_the_replies_of_others(proxy: Proxy, prefix: str) -> None:
    """One after the other the calls would take 300 round trips of 2 ms, and most would exceed 0.25
    s.
    """

    async def call(key: str) -> str:
        try:
            return "admitted" if await limiter.try_acquire(key) else "refused"
        except StoreError as exc:
            return type(exc).__name__

    async with AsyncLimiter(proxy.url, PLENTY, prefix=prefix, timeout=0.5) as limiter:
        await limiter.try_acquire("k")
        with proxy.inject(Delay(replies=0.002)):
            outcomes = await asyncio.gather(*(call(f"k{i}") for i in range(300)))
    assert Counter(outcomes) == {"admitted": 300}


@pytest.mark.parametrize("server", ["redis", "unix", "tls"])
async def test_frames_are_written_to_the_transport(
    request: pytest.FixtureRequest, server: str, prefix: str
) -> None:
    """They are not passed to redis-py one by one, which is only for clients without a transport."""
    url = request.getfixturevalue(f"{server}_url")
    async with AsyncLimiter(url, PLENTY, prefix=prefix, timeout=5) as limiter:
        keys = [f"k{i % 50}" for i in range(500)]
        decisions = await asyncio.gather(*(limiter.try_acquire(key) for key in keys))
        assert [decision.key for decision in decisions] == keys
        assert [connection.transport_open for connection in connections_of(limiter)] == [True]


def connections_of(limiter: AsyncLimiter) -> list[Any]:
    """Return the connections of the running loop."""
    store: Any = limiter._store
    dispatcher = store._dispatchers[asyncio.get_running_loop()]
    return list(dispatcher.connections.values())


# -- loops that end -------------------------------------------------------------------------------


@pytest.mark.event_loops
@pytest.mark.parametrize("server", ["redis", "unix", "tls"])
@pytest.mark.parametrize("mode", ["direct", "leased", "eventual"])
def test_a_loop_may_end_without_aclose(
    request: pytest.FixtureRequest,
    server: str,
    mode: Any,
    prefix: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Pending counts are flushed at once, nothing is logged, and no connection is left open: a
    transport that is collected while open warns, and warnings are errors here.
    """
    url = request.getfixturevalue(f"{server}_url")
    limiter = AsyncLimiter(
        url, PLENTY, prefix=prefix, consistency=mode, timeout=8, flush_interval=60, sync_interval=60
    )

    async def some() -> None:
        for _ in range(20):
            async with limiter.entry("k"):
                pass

    for turn in range(2):
        asyncio.run(some())
        gc.collect()
        # If a flush got no reply, its counts would be reported as lost.
        assert caplog.messages == []
        assert asyncio.run(stored_ends(url, prefix)) == 20 * (turn + 1)


async def stored_ends(store: Any, prefix: str) -> int:
    """Return how many ends of entries the store has counted."""
    async with AsyncLimiter(store, PLENTY, prefix=prefix, timeout=8) as other:
        return (await other.stats("k")).success


@pytest.mark.event_loops
def test_a_loop_that_is_closed_under_the_limiter(redis_url: str, prefix: str) -> None:
    """The loop is not closed by `asyncio.run`, so no task is cancelled and nothing reports the end.
    Its connection is closed all the same, and the next loop gets its own.
    """
    limiter = AsyncLimiter(redis_url, PLENTY, prefix=prefix, name=prefix, timeout=5)

    async def acquire() -> bool:
        return bool(await limiter.try_acquire("k"))

    async def last() -> None:
        assert await acquire()
        await limiter.aclose()

    def connections() -> int:
        return sum(client["name"] == prefix for client in server.client_list())

    with admin(redis_url) as server, warnings.catch_warnings():
        # A loop that is closed with open connections warns, which is correct.
        warnings.simplefilter("ignore", ResourceWarning)
        for _ in range(3):
            loop = asyncio.new_event_loop()
            assert loop.run_until_complete(acquire())
            loop.close()
            until(lambda: connections() <= 1, what="earlier loops' connections")
        asyncio.run(last())
        until(lambda: connections() == 0, what="all connections closed")
        assert used(server, prefix) == 4
        gc.collect()


@pytest.mark.parametrize("kind", ["redis_url", "tls_url"])
@pytest.mark.parametrize("loops", [1, 2])
def test_a_loop_that_is_closed_leaves_no_warning(
    request: pytest.FixtureRequest, prefix: str, kind: str, loops: int
) -> None:
    """Nobody has told it to shut down its generators, and no limiter was closed. (One of uvloop
    warns while it is closed.)
    """
    limiter = AsyncLimiter(request.getfixturevalue(kind), PLENTY, prefix=prefix, timeout=5)
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always", ResourceWarning)
        for _ in range(loops):
            loop = asyncio.SelectorEventLoop()
            loop.run_until_complete(limiter.try_acquire("k"))
            loop.close()
        del limiter
        gc.collect()
    assert [str(each.message) for each in warned] == []


@pytest.mark.parametrize("ticks", [None, *range(16)])
async def test_after_a_cancelled_connect_the_next_call_makes_another_connection(
    proxy: Proxy, prefix: str, ticks: int | None
) -> None:
    """`asyncio.run` cancels every task, also the one that connects, and the last flush comes after
    that. It is cancelled once it is connected, or after so many ticks of the loop: maybe before
    its first step.
    """
    async with AsyncLimiter(proxy.url, PLENTY, prefix=prefix, timeout=20) as limiter:
        with proxy.inject(Silent()):
            call = asyncio.ensure_future(limiter.try_acquire("k"))
            if ticks is None:
                await asyncio.to_thread(until, lambda: proxy.open > 0)
            for _ in range(ticks or 0):
                await asyncio.sleep(0)
            me = asyncio.current_task()
            for task in asyncio.all_tasks():
                if task is not me:
                    task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await call
        assert await asyncio.wait_for(limiter.try_acquire("k"), 10)


@pytest.mark.event_loops
def test_a_client_without_a_transport_may_be_used_in_a_loop_that_ends(
    prefix: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Its calls go through redis-py, in a task that `asyncio.run` cancels before the last flush."""
    server = fakeredis.FakeServer()
    client = fakeredis.FakeAsyncRedis(server=server)
    limiter = AsyncLimiter(client, PLENTY, prefix=prefix, timeout=8, flush_interval=60)

    async def some() -> None:
        async with limiter.entry("k"):
            pass

    asyncio.run(some())
    assert caplog.messages == []
    assert asyncio.run(stored_ends(fakeredis.FakeAsyncRedis(server=server), prefix)) == 1
