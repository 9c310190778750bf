"""The only room that reads a clock. Everything else is told the time."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import Protocol, runtime_checkable


class Clock(Protocol):
    """Time as a limiter needs it; tests hand in one they move by hand."""

    def now_ms(self) -> int:
        """Wall-clock ms since the epoch."""
        ...

    def monotonic(self) -> float:
        """Seconds, never going back, of arbitrary origin."""
        ...

    def sleep(self, seconds: float, /) -> None:
        """Let `seconds` pass."""
        ...


@runtime_checkable
class AsyncClock(Clock, Protocol):
    """A clock that tasks can sleep on as well."""

    async def sleep_async(self, seconds: float, /) -> None:
        """Let `seconds` pass for this task; other tasks run meanwhile."""
        ...


def _monotonic() -> Callable[[], float]:
    """Linux's clock that goes on while the machine is suspended: a lease or a deadline must not
    outlive that. Elsewhere `time.monotonic`, which may stand still.
    """
    try:
        clock = partial(time.clock_gettime, time.CLOCK_BOOTTIME)
        clock()
    except (AttributeError, OSError):
        return time.monotonic
    return clock


class SystemClock:
    """The machine's clocks."""

    now_ms = staticmethod(lambda: time.time_ns() // 1_000_000)
    monotonic = staticmethod(_monotonic())
    sleep = staticmethod(time.sleep)


SYSTEM: Clock = SystemClock()
