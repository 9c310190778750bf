"""Limits of arq's functions, for the whole fleet.

    rate_limits = RateLimits("redis://localhost:6379/0")

    @rate_limits.limit(limits=["5/second", "1000/hour"], limit_key="tenant:{tenant}")
    async def fetch(ctx, tenant, url): ...

A job that is refused is deferred until its turn, by arq's `Retry`, and the try is given back.
"""

from __future__ import annotations

import asyncio
import functools
import inspect
import logging
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

from .. import ConfigurationError
from ..observer import Observer
from ..ring.key import AnyKey
from ..runtime.options import ClockChoice
from . import needs
from .tasks import AsyncTaskGate, TaskLimits, WhileStoreIsAway

with needs("arq"):
    from arq.constants import retry_key_prefix
    from arq.worker import Retry

_log = logging.getLogger("distwindow")
C = TypeVar("C", bound=Callable[..., Awaitable[Any]])


class RateLimits:
    """The limits of coroutine functions that arq runs. `store` is a URL or an asyncio client, as
    for `AsyncLimiter`.

    `max_wait` (seconds) is how long a job may wait in its worker instead of being deferred; it
    takes one of `max_jobs` slots meanwhile, so that jobs without limits wait behind it, and the
    wait is a part of its `job_timeout`. By default none waits there. `on_store_error` says what
    happens to jobs while the limiter's store fails: "hold" defers them by a second, "run" runs them
    without counting. `timeout` (seconds) bounds one exchange with the store, and `clock` is as for
    `AsyncLimiter`. Raises `ConfigurationError` for what can never work.
    """

    def __init__(
        self,
        store: Any,
        *,
        prefix: str = "distwindow",
        on_store_error: WhileStoreIsAway = "hold",
        timeout: float = 0.5,
        clock: ClockChoice = "server",
        max_wait: float = 0.0,
        observer: Observer | None = None,
        key_label: Callable[[AnyKey], str] | None = None,
    ) -> None:
        number = isinstance(max_wait, (int, float)) and not isinstance(max_wait, bool)
        if not number or not max_wait >= 0:
            raise ConfigurationError(f"max_wait={max_wait!r} is not a number of seconds from 0")
        self._gate = AsyncTaskGate(
            store, prefix, on_store_error, timeout, clock, observer=observer, key_label=key_label
        )
        self._max_wait = max_wait

    def limit(self, *, limits: Any, limit_key: Any = None, limit_cost: Any = 1) -> Callable[[C], C]:
        """Return a decorator for a coroutine function whose first argument is arq's `ctx`.

        `limit_key` is a template over the names of the other arguments, or a function of them; by
        default the function's name. Raises `ConfigurationError` for wrong options.
        """

        def decorate(function: C) -> C:
            name = function.__qualname__
            if not inspect.iscoroutinefunction(function):
                raise ConfigurationError(f"{name} is no coroutine function; arq runs only these")
            task = TaskLimits(name, function, limits, limit_key, limit_cost, own=1)
            self._gate.add(task)

            @functools.wraps(function)
            async def limited(ctx: dict[Any, Any], *args: Any, **kwargs: Any) -> Any:
                try:
                    delay = await self._gate.wait(task, args, kwargs, self._max_wait)
                except asyncio.CancelledError:  # the worker stops
                    await _give_try_back(ctx)
                    raise
                if delay:
                    await _give_try_back(ctx)
                    raise Retry(defer=delay)
                return await function(ctx, *args, **kwargs)

            return limited  # type: ignore[return-value]  # it takes the same arguments

        return decorate


async def _give_try_back(ctx: dict[Any, Any]) -> None:
    """Uncount the try that arq counted when it started this job."""
    try:
        await ctx["redis"].decr(retry_key_prefix + ctx["job_id"])
    except Exception as exc:
        _log.warning(
            "the try of job %s is used up by waiting for its limit, as arq's Redis did not answer "
            "(%s: %s)", ctx["job_id"], type(exc).__name__, exc,
        )  # fmt: skip
