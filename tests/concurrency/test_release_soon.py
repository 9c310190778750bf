"""`AsyncSlot.release_soon` frees without `await`: over the stores, over where it is called, and
over who waits. A slot lives for an hour here, so none is free because its time is over or its
holder was renewed, and who waits in the same process asks again only if it is woken.
"""

from __future__ import annotations

import asyncio
import os
import random
import subprocess
import sys
import threading
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from distwindow import AsyncConcurrency, AsyncSlot, Concurrency
from distwindow.concurrency import operations as slot_operations
from distwindow.stores.memory import AsyncMemoryStore, MemoryStore
from tests.clock_and_stores import ManualClock, fresh_key
from tests.programs import ROOT, printed
from tests.servers import Proxy
from tests.servers.faults import Pass, Refuse
from tests.servers.wait import until_async

TTL = 3600.0
LONG_S = 60.0

pytestmark = pytest.mark.event_loops


async def call(slot: AsyncSlot) -> None:
    slot.release_soon()


async def in_this_task(slot: AsyncSlot) -> None:
    slot.release_soon()


async def in_another_task(slot: AsyncSlot) -> None:
    await asyncio.create_task(call(slot))


async def in_a_task_that_is_cancelled(slot: AsyncSlot) -> None:
    async def work() -> None:
        try:
            await asyncio.sleep(LONG_S)
        finally:
            slot.release_soon()

    task = asyncio.create_task(work())
    await asyncio.sleep(0)
    task.cancel()
    await asyncio.wait([task])


async def in_a_callback(slot: AsyncSlot) -> None:
    asyncio.get_running_loop().call_soon(slot.release_soon)


async def in_a_thread(slot: AsyncSlot) -> None:
    await asyncio.to_thread(slot.release_soon)


async def in_a_thread_with_a_loop(slot: AsyncSlot) -> None:
    await asyncio.to_thread(lambda: asyncio.run(call(slot)))


async def in_a_destructor(slot: AsyncSlot) -> None:
    class Kept:
        def __del__(self) -> None:
            slot.release_soon()

    await asyncio.to_thread(lambda kept: None, Kept())


WAYS: dict[str, Callable[[AsyncSlot], Awaitable[None]]] = {
    way.__name__: way
    for way in (
        in_this_task, in_another_task, in_a_task_that_is_cancelled, in_a_callback, in_a_thread,
        in_a_thread_with_a_loop, in_a_destructor,
    )
}  # fmt: skip
every_way = pytest.mark.parametrize("way", WAYS)


def of(store: Any, prefix: str, limit: int = 1) -> AsyncConcurrency:
    return AsyncConcurrency(store, limit, prefix=prefix, ttl=TTL)


async def until_waiting(slots: AsyncConcurrency, number: int) -> None:
    await until_async(lambda: slots._wait_queues.count(slots._new_claim("k").name) == number)


def started(program: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", program], cwd=ROOT, stdout=subprocess.PIPE, text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )  # fmt: skip


@pytest.fixture
def woken_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """Who waits in this process does not ask again by itself."""
    monkeypatch.setattr(slot_operations, "MIN_POLL_S", TTL)
    monkeypatch.setattr(slot_operations, "MAX_POLL_S", TTL)


@every_way
def test_it_frees_wherever_it_is_called(where: str, prefix: str, way: str) -> None:
    async def main() -> None:
        async with of(where, prefix) as slots:
            slot = await slots.try_hold("k")
            await WAYS[way](slot)
            await asyncio.sleep(0)
            assert not slot.held
            assert not slot.lost
            async with slots.hold("k", timeout=LONG_S) as other:
                assert other

    asyncio.run(main())


@every_way
def test_it_wakes_the_next_who_waits(where: str, prefix: str, way: str, woken_only: None) -> None:
    async def main() -> None:
        async with of(where, prefix) as slots:
            slot = await slots.try_hold("k")
            order: list[int] = []

            async def wait(number: int) -> None:
                async with slots.hold("k") as mine:
                    order.append(number)
                    mine.release_soon()

            waiting = []
            for number in range(3):
                waiting.append(asyncio.create_task(wait(number)))
                await until_waiting(slots, number + 1)
            await WAYS[way](slot)
            await asyncio.wait_for(asyncio.gather(*waiting), LONG_S)
            assert order == [0, 1, 2]

    asyncio.run(main())


@every_way
def test_it_frees_for_another_object(redis_url: str, prefix: str, way: str) -> None:
    async def main() -> None:
        async with of(redis_url, prefix) as slots, of(redis_url, prefix) as others:
            slot = await slots.try_hold("k")
            waiting = asyncio.create_task(others.hold("k").__aenter__())
            await until_waiting(others, 1)
            await WAYS[way](slot)
            await asyncio.wait_for(waiting, LONG_S)

    asyncio.run(main())


@pytest.mark.slow
@pytest.mark.parametrize("way", ["in_another_task", "in_a_thread"])
def test_it_frees_for_another_process(redis_url: str, prefix: str, way: str) -> None:
    program = f"""
from distwindow import Concurrency
with Concurrency({redis_url!r}, 1, prefix={prefix!r}, ttl={TTL}, timeout=10) as slots:
    print("asks", flush=True)
    with slots.hold("k", timeout={LONG_S}):
        print("holds", flush=True)
"""

    async def main() -> None:
        async with of(redis_url, prefix) as slots:
            slot = await slots.try_hold("k")
            other = started(program)
            assert other.stdout is not None
            assert await asyncio.to_thread(other.stdout.readline) == "asks\n"
            assert slot.held
            await WAYS[way](slot)
            assert await asyncio.to_thread(other.stdout.readline) == "holds\n"
            assert await asyncio.to_thread(other.wait, LONG_S) == 0
            other.stdout.close()

    asyncio.run(main())


@pytest.mark.parametrize("first", ["release", "release_soon", "the end of the block", "aclose"])
def test_a_slot_is_freed_once(where: str, prefix: str, first: str) -> None:
    """Whatever comes first, what comes later takes no slot from who holds one then."""
    key = fresh_key()

    async def main() -> None:
        slots, others = of(where, prefix), of(where, prefix)
        if where == "memory://":
            others = slots
        block = slots.hold(key)
        slot = await block.__aenter__()
        if first == "release":
            await slot.release()
        elif first == "release_soon":
            slot.release_soon()
        elif first == "aclose" and others is not slots:
            await slots.aclose()
        else:
            await block.__aexit__(None, None, None)
        async with others.hold(key, timeout=LONG_S) as other:
            slot.release_soon()
            await slot.release()
            slot.release_soon()
            if first in ("release", "release_soon"):
                await block.__aexit__(None, None, None)
            await others.flush()
            assert (await others.stats(key)).held == 1
            assert other.held
        await slots.aclose()
        await others.aclose()

    asyncio.run(main())


def test_a_slot_that_was_refused_has_nothing_to_free(where: str, prefix: str) -> None:
    async def main() -> None:
        async with of(where, prefix) as slots, slots.hold("k"):
            refused = await slots.try_hold("k")
            refused.release_soon()
            await slots.flush()
            assert (await slots.stats("k")).held == 1
            assert refused.refusal is not None

    asyncio.run(main())


def test_a_slot_that_is_lost_takes_none_from_who_holds_it_now(clock: ManualClock) -> None:
    async def main() -> None:
        slots = AsyncConcurrency(AsyncMemoryStore(MemoryStore(clock)), 1, ttl=30)
        slot = await slots.try_hold("k")
        clock.advance(30)
        assert slot.lost
        other = await slots.try_hold("k")
        slot.release_soon()
        await slots.flush()
        assert other.held
        assert slot.lost
        assert (await slots.stats("k")).held == 1
        await slots.aclose()

    asyncio.run(main())


def test_with_a_clock_of_the_caller_the_next_flush_frees(clock: ManualClock) -> None:
    """There is no worker then, as for all that a worker does."""

    async def main() -> None:
        slots = AsyncConcurrency(AsyncMemoryStore(MemoryStore(clock)), 1)
        slot = await slots.try_hold("k")
        slot.release_soon()
        assert (await slots.stats("k")).held == 1
        await slots.flush()
        assert (await slots.stats("k")).held == 0
        await slots.aclose()

    asyncio.run(main())


@pytest.mark.parametrize("when", ["the loop is closed", "the loop rests"])
@pytest.mark.parametrize("by", ["hold", "try_hold"])
def test_after_its_loop_has_ended_the_next_call_frees(
    redis_url: str, prefix: str, when: str, by: str
) -> None:
    slots = of(redis_url, prefix)

    async def first() -> AsyncSlot:
        return await slots.try_hold("k")

    async def second() -> None:
        for _ in range(2 if by == "try_hold" else 0):
            await slots.try_hold("k")
            await slots.flush()
        async with slots.hold("k", timeout=LONG_S) as slot:
            assert slot
        await slots.aclose()

    if when == "the loop is closed":
        slot = asyncio.run(first())
        slot.release_soon()
        assert not slot.held
        asyncio.run(second())
        return
    loop = asyncio.new_event_loop()
    slot = loop.run_until_complete(first())
    slot.release_soon()
    assert not slot.held
    loop.run_until_complete(second())
    loop.close()


@pytest.mark.slow
def test_where_its_loop_stops_before_the_worker_comes_who_waits_has_it_freed(
    redis_url: str, prefix: str
) -> None:
    """As a loop does between two calls of `run_sync`: it is not closed, and runs nothing."""
    slots = AsyncConcurrency(redis_url, 1, prefix=prefix, ttl=TTL, timeout=0.5)

    async def first() -> None:
        (await slots.try_hold("k")).release_soon()

    async def second() -> None:
        async with slots.hold("k", timeout=LONG_S) as slot:
            assert slot
        await slots.aclose()

    loop = asyncio.new_event_loop()
    try:
        loop.run_until_complete(first())
        thread = threading.Thread(target=asyncio.run, args=(second(),))
        thread.start()
        thread.join()
        with Concurrency(redis_url, 1, prefix=prefix) as others:
            assert others.stats("k").held == 0
    finally:
        for task in asyncio.all_tasks(loop):
            task.cancel()
        loop.run_until_complete(asyncio.sleep(0.05))
        loop.close()


@pytest.mark.slow
def test_after_its_loop_has_ended_the_end_of_the_process_frees(redis_url: str, prefix: str) -> None:
    program = f"""
import asyncio
from distwindow import AsyncConcurrency
slots = AsyncConcurrency({redis_url!r}, 1, prefix={prefix!r}, ttl={TTL}, timeout=10)
async def main():
    return await slots.try_hold("k")
slot = asyncio.run(main())
slot.release_soon()
print(bool(slot))
"""
    assert printed("-W", "error", "-c", program) == "False\n"
    with Concurrency(redis_url, 1, prefix=prefix) as slots:
        assert slots.stats("k").held == 0


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "fork"), reason="this platform does not fork")
def test_in_a_forked_child_it_leaves_the_slot_to_the_parent(redis_url: str, prefix: str) -> None:
    program = f"""
import asyncio, os
from distwindow import AsyncConcurrency, Concurrency
slots = AsyncConcurrency({redis_url!r}, 1, prefix={prefix!r}, ttl={TTL}, timeout=10)
async def main():
    slot = await slots.try_hold("k")
    child = os.fork()
    if not child:
        slot.release_soon()
        os._exit(0 if slot.lost else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    await slots.flush()
    print(slot.held, (await slots.stats("k")).held)
    await slots.aclose()
asyncio.run(main())
"""
    assert printed("-c", program) == "True 1\n"


@pytest.mark.slow
def test_while_the_store_is_away_it_does_not_raise_and_frees_later(
    proxy: Proxy, redis_url: str, prefix: str
) -> None:
    async def main() -> None:
        async with (
            AsyncConcurrency(proxy.url, 1, prefix=prefix, ttl=TTL, timeout=0.4) as slots,
            of(redis_url, prefix) as others,
        ):
            slot = await slots.try_hold("k")
            assert slot
            proxy.fault = Refuse()
            slot.release_soon()
            await asyncio.sleep(0.1)
            assert (await others.stats("k")).held == 1
            proxy.fault = Pass()
            async with others.hold("k", timeout=LONG_S) as other:
                assert other
            await until_async(lambda: not slots._held._claims, LONG_S, what="it is freed")

    asyncio.run(main())


@pytest.mark.slow
@pytest.mark.parametrize("limit", [1, 3])
def test_never_more_than_the_limit_are_held(where: str, prefix: str, limit: int) -> None:
    """Many tasks, which free their slots in any way, at any time, and some twice."""
    chance = random.Random(limit)
    inside: list[int] = []
    most: list[int] = []

    async def work(slots: AsyncConcurrency) -> None:
        for _ in range(10):
            block = slots.hold("k", timeout=LONG_S)
            slot = await block.__aenter__()
            inside.append(1)
            most.append(len(inside))
            await asyncio.sleep(chance.random() / 500)
            inside.pop()
            way = chance.choice([*WAYS.values()])
            await way(slot)
            if chance.random() < 0.3:
                await slot.release()

    async def main() -> None:
        async with of(where, prefix, limit) as slots:
            await asyncio.gather(*(work(slots) for _ in range(12)))
            assert max(most) <= limit
            await until_async(lambda: not slots._held._claims, LONG_S, what="all are freed")
            assert (await slots.stats("k")).held == 0

    asyncio.run(main())


def test_threads_that_free_at_once_wake_one_worker(redis_url: str, prefix: str) -> None:
    async def main() -> None:
        async with of(redis_url, prefix, 20) as slots:
            mine = [await slots.try_hold("k") for _ in range(20)]
            threads = [threading.Thread(target=slot.release_soon) for slot in mine]
            for thread in threads:
                thread.start()
            await until_async(lambda: not slots._held._claims, LONG_S, what="all are freed")
            for thread in threads:
                thread.join()
            assert (await slots.stats("k")).held == 0

    asyncio.run(main())
