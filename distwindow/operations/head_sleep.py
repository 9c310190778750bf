"""The sleep of a waiter before it asks, which ends when its permits may be there earlier: a reset
or a refund by this process gives permits of the key back.

Only the head of a queue is woken. Whoever has left its queue has been admitted, and sleeps until
it may proceed. A clock that is not the system's has a sleep of its own, which nothing can end; it
is skipped if permits were given back before it began.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from ..core.clock import SYSTEM, Clock
from .wait_queue import AsyncQueueSlot, QueueSlot


class HeadSleep:
    """Sleeps of one waiter in a thread."""

    def __init__(self, slot: QueueSlot, clock: Clock, sleep: Callable[[float], object]) -> None:
        """`sleep`: that of `clock`, which is the store's."""
        self._slot, self._clock, self._sleep = slot, clock, sleep

    def __call__(self, seconds: float) -> object:
        """Sleep for `seconds`, or until permits are given back. Return what the clock's `sleep` has
        returned, for `run_blocking` to check.
        """
        slot, clock = self._slot, self._clock
        if clock is not SYSTEM:
            return None if slot.take_freed() else self._sleep(seconds)
        until = clock.monotonic() + seconds
        while not slot.take_freed() and (left := until - clock.monotonic()) > 0:
            slot.sleep(left)
        return None


class AsyncHeadSleep:
    """Sleeps of one waiter in a task."""

    def __init__(
        self, slot: AsyncQueueSlot, clock: Clock, sleep: Callable[[float], Awaitable[object]]
    ) -> None:
        """`sleep`: that of `clock`, which is the store's."""
        self._slot, self._clock, self._sleep = slot, clock, sleep

    async def __call__(self, seconds: float) -> None:
        """Do as `HeadSleep`."""
        slot, clock = self._slot, self._clock
        if clock is not SYSTEM:
            if not slot.take_freed():
                await self._sleep(seconds)
            return
        until = clock.monotonic() + seconds
        while not slot.take_freed() and (left := until - clock.monotonic()) > 0:
            await slot.sleep_async(left)
