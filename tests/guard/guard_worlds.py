"""Guards of both worlds behind one awaited interface, on a store that a test can look into."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager
from typing import Any

from distwindow import AsyncGuard, ChainSlot, Concurrency, Guard, GuardCall, Limiter, Outcome, Stats
from distwindow.sentinel.rules import Rule
from distwindow.stores.memory import MemoryStore
from distwindow.testing import ManualClock

WORLDS = [Guard, AsyncGuard]


@asynccontextmanager
async def entered(entry: Any) -> AsyncIterator[Any]:
    """Enter an entry of either world, and leave it."""
    if hasattr(entry, "__aenter__"):
        async with entry:
            yield entry
    else:
        with entry:
            yield entry


class World:
    """A guard, its clock and its store."""

    def __init__(
        self, kind: Any, rules: Iterable[Rule], store: Any = None, time: Any = None, **options: Any
    ) -> None:
        self.clock: ManualClock = time or ManualClock()
        self.store = store or MemoryStore(self.clock)
        self.guard = kind(self.store, rules, time=self.clock, **options)

    async def call(
        self, resource: str = "r", body: Callable[[], object] = lambda: None, **arguments: Any
    ) -> None:
        """Go through one entry."""
        async with entered(self.guard.entry(resource, **arguments)):
            body()

    async def outcome(self, *args: Any, **arguments: Any) -> str:
        """Return the name of what an entry raised, or "passed"."""
        try:
            await self.call(*args, **arguments)
        except Exception as exc:
            return type(exc).__name__
        return "passed"

    async def flush(self) -> None:
        """Do what the worker does, which a guard with a clock of its own has none of."""
        flushed = self.guard.flush()
        if isinstance(self.guard, AsyncGuard):
            await flushed

    def stats(self, key: str = "r", limit: str = "10/second") -> Stats:
        """Return what the ring of `key` has counted."""
        return Limiter(self.store, limit, time=self.clock).stats(key)

    def held(self, key: str = "r") -> int:
        """Return how many slots of `key` are held."""
        return Concurrency(self.store, 1, time=self.clock).stats(key).held


class Recorder(ChainSlot):
    """A slot that notes what it is told, and raises `refusal` if that is set."""

    def __init__(self, order: int = 500) -> None:
        self.order = order
        self.refusal: BaseException | None = None
        self.told: list[Outcome] = []
        self.entered: list[str] = []

    def enter(self, call: GuardCall) -> str:
        if self.refusal is not None:
            raise self.refusal
        self.entered.append(call.resource)
        return "token"

    def exit(self, call: GuardCall, token: Any, outcome: Outcome) -> None:
        assert token == "token"
        self.told.append(outcome)


def fail(error: BaseException) -> Callable[[], object]:
    """Return a body that raises `error`."""

    def body() -> object:
        raise error

    return body
