"""What the workers of the tests record in their broker's Redis: decisions, turns, and starts.

`DISTWINDOW_WORKERS_URL` is that Redis, and `DISTWINDOW_WORKERS_LIMIT` the limit of the jobs.
"""

from __future__ import annotations

import functools
import os
from contextvars import ContextVar
from typing import Any

import redis

from distwindow import AsyncLimiter, Decision, Limiter

URL = os.environ["DISTWINDOW_WORKERS_URL"]
LIMIT = os.environ["DISTWINDOW_WORKERS_LIMIT"]
STORE_URL = os.environ.get("DISTWINDOW_WORKERS_STORE_URL", URL)
"""Where the limiter counts."""
_tried: ContextVar[Decision | None] = ContextVar("tried", default=None)
"""What `try_acquire` decided last in this context: `acquire` may return that, or wait."""
_client = redis.Redis.from_url(URL)


def job_started(number: int) -> None:
    """Record that the job `number` has started."""
    _client.rpush("recorded:starts", number)


def record_decisions() -> None:
    """Make all limiters of this process record when they admitted a call, and each turn."""
    decide, decide_async = Limiter.try_acquire, AsyncLimiter.try_acquire
    wait_async = AsyncLimiter.acquire

    @functools.wraps(decide)
    def recording(self: Limiter, *args: Any, **kwargs: Any) -> Decision:
        return _recorded(self, decide(self, *args, **kwargs))

    @functools.wraps(decide_async)
    async def recording_async(self: AsyncLimiter, *args: Any, **kwargs: Any) -> Decision:
        decision = _recorded(self, await decide_async(self, *args, **kwargs))
        _tried.set(decision)
        return decision

    @functools.wraps(wait_async)
    async def recording_wait(self: AsyncLimiter, *args: Any, **kwargs: Any) -> Decision:
        decision = await wait_async(self, *args, **kwargs)
        return decision if decision is _tried.get() else _recorded(self, decision)

    Limiter.try_acquire = recording  # type: ignore[method-assign]
    AsyncLimiter.try_acquire = recording_async  # type: ignore[method-assign]
    AsyncLimiter.acquire = recording_wait  # type: ignore[method-assign]


def _recorded(limiter: Limiter | AsyncLimiter, decision: Decision) -> Decision:
    if limiter.prefix.endswith("-turns"):
        _client.incr("recorded:turns")
    elif decision.allowed:
        _client.rpush("recorded:admitted", decision.now_ms)
    else:
        _client.incr("recorded:refused")
    return decision
