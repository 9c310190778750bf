"""What the workers of the tests record in their broker's Redis: decisions, turns, and starts.

`DISTWINDOW_WORKERS_URL` is that Redis, and `DISTWINDOW_WORKERS_LIMIT` the limit of the jobs.
"""

from __future__ import annotations

import functools
import os
from typing import Any

import redis

from distwindow import Decision, Limiter
from distwindow.limiter.decider import BaseDecider
from distwindow.runtime.steps import Operation
from distwindow.waiting.waiting import Turns

URL = os.environ["DISTWINDOW_WORKERS_URL"]
LIMIT = os.environ["DISTWINDOW_WORKERS_LIMIT"]
STORE_URL = os.environ.get("DISTWINDOW_WORKERS_STORE_URL", URL)
"""Where the limiter counts."""
_client = redis.Redis.from_url(URL)
_starts = Limiter(URL, "1000/hour", prefix="in-jobs", consistency="eventual", sync_interval=3600)


def job_started(number: int) -> None:
    """Record that the job `number` has started; a limiter's count is sent as its process ends."""
    _client.rpush("recorded:starts", number)
    _starts.try_acquire("starts")


def record_decisions() -> None:
    """Make all limiters of this process record when they admitted a call, and each turn."""
    answered, attempt = BaseDecider.answered, Turns.attempt

    @functools.wraps(answered)
    def recording(self: BaseDecider, decision: Decision) -> Decision:
        if decision.allowed:
            _client.rpush("recorded:admitted", decision.now_ms)
        else:
            _client.incr("recorded:refused")
        return answered(self, decision)

    @functools.wraps(attempt)
    def recording_turns(self: Turns, *args: Any) -> Operation[Decision]:
        decision = yield from attempt(self, *args)
        if not decision.allowed:
            _client.incr("recorded:turns")
        return decision

    BaseDecider.answered = recording  # type: ignore[method-assign]
    Turns.attempt = recording_turns  # type: ignore[method-assign, assignment]
