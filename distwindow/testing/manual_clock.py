"""A clock for tests: time passes only when the test, or a call that sleeps, moves it."""

from __future__ import annotations

import asyncio
import heapq
import itertools
import threading
from collections.abc import Callable

_TICKS = 100
"""Ticks of the event loop in which the tasks that `advance_async` has woken can run."""


class ManualClock:
    """`Limiter(..., time=clock)`, `AsyncLimiter(..., time=clock)`: time as the test moves it.

    With `auto_advance` a sleep moves the clock by itself and returns at once, so a test of one
    thread or one task can call `acquire` and does not wait. Without it, sleeping threads and tasks
    wait until `advance` has moved the clock to the end of their sleep.

    Works with `memory://`, which has no other clock. A limiter with a manual clock has no
    background worker: call `flush()` where a test needs it. Safe to share between threads.
    """

    def __init__(self, now_ms: int = 1_700_000_040_000, *, auto_advance: bool = True) -> None:
        """`now_ms`: the first wall-clock time, ms since the epoch; by default a minute's start."""
        self.auto_advance = auto_advance
        self.slept: list[float] = []
        """Every sleep that has begun, in seconds."""
        self._start_ms = now_ms
        self._elapsed_ns = 0
        self._lock = threading.Lock()
        self._numbers = itertools.count()
        self._sleepers: list[tuple[int, int, Callable[[], object]]] = []
        """A heap: end of the sleep (elapsed ns), order of arrival, and what wakes the sleeper."""

    def now_ms(self) -> int:
        """Return the wall-clock time, ms since the epoch."""
        return self._start_ms + self._elapsed_ns // 1_000_000

    def monotonic(self) -> float:
        """Return seconds since an arbitrary moment; never less than before."""
        # Far above 0, because the code under test may use 0 for "never".
        return 1_000_000.0 + self._elapsed_ns / 1e9

    def sleep(self, seconds: float, /) -> None:
        """Move the clock by `seconds`; without `auto_advance`, wait until it has been moved."""
        if self.auto_advance:
            self.slept.append(seconds)
            self.advance(max(0.0, seconds))
            return
        woken = threading.Event()
        self._add_sleeper(seconds, woken.set)
        woken.wait()

    async def sleep_async(self, seconds: float, /) -> None:
        """`sleep` for tasks."""
        if self.auto_advance:
            self.slept.append(seconds)
            self.advance(max(0.0, seconds))
            await asyncio.sleep(0)
            return
        loop = asyncio.get_running_loop()
        woken = asyncio.Event()

        def wake() -> None:
            if not loop.is_closed():
                loop.call_soon_threadsafe(woken.set)

        self._add_sleeper(seconds, wake)
        await woken.wait()

    def advance(self, seconds: float) -> None:
        """Move the clock forward, and wake the sleepers whose time has come, the earliest first.

        All of them find the clock at its new time. Raises `ValueError` below 0: a clock that is set
        back would move `monotonic`, too.
        """
        if not seconds >= 0:
            raise ValueError(f"advance({seconds!r}): the clock moves forward only, in seconds")
        with self._lock:
            self._elapsed_ns += round(seconds * 1e9)
            due = []
            while self._sleepers and self._sleepers[0][0] <= self._elapsed_ns:
                due.append(heapq.heappop(self._sleepers)[2])
        for wake in due:
            wake()

    async def advance_async(self, seconds: float) -> None:
        """`advance` for tests of tasks: stops the clock at the end of each sleep on the way, and
        lets the tasks of this event loop run there, until they sleep again or have ended. Does not
        wait for tasks that wait for a socket or a thread. Raises `ValueError` below 0.
        """
        if not seconds >= 0:
            raise ValueError(f"advance_async({seconds!r}): the clock moves forward only")
        ends_at = self._elapsed_ns + round(seconds * 1e9)
        await _run_tasks()  # tasks that were just created begin their sleep now
        while self._elapsed_ns < ends_at:
            with self._lock:
                stop = min([ends_at, *(at for at, _, _ in self._sleepers[:1])])
            self.advance((stop - self._elapsed_ns) / 1e9)
            await _run_tasks()

    def _add_sleeper(self, seconds: float, wake: Callable[[], object]) -> None:
        with self._lock:
            until = self._elapsed_ns + round(seconds * 1e9)
            # Both under the lock: a test that sees the sleep in `slept` may advance the clock.
            heapq.heappush(self._sleepers, (until, next(self._numbers), wake))
            self.slept.append(seconds)
        self.advance(0)  # wakes it at once where there is nothing to wait for


async def _run_tasks() -> None:
    for _ in range(_TICKS):
        await asyncio.sleep(0)
