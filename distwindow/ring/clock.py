"""The clocks. No other module reads the time by itself, except for the commands in `cli/`: the
others are given a `Clock` or the time, or use `SYSTEM`.
"""

from __future__ import annotations

import inspect
import time
from collections.abc import Callable
from functools import partial
from typing import Any, Protocol, runtime_checkable

from ..errors import ConfigurationError, short_repr

NEVER = float("inf")


class Clock(Protocol):
    """The clocks of a limiter. Tests pass one that they set themselves."""

    def now_ms(self) -> int:
        """Return the wall-clock time, ms since the epoch."""

    def monotonic(self) -> float:
        """Return seconds since an arbitrary moment; never less than before."""

    def sleep(self, seconds: float, /) -> None:
        """Return after `seconds` have passed."""


@runtime_checkable
class AsyncClock(Clock, Protocol):
    """A clock that tasks can sleep on as well."""

    async def sleep_async(self, seconds: float, /) -> None:
        """Sleep for `seconds` in this task; other tasks run meanwhile."""


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
    # Looked up each time, as gevent may patch it later.
    sleep = staticmethod(lambda seconds: time.sleep(seconds))

    def __repr__(self) -> str:
        return "SystemClock()"


SYSTEM: Clock = SystemClock()


def check_clock(clock: Any) -> Clock:
    """Return `clock`. Raises `ConfigurationError` for what is not a `Clock`."""
    if inspect.isclass(clock):
        raise ConfigurationError(f"time={clock.__qualname__} is a class; make an object of it")
    methods = ("now_ms", "monotonic", "sleep")
    missing = [name for name in methods if not callable(getattr(clock, name, None))]
    if missing:
        raise ConfigurationError(
            f"time={short_repr(clock)} is no clock, as it has no "
            f"{', '.join(f'{m}()' for m in missing)}; give an object with now_ms(), "
            "monotonic() and sleep(seconds), or leave time out"
        )
    for name in methods:
        method = getattr(clock, name)
        forms = (method, inspect.getattr_static(type(method), "__call__", None))
        if any(inspect.iscoroutinefunction(form) for form in forms):
            raise ConfigurationError(
                f"time={short_repr(clock)}: its {name} is a coroutine function, which neither "
                f"Limiter nor AsyncLimiter awaits; write it as a plain function: def {name}"
            )
    return clock  # type: ignore[no-any-return]  # it has the methods of a Clock
