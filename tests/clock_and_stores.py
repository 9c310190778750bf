"""What many tests use: a clock that tests move, and every store as one function `execute`."""

from __future__ import annotations

import asyncio
import itertools
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

from distwindow import Limiter, testing
from distwindow.lifecycle.connect import open_async_store, open_store
from distwindow.ring.command import Command
from distwindow.runtime.options import Options
from distwindow.stores.memory import MemoryStore

Reply = TypeVar("Reply")
Execute = Callable[[Command[Any]], Any]

T0 = 1_700_000_040_000
"""The time at which tests begin, ms: the start of a minute, but not of every bucket."""

_names = itertools.count()


def fresh_key(word: str = "key") -> str:
    """Return a key that no other test or example has used, as servers are shared and never
    emptied.
    """
    return f"{word}-{uuid.uuid4().hex[:8]}-{next(_names)}"


class ManualClock(testing.ManualClock):
    """The public `ManualClock`, which can be moved by ms, and backwards, too."""

    def __init__(self, now_ms: int = T0, *, auto_advance: bool = True) -> None:
        super().__init__(now_ms, auto_advance=auto_advance)

    def move(self, ms: int) -> None:
        if ms >= 0:
            self.advance(ms / 1000)
        else:
            self._start_ms += ms


@contextmanager
def memory() -> Iterator[Execute]:
    yield MemoryStore(ManualClock()).execute


@contextmanager
def blocking(where: Any) -> Iterator[Execute]:
    """Yield `execute` of the blocking store of a URL or a client. Each command has its own time."""
    store = open_store(where, Options(clock="client", timeout=30))
    yield store.execute
    store.close()


@contextmanager
def awaiting(where: Any) -> Iterator[Execute]:
    """Yield `execute` of the asyncio store of a URL or a client, in a loop of its own. Close the
    client, too.
    """
    loop = asyncio.new_event_loop()
    store = open_async_store(where, Options(clock="client", timeout=30))

    def execute(command: Command[Reply]) -> Reply:
        return loop.run_until_complete(store.execute(command))

    async def close() -> None:
        await store.aclose()
        if not isinstance(where, str):
            await where.aclose()

    yield execute
    loop.run_until_complete(close())
    loop.close()


class Awaited:
    """A blocking limiter whose methods are coroutine functions."""

    def __init__(self, limiter: Limiter) -> None:
        self._limiter = limiter

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._limiter, name)

        async def call(*args: Any, **options: Any) -> Any:
            return method(*args, **options)

        return call
