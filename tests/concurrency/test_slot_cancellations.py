"""Cancellations at every `await` of a call for a slot: each arrives, and no slot stays held."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from distwindow import AsyncConcurrency
from distwindow.ring.command import Command
from distwindow.stores.memory import AsyncMemoryStore, MemoryStore
from tests.clock_and_stores import ManualClock


class Slow(AsyncMemoryStore):
    """A store that takes some ticks of the event loop to execute a command, and some more to reply.
    It executes what was sent even if the caller is cancelled. A hold takes longer than a free, as
    on a connection that has become slow.
    """

    def __init__(self, store: MemoryStore) -> None:
        super().__init__(store)
        self.executing: set[asyncio.Task[Any]] = set()

    async def execute(self, command: Command[Any], *rest: Any) -> Any:
        task = asyncio.create_task(self._execute(command))
        self.executing.add(task)
        reply = await asyncio.shield(task)
        for _ in range(3):
            await asyncio.sleep(0)
        return reply

    async def _execute(self, command: Command[Any]) -> Any:
        for _ in range(9 if command.script == "hold" else 2):
            await asyncio.sleep(0)
        return await super().execute(command)


@pytest.mark.event_loops
@pytest.mark.parametrize("busy", [0, 2])
def test_a_slot_is_freed_at_whatever_await_its_task_is_cancelled(busy: int) -> None:
    """`busy`: slots that are held by others until the task has been cancelled or has ended."""

    async def use(slots: AsyncConcurrency) -> None:
        async with slots.hold("k") as slot:
            assert slot
            await asyncio.sleep(0)
        async with await slots.try_hold("k"):
            await asyncio.sleep(0)

    async def cancelled_after(ticks: int) -> bool:
        clock = ManualClock()
        store = Slow(MemoryStore(clock))
        slots = AsyncConcurrency(store, 2, timeout=0.5)
        others = [await slots.try_hold("k") for _ in range(busy)]
        task = asyncio.create_task(use(slots))
        for _ in range(ticks):
            await asyncio.sleep(0)
        cancelled = task.cancel()
        await asyncio.wait([task])
        for other in others:
            await other.release()
        await slots.flush()
        await asyncio.gather(*store.executing)
        clock.advance(0.5)  # until here the server may execute the hold of a cancelled task
        await slots.flush()
        stats = await slots.stats("k")
        assert (stats.held, stats.waiting) == (0, 0), ticks
        assert slots._held._claims == {}, ticks
        await slots.aclose()
        return cancelled

    async def main() -> int:
        ticks = 0
        while await cancelled_after(ticks) and ticks < 200:
            ticks += 1
        return ticks

    ticks = asyncio.run(main())
    assert ticks > 20
    assert (ticks == 200) == bool(busy), "with all slots held, the task waits for ever"
