"""The end of something that threads and tasks wait for."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from ..core.errors import StoreError
from ..core.interrupts import OneShotEvent


class Completion:
    """Completed once. Waits that begin after that return at once."""

    __slots__ = ("_done", "_waiters", "failure")

    def __init__(self) -> None:
        self.failure: StoreError | None = None
        """Why there is no result; None if there is one."""
        self._done = OneShotEvent()
        self._waiters: list[Callable[[], object]] = []
        """One function for each waiting task, which wakes it."""

    @property
    def is_complete(self) -> bool:
        """True after `complete`."""
        return self._done.is_set

    def complete(self, failure: StoreError | None = None) -> None:
        """Wake all that wait. Idempotent."""
        self.failure = failure
        self._done.set()
        while self._waiters:
            self._waiters.pop()()

    def wait(self, seconds: float) -> None:
        """Wait until it is complete, for `seconds` at most."""
        self._done.wait(seconds)

    async def wait_async(self, seconds: float) -> None:
        """Do as `wait`, for tasks."""
        loop = asyncio.get_running_loop()
        completed = asyncio.Event()

        def wake() -> None:
            if not loop.is_closed():
                loop.call_soon_threadsafe(completed.set)

        self._waiters.append(wake)
        if self._done.is_set:  # after the append, as `complete` may have emptied the list before it
            return
        try:
            await asyncio.wait_for(completed.wait(), seconds)
        except asyncio.TimeoutError:
            return
