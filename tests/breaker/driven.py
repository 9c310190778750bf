"""Breakers of both worlds as processes of a fleet, called in the same way."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from contextvars import Context
from typing import Any

import pytest

from distwindow import AsyncCircuitBreaker, BreakerOpen, CircuitBreaker
from distwindow.stores.memory import MemoryStore
from tests.clock_and_stores import ManualClock

IN_BOTH_WORLDS = pytest.mark.parametrize("is_async", [False, True], ids=["threads", "tasks"])
ON_ALL_STORES = pytest.mark.parametrize("store", ["memory", "redis"])


def fail(breaker: CircuitBreaker, times: int = 1, key: Any = "k") -> None:
    """Make so many calls that fail."""
    for _ in range(times):
        with suppress(OSError), breaker.call(key):
            raise OSError


class Driven:
    """One process. Its time, also on a server, is that of the test, which does what the worker
    does: `flush`.
    """

    def __init__(self, is_async: bool, where: Any, rule: Any, time: Any, **options: Any) -> None:
        kind: Any = AsyncCircuitBreaker if is_async else CircuitBreaker
        self._loop = asyncio.new_event_loop() if is_async else None
        self.breaker = kind(where, rule, time=time, clock="client", **options)
        self.heard: list[str] = []
        self.breaker.on_change(lambda change: self.heard.append(change.state))

    def _run(self, found: Any) -> Any:
        if self._loop is not None and inspect.isawaitable(found):
            return Context().run(self._loop.run_until_complete, found)
        return found

    def begin(self) -> Any:
        """Return a call that was let through; None if it was refused."""
        call = self.breaker.call("k")
        enter = call.__enter__ if self._loop is None else call.__aenter__
        try:
            self._run(Context().run(enter))  # no call is inside the probe of another
        except BreakerOpen:
            return None
        return call

    def end(self, call: Any, failed: bool = False) -> None:
        exc = (OSError, OSError(), None) if failed else (None, None, None)
        self._run(call.__exit__(*exc) if self._loop is None else call.__aexit__(*exc))

    def call(self, failed: bool = False) -> bool:
        """Make a call. Return False if it was refused."""
        call = self.begin()
        if call is not None:
            self.end(call, failed)
        return call is not None

    def state(self) -> str:
        found: str = self._run(self.breaker.state("k"))
        return found

    def open(self, key: Any = "k") -> None:
        self._run(self.breaker.open(key))

    def close(self, key: Any = "k") -> None:
        self._run(self.breaker.close(key))

    def flush(self) -> None:
        self._run(self.breaker.flush())

    def end_process(self) -> None:
        if self._loop is None:
            self.breaker.close()
        else:
            self._run(self.breaker.aclose())
            self._loop.close()


@contextmanager
def driven(
    number: int, is_async: bool, store: str, rule: Any, redis_url: str, prefix: str, **options: Any
) -> Iterator[tuple[ManualClock, list[Driven]]]:
    """Yield a clock, and so many processes on one store: one in this process, or a server."""
    clock = ManualClock()
    where = MemoryStore(clock) if store == "memory" else redis_url
    options = {"prefix": prefix, "timeout": 10.0, **options}
    processes = [Driven(is_async, where, rule, clock, **options) for _ in range(number)]
    try:
        yield clock, processes
    finally:
        for process in processes:
            process.end_process()
