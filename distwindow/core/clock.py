"""The only module that reads a clock. All other modules get the time as an argument."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import Protocol


class Clock(Protocol):
    """The clocks of a limiter. Tests pass one that they set themselves."""

    def now_ms(self) -> int:
        """Return the wall-clock time, ms since the epoch."""
        ...

    def monotonic(self) -> float:
        """Return seconds since an arbitrary moment; never less than before."""
        ...

    def sleep(self, seconds: float, /) -> None:
        """Return after `seconds` have passed."""
        ...


def _monotonic() -> Callable[[], float]:
    """Return a monotonic clock that includes the time for which the machine was suspended, because
    a lease or a deadline must not last longer by it. Only Linux has one (CLOCK_BOOTTIME); elsewhere
    return `time.monotonic`, which may stop during a suspension.
    """
    try:
        clock = partial(time.clock_gettime, time.CLOCK_BOOTTIME)
        clock()
    except (AttributeError, OSError):
        return time.monotonic
    return clock


class SystemClock:
    """The clocks of the machine."""

    now_ms = staticmethod(lambda: time.time_ns() // 1_000_000)
    monotonic = staticmethod(_monotonic())
    sleep = staticmethod(time.sleep)


SYSTEM: Clock = SystemClock()
