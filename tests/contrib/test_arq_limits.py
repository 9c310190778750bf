"""`distwindow.contrib.arq`: what a limited coroutine does with arq's context.

arq needs redis-py below 6, so this file is collected by scripts/test-redis-py only (conftest.py).
"""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from arq import func
from arq.worker import Retry

from distwindow import ConfigurationError
from distwindow.contrib.arq import RateLimits

pytestmark = pytest.mark.compat


class RecordingRedis:
    """The one command that a limited coroutine sends to arq's Redis."""

    def __init__(self, failure: Exception | None = None) -> None:
        self.given_back: list[str] = []
        self._failure = failure

    async def decr(self, key: str) -> None:
        if self._failure is not None:
            raise self._failure
        self.given_back.append(key)


async def fetch(ctx: dict[Any, Any], tenant: str) -> str:
    """Fetch."""
    return tenant


async def test_a_job_that_would_wait_too_long_is_deferred_and_its_try_given_back() -> None:
    broker = RecordingRedis()
    limited = RateLimits("memory://").limit(limits="1/minute", limit_key="{tenant}")(fetch)
    ctx = {"redis": broker, "job_id": "j1"}
    assert await limited(ctx, "acme") == "acme"
    assert await limited(ctx, "initech") == "initech"
    with pytest.raises(Retry) as raised:
        await limited(ctx, "acme")
    assert 0 < raised.value.defer_score <= 60_000
    assert broker.given_back == ["arq:retry:j1"]


async def test_a_job_that_is_cancelled_while_it_waits_has_its_try_back() -> None:
    """A worker that is stopped cancels its jobs, and arq counts a try when it starts them again."""
    broker = RecordingRedis()
    limited = RateLimits("memory://", max_wait=60.0).limit(limits="1/minute")(fetch)
    ctx = {"redis": broker, "job_id": "j1"}
    await limited(ctx, "acme")
    waiting = asyncio.ensure_future(limited(ctx, "acme"))
    for _ in range(10):
        await asyncio.sleep(0)
    assert not waiting.done()
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert broker.given_back == ["arq:retry:j1"]


async def test_a_job_that_is_cancelled_while_it_runs_has_used_its_try() -> None:
    runs = asyncio.Event()

    async def job(ctx: dict[Any, Any]) -> None:
        runs.set()
        await asyncio.Event().wait()

    broker = RecordingRedis()
    limited = RateLimits("memory://").limit(limits="1/minute")(job)
    running = asyncio.ensure_future(limited({"redis": broker, "job_id": "j1"}))
    await runs.wait()
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert broker.given_back == []


async def test_a_short_wait_is_spent_in_the_worker() -> None:
    broker = RecordingRedis()
    limited = RateLimits("memory://", max_wait=5.0).limit(limits="1/100ms")(fetch)
    ctx = {"redis": broker, "job_id": "j1"}
    assert [await limited(ctx, "acme") for _ in range(3)] == ["acme"] * 3
    assert broker.given_back == []


async def test_by_default_no_job_waits_in_the_worker_however_short_its_wait_is() -> None:
    """Those that wait would take the slots of jobs without limits."""
    limited = RateLimits("memory://").limit(limits="1/100ms")(fetch)
    ctx = {"redis": RecordingRedis(), "job_id": "j1"}
    calls = [limited(ctx, "acme") for _ in range(1000)]
    ends = await asyncio.gather(*calls, return_exceptions=True)
    assert {type(end) for end in ends} == {str, Retry}


async def test_a_job_is_deferred_although_its_try_cannot_be_given_back(
    caplog: pytest.LogCaptureFixture,
) -> None:
    limited = RateLimits("memory://").limit(limits="1/minute")(fetch)
    ctx = {"redis": RecordingRedis(ConnectionError("away")), "job_id": "j1"}
    await limited(ctx, "acme")
    with pytest.raises(Retry):
        await limited(ctx, "acme")
    assert "the try of job j1 is used up" in caplog.text


def test_the_function_keeps_its_name_and_arq_takes_it() -> None:
    limited = RateLimits("memory://").limit(limits="1/minute")(fetch)
    assert (limited.__qualname__, limited.__doc__) == ("fetch", "Fetch.")
    assert func(limited).name == "fetch"


def test_wrong_options_are_errors_at_once() -> None:
    limits = RateLimits("memory://")
    with pytest.raises(ConfigurationError, match="names 'ctx'"):
        limits.limit(limits="5/s", limit_key="{ctx}")(fetch)
    with pytest.raises(ConfigurationError, match="fetch' has no limits; write limits="):
        limits.limit(limits=None)(fetch)
    with pytest.raises(ConfigurationError, match="is no coroutine function"):
        limits.limit(limits="5/s")(lambda ctx: None)  # type: ignore[type-var]
    with pytest.raises(ConfigurationError, match="max_wait=-1"):
        RateLimits("memory://", max_wait=-1)
