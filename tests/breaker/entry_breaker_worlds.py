"""A limiter and a breaker of either world behind one awaited interface, for entries with both."""

from __future__ import annotations

import asyncio
from contextvars import Context
from typing import Any

import pytest

from distwindow import AsyncCircuitBreaker, AsyncLimiter, CircuitBreaker, ErrorCount, Limiter
from distwindow.stores.memory import MemoryStore
from distwindow.testing import ManualClock

KINDS = [False, True]
IN_BOTH_WORLDS = pytest.mark.parametrize("is_async", KINDS, ids=["threads", "tasks"])
ENDS = {None: "no end", True: "failure", False: "success"}


class World:
    """A limiter and a breaker of one of the two worlds, on one store, called in the same way."""

    def __init__(
        self, is_async: bool, rule: Any = None, limit: str = "5/minute", store: Any = None,
        clock: ManualClock | None = None, shared: Any = None, **options: Any,
    ) -> None:  # fmt: skip
        """`shared`: options of the limiter, too."""
        self.is_async = is_async
        self.clock = clock or ManualClock()
        self.store = store or MemoryStore(self.clock)
        shared = {"time": self.clock, **(shared or {})}
        make_limiter: Any = AsyncLimiter if is_async else Limiter
        make_breaker: Any = AsyncCircuitBreaker if is_async else CircuitBreaker
        self.limiter = make_limiter(self.store, limit, **shared)
        rule = rule or ErrorCount(1, open_for=5)
        self.breaker = make_breaker(self.store, rule, **shared, **options)
        self.ends: list[bool | None] = []
        """What the breaker was told of ends, in order."""
        record = self.breaker._states.record

        def note(admission: Any, failed: bool | None) -> Any:
            self.ends.append(failed)
            return record(admission, failed)

        self.breaker._states.record = note
        self.entry = self.new_entry()
        self.taken = 0
        """Permits that other calls have used."""

    def new_entry(self, **options: Any) -> Any:
        return self.limiter.entry("k", breaker=self.breaker, **options)

    async def enter(self, context: Any = None) -> str:
        """Return the name of what was raised; else an empty text. No call is inside another."""
        context = self.entry if context is None else context
        try:
            if self.is_async:
                await Context().run(asyncio.ensure_future, context.__aenter__())
            else:
                Context().run(context.__enter__)
        except Exception as exc:
            return type(exc).__name__
        return ""

    async def leave(self, exc: BaseException | None = None, context: Any = None) -> str:
        context = self.entry if context is None else context
        how = (None, None, None) if exc is None else (type(exc), exc, exc.__traceback__)
        try:
            if self.is_async:
                await context.__aexit__(*how)
            else:
                context.__exit__(*how)
        except Exception as raised:
            return type(raised).__name__
        return "" if exc is None else type(exc).__name__

    async def leave_elsewhere(self) -> str:
        return await asyncio.to_thread(lambda: asyncio.run(self.leave()))

    async def open(self) -> None:
        """Have the breaker open."""
        call = self.breaker.call("k")
        await self.enter(call)
        await self.leave(OSError(), call)
        self.ends.clear()

    async def close(self) -> None:
        for each in (self.limiter, self.breaker):
            await self.result_of(each.aclose() if self.is_async else each.close())

    async def result_of(self, found: Any) -> Any:
        """Return what a call has returned, awaited in a task."""
        return await found if self.is_async else found

    def use_up(self) -> None:
        """Take all permits."""
        Limiter(self.store, "5/minute", time=self.clock).try_acquire("k", 5)
        self.taken = 5

    def summary(self, state: str, raised: str) -> str:
        """Return the third column of the table: what has come of the entry."""
        stats = Limiter(self.store, "5/minute", time=self.clock).stats("k")
        passed = stats.passed - self.taken
        counted = [f"{passed} permit" if passed == 1 else f"{passed} permits"]
        ended = {"success": stats.success, "error": stats.error}
        counted += [f"{number} {name}" for name, number in ended.items() if number]
        assert len(self.ends) <= 1, "an end is counted once"
        told = ENDS[self.ends[0]] if self.ends else "nothing"
        head = f"{state}, {raised}" if raised else state
        return f"{head}; {', '.join(counted)}; breaker: {told}"
