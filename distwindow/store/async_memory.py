"""A `MemoryStore` for tasks."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from ..core.clock import SYSTEM, AsyncClock
from ..core.decision import Decision, Source
from ..protocol.commands import Acquire
from ..protocol.frames import Command
from .memory import MemoryStore

Reply = TypeVar("Reply")


class AsyncMemoryStore:
    """A `MemoryStore` for tasks."""

    source: Source = "local"

    def __init__(self, store: MemoryStore) -> None:
        self.clock = store.clock
        self.unknown_total = 0
        self.memory = self._store = store
        self.decide = store.attempt
        """As `attempt`, for callers that need not await it."""

    async def attempt(self, command: Acquire, deadline: float | None = None) -> Decision:
        return self._store.attempt(command)

    async def execute(
        self,
        command: Command[Reply],
        deadline: float | None = None,
        on_late_reply: Callable[[Reply], object] | None = None,
    ) -> Reply:
        return self._store.execute(command)

    async def exchange(
        self, commands: Sequence[Command[Any]], deadline: float | None = None
    ) -> list[Any]:
        return self._store.exchange(commands)

    async def drain(self) -> None: ...

    async def sleep(self, seconds: float) -> None:
        if self.clock is SYSTEM:
            await asyncio.sleep(seconds)
        elif isinstance(self.clock, AsyncClock):
            await self.clock.sleep_async(seconds)
        else:
            self.clock.sleep(seconds)
            await asyncio.sleep(0)

    async def aclose(self) -> None:
        """Calls after this raise `ConfigurationError`."""
        self._store.close()
