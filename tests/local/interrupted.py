"""Exceptions that a signal handler raises during a call, and demand for which the next call fetches
a lease.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

from distwindow.local.leases import Demand

PLENTY = "1000000/day"
SCRIPT = b"EVALSHA"


@contextmanager
def raised_after(seconds: float, exception: BaseException) -> Iterator[None]:
    def handle(number: int, frame: FrameType | None) -> None:
        raise exception

    before = signal.signal(signal.SIGALRM, handle)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def key_state(limiter: Any) -> Any:
    """Return the state of "k" in a leased limiter, made now if its calls were too few for one."""
    command = limiter.decider.commands.acquire_command("k")
    return limiter.decider.strategy._state_or_new(command)


def without_a_lease(limiter: Any) -> Any:
    """Have the next call fetch a lease. Return the state of "k", which holds no permits now."""
    state = key_state(limiter)
    limiter.decider.strategy._refunds.queue_unspent(state)
    state.demand = HighDemand(time.monotonic())
    return state


class HighDemand(Demand):
    """Estimates a constant high demand, so that the next call fetches a lease on slow machines,
    too.
    """

    def permits_needed(self, now: float, seconds: float) -> int:
        return 50


def subclass(kind: type[BaseException]) -> BaseException:
    """Return an exception of the application, whose base class the library may catch for its own
    reasons.
    """
    made: type[BaseException] = type("SoftTimeLimitExceeded", (kind,), {})
    return made("too slow")
