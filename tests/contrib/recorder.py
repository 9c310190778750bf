"""What the workers of the tests record in their broker's Redis: decisions, turns, and starts.

`DISTWINDOW_WORKERS_URL` is that Redis, and `DISTWINDOW_WORKERS_LIMIT` the limit of the jobs.
"""

from __future__ import annotations

import functools
import os
from typing import Any

import redis

from distwindow import AsyncLimiter, Decision, Limiter
from distwindow.runtime.steps import Operation
from distwindow.waiting.waiting import TurnAnswer, Turns

URL = os.environ["DISTWINDOW_WORKERS_URL"]
LIMIT = os.environ["DISTWINDOW_WORKERS_LIMIT"]
STORE_URL = os.environ.get("DISTWINDOW_WORKERS_STORE_URL", URL)
"""Where the limiter counts."""
_client = redis.Redis.from_url(URL)
_try_acquire = Limiter.try_acquire
_starts = Limiter(URL, "1000/hour", prefix="in-jobs", consistency="eventual", sync_interval=3600)


def job_started(number: int) -> None:
    """Record that the job `number` has started; a limiter's count is sent as its process ends."""
    _client.rpush("recorded:starts", number)
    _try_acquire(_starts, "starts")


def record_decisions() -> None:
    """Make all limiters of this process record when they admitted a call, and each turn."""
    decide, decide_async, ask = Limiter.try_acquire, AsyncLimiter.try_acquire, Turns.ask

    @functools.wraps(decide)
    def recording(self: Limiter, *args: Any, **kwargs: Any) -> Decision:
        return _recorded(decide(self, *args, **kwargs), kwargs)

    @functools.wraps(decide_async)
    async def recording_async(self: AsyncLimiter, *args: Any, **kwargs: Any) -> Decision:
        return _recorded(await decide_async(self, *args, **kwargs), kwargs)

    @functools.wraps(ask)
    def recording_ask(self: Turns, *args: Any, **kwargs: Any) -> Operation[TurnAnswer]:
        answer = yield from ask(self, *args, **kwargs)
        _record(answer.decision)
        return answer

    Limiter.try_acquire = recording  # type: ignore[method-assign]
    AsyncLimiter.try_acquire = recording_async  # type: ignore[method-assign, assignment]
    Turns.ask = recording_ask  # type: ignore[method-assign]


def _recorded(decision: Decision, options: dict[str, Any]) -> Decision:
    """Record a call of `try_acquire`; one with `enqueue` was recorded by `Turns.ask`, as those are
    by which `acquire` waits.
    """
    if not options.get("enqueue"):
        _record(decision)
    elif not decision.allowed:
        _client.incr("recorded:turns")
    return decision


def _record(decision: Decision) -> None:
    if decision.allowed:
        _client.rpush("recorded:admitted", decision.now_ms)
    else:
        _client.incr("recorded:refused")
