"""The only room that reads a clock. Everything else is told the time."""

from __future__ import annotations

import inspect
import time
from collections.abc import Callable
from functools import partial
from typing import Any, Protocol, runtime_checkable

from .errors import ConfigurationError, short_repr


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


def check_clock(clock: Any) -> Clock:
    """`clock` itself; `ConfigurationError` for what cannot tell the time as a `Clock` does."""
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
    return clock  # type: ignore[no-any-return]
