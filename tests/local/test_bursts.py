"""The tasks of a burst on one key share a lease for all of them, however many they are."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from distwindow import AsyncLimiter
from distwindow.ring.command import Command
from distwindow.stores.memory import AsyncMemoryStore, MemoryStore
from tests.away.stores import AsyncRemoteStore
from tests.clock_and_stores import ManualClock


class SlowStore(AsyncRemoteStore):
    """Answers after all other tasks have run, which takes them some time."""

    def __init__(self, store: MemoryStore) -> None:
        super().__init__(store)
        self.calls = 0
        self._manual_clock: Any = store.clock

    async def execute(self, command: Command[Any], *arguments: Any, **options: Any) -> Any:
        self.calls += 1
        for _ in range(3):
            await asyncio.sleep(0)
        self._manual_clock.advance(0.02)
        return await super().execute(command)

    async def decide(self, command: Any, deadline: float | None = None) -> Any:
        await asyncio.sleep(0)
        return await AsyncMemoryStore.decide(self, command)


@pytest.mark.parametrize("tasks", [250, 1000, 4000])
def test_a_burst_of_tasks_fetches_few_leases(tasks: int) -> None:
    async def burst() -> None:
        clock = ManualClock(auto_advance=False)
        store = SlowStore(MemoryStore(clock))
        limiter = AsyncLimiter(
            store, f"{tasks * 3}/minute", time=clock, consistency="leased", timeout=30
        )
        found = await asyncio.gather(*(limiter.try_acquire("k") for _ in range(tasks)))
        assert all(found)
        assert store.calls == 2
        await limiter.aclose()

    asyncio.run(burst())
