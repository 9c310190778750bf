"""Whether a task may start now, and otherwise when to ask again. Shared by the integrations with
task queues; `TaskGate` is for workers of threads and processes, `AsyncTaskGate` for those of tasks.

    the limiter says      on_store_error   the task
    admitted                               starts
    refused                                waits for its turn
    it fails              "hold"           waits for a second, as all other tasks do
    it fails              "run"            starts, and was not counted
    it refuses this key   either           waits for a second; a mistake opens no limit, and does
                                           not concern the tasks of other keys

All calls that are refused at once would be told the same time, and come back together. So a
refused call takes a place in the virtual line of its limit (`operations/turns.py`), in the same
script call, and its delay ends at its *turn*. That is a hint: who comes back asks like everyone
else.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Generic, Literal, TypeVar, get_args

from .. import (
    AsyncLimiter,
    ConfigurationError,
    Decision,
    Limit,
    Limiter,
    RateLimitExceeded,
    StoreError,
)
from ..core.clock import SYSTEM, AsyncClock, Clock
from ..core.errors import short_repr
from ..core.key import AnyKey
from ..core.limit import LimitSpec
from .failure_log import FailureLog
from .task_limits import TaskLimits

OnStoreError = Literal["hold", "run"]

HOLD_S = 1.0
"""How long tasks are held after the limiter failed, before it is asked again."""
_LOG_EVERY_S = 60.0
"""How often a kind of failure of single keys is logged."""
MAX_DELAY_S = 86_400.0
"""The longest delay: dramatiq takes less than a week, and a turn may be months away."""
MIN_DELAY_S = 0.001
"""The least delay of a refused call: its permits may be free by now, but were not taken."""
BROKER_RETRY_S = 1.0
"""How long to wait where the broker of a queue did not take a task back."""

_log = logging.getLogger("distwindow")
L = TypeVar("L", Limiter, AsyncLimiter)
T = TypeVar("T", bound="TaskLimits | None")


class _Gate(Generic[L]):
    """What both gates share: their limiters, and what follows when one fails.

    `timeout` (seconds) bounds one exchange with the store.
    """

    def __init__(
        self,
        make: Callable[..., L],
        store: Any,
        prefix: str,
        on_store_error: OnStoreError,
        timeout: float,
        time: Clock,
    ) -> None:
        if on_store_error not in get_args(OnStoreError):
            raise ConfigurationError(
                f'on_store_error={on_store_error!r} is neither "hold" nor "run"'
            )
        if isinstance(timeout, bool) or not isinstance(timeout, (int, float)) or not timeout > 0:
            raise ConfigurationError(f"timeout={timeout!r} is not a number of seconds above 0")
        self._make: Callable[[LimitSpec], L] = lambda limits: make(
            store, limits, prefix=prefix, timeout=timeout, time=time
        )
        self._on_store_error = on_store_error
        self._time = time
        self._limiters: dict[tuple[Limit, ...], L] = {}
        self._held_until: float | None = None
        """Until when the limiter is not asked, because it failed (monotonic); None: it works."""
        self._failure_log = FailureLog(_LOG_EVERY_S, time.monotonic)

    def add(self, task: T) -> T:
        """Make the limiters of `task`, and return it. Nothing is connected to.

        Raises `ConfigurationError` for a store or a prefix that can never work.
        """
        if task is not None and task.limits not in self._limiters:
            self._limiters[task.limits] = self._make(task.limits)
        return task

    def _hold_left(self) -> float:
        """Return for how many seconds the limiter is not asked."""
        return 0.0 if self._held_until is None else self._held_until - self._time.monotonic()

    def _unasked(self) -> float:
        """Return the delay of a task while the limiter is not asked: 0.0 to start it."""
        return 0.0 if self._on_store_error == "run" else max(self._hold_left(), MIN_DELAY_S)

    def _failed(self, task: TaskLimits, key: AnyKey, exc: Exception) -> float:
        """Return the delay of a task after the limiter raised `exc`: 0.0 to start it."""
        if not isinstance(exc, StoreError):
            self._works()  # whoever refuses a key answers
            unlogged = self._failure_log.unlogged_before((task.name, type(exc).__name__))
            if unlogged is not None:
                _log.error(
                    "the limit key %s of task %r cannot be asked for (%s: %s); its tasks are "
                    "held%s",
                    short_repr(key), task.name, type(exc).__name__, exc,
                    f" ({unlogged} such failures were not logged)" if unlogged else "",
                )  # fmt: skip
            return HOLD_S
        begins = self._held_until is None
        self._held_until = self._time.monotonic() + HOLD_S
        runs = self._on_store_error == "run"
        if begins:
            _log.error(
                "asking the limits of task %r failed (%s: %s); tasks %s, and the next try is in "
                "%g s", task.name, type(exc).__name__, exc,
                "start without being counted" if runs else "are held", HOLD_S,
            )  # fmt: skip
        return 0.0 if runs else HOLD_S

    def _works(self) -> None:
        if self._held_until is not None:
            self._held_until = None
            _log.warning("limits of tasks can be asked again")


class TaskGate(_Gate[Limiter]):
    """Decides for workers of threads and processes. Safe to share between threads."""

    def __init__(
        self,
        store: Any,
        prefix: str = "distwindow",
        on_store_error: OnStoreError = "hold",
        timeout: float = 0.5,
        time: Clock = SYSTEM,
    ) -> None:
        super().__init__(Limiter, store, prefix, on_store_error, timeout, time)

    def delay(self, task: TaskLimits, args: Sequence[Any], kwargs: Mapping[str, Any]) -> float:
        """Return 0.0 if this call of `task` may start now, and was counted; otherwise in how many
        seconds to ask again. Takes no longer than the timeout, and raises no `Exception`.
        """
        if self._hold_left() > 0:
            return self._unasked()
        key, cost = task.key_and_cost(args, kwargs)
        try:
            decision = self._limiters[task.limits].try_acquire(key, cost, enqueue=True)
        except Exception as exc:
            return self._failed(task, key, exc)
        self._works()
        return _delay(decision)


class AsyncTaskGate(_Gate[AsyncLimiter]):
    """Decides for workers of tasks."""

    def __init__(
        self,
        store: Any,
        prefix: str = "distwindow",
        on_store_error: OnStoreError = "hold",
        timeout: float = 0.5,
        time: Clock = SYSTEM,
    ) -> None:
        super().__init__(AsyncLimiter, store, prefix, on_store_error, timeout, time)

    async def wait(
        self,
        task: TaskLimits,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        max_wait: float,
    ) -> float:
        """Wait for up to `max_wait` seconds until this call of `task` may start. Return 0.0 if it
        may, and was counted; otherwise, as soon as that is certain, in how many seconds to ask
        again. Raises no `Exception`.
        """
        if self._hold_left() > 0:
            return self._unasked()
        key, cost = task.key_and_cost(args, kwargs)
        limiter = self._limiters[task.limits]
        try:
            if max_wait > 0 and await _acquires(limiter, key, cost, max_wait):
                delay = 0.0
            else:  # the `retry_after` of `acquire` is that of all who were refused with it
                delay = _delay(await limiter.try_acquire(key, cost, enqueue=True))
        except Exception as exc:
            return self._failed(task, key, exc)
        self._works()
        return delay

    async def hold(
        self,
        task: TaskLimits,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        max_hold: float,
    ) -> float:
        """Do as `wait`, but go on while the limiter fails, and return a delay only after `max_hold`
        seconds: for queues that cannot delay a task themselves.
        """
        monotonic = self._time.monotonic
        ends_at = monotonic() + max_hold
        while True:
            delay = await self.wait(task, args, kwargs, max(0.0, ends_at - monotonic()))
            if not delay:
                return 0.0
            left = max(0.0, ends_at - monotonic())
            await self._sleep(min(delay, left))
            if delay > left:
                return delay - left

    async def _sleep(self, seconds: float) -> None:
        if isinstance(self._time, AsyncClock):
            await self._time.sleep_async(seconds)
        else:
            await asyncio.sleep(seconds)


async def _acquires(limiter: AsyncLimiter, key: AnyKey, cost: int, max_wait: float) -> bool:
    try:
        await limiter.acquire(key, cost, timeout=max_wait)
    except RateLimitExceeded:
        return False
    return True


def _delay(decision: Decision) -> float:
    """Return the delay of a call after it was decided: 0.0 to start it."""
    if decision.allowed:
        return 0.0
    return min(max(decision.retry_after, MIN_DELAY_S), MAX_DELAY_S)


def broker_failed(task: str, exc: BaseException) -> float:
    """Log that the broker of a queue did not take a task back. Return how long to wait before the
    next try, in seconds: there may be no other copy of the task, so there is always a next one.
    """
    _log.warning(
        "the broker did not take back %s (%s: %s); will retry in %g s",
        task, type(exc).__name__, exc, BROKER_RETRY_S,
    )  # fmt: skip
    return BROKER_RETRY_S
