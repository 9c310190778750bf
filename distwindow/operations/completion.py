"""Something that others wait for, threads and tasks alike: it opens once."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from ..core.errors import StoreError
from ..core.interrupts import OneShotEvent


class Completion:
    """Closed until `open`. `failure` says why there is nothing behind it."""

    __slots__ = ("_done", "_waiters", "failure")

    def __init__(self) -> None:
        self.failure: StoreError | None = None
        self._done = OneShotEvent()
        self._waiters: list[Callable[[], object]] = []

    @property
    def is_complete(self) -> bool:
        """Is it open?"""
        return self._done.is_set

    def complete(self, failure: StoreError | None = None) -> None:
        """Let everybody through. Harmless when repeated."""
        self.failure = failure
        self._done.set()
        while self._waiters:
            self._waiters.pop()()

    def wait(self, seconds: float) -> None:
        """Until it is open, or `seconds` have passed."""
        self._done.wait(seconds)

    async def wait_async(self, seconds: float) -> None:
        """`wait` for tasks."""
        loop = asyncio.get_running_loop()
        passed = asyncio.Event()

        def opened() -> None:
            if not loop.is_closed():
                loop.call_soon_threadsafe(passed.set)

        self._waiters.append(opened)
        if self._done.is_set:  # just now, and may not have seen us
            return
        try:
            await asyncio.wait_for(passed.wait(), seconds)
        except asyncio.TimeoutError:
            return
