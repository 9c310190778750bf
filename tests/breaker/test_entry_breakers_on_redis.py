"""Entries with a breaker on a server: what one process gives back, another one may have.

The clocks are the test's own (`clock="client"`), so that nothing waits for an open breaker.
"""

from __future__ import annotations

import asyncio
from contextvars import Context
from typing import Any

import pytest

from distwindow import (
    AsyncCircuitBreaker,
    AsyncLimiter,
    BreakerOpen,
    CircuitBreaker,
    ErrorCount,
    Limiter,
    RateLimitExceeded,
)
from distwindow.testing import ManualClock

RULE = ErrorCount(1, open_for=5)


def settings_of(prefix: str) -> Any:
    return {"prefix": prefix, "timeout": 5.0, "clock": "client", "time": ManualClock()}


def test_a_probe_that_the_limit_refuses_goes_to_another_process(
    redis_url: str, prefix: str
) -> None:
    settings = settings_of(prefix)
    with (
        CircuitBreaker(redis_url, RULE, **settings) as one,
        CircuitBreaker(redis_url, RULE, **settings) as other,
        Limiter(redis_url, "1/minute", **settings) as limiter,
    ):
        with pytest.raises(OSError, match="down"), limiter.entry("k", breaker=one):
            raise OSError("down")
        one.flush()
        with pytest.raises(BreakerOpen):
            limiter.entry("k", breaker=other).__enter__()
        settings["time"].advance(5)
        with pytest.raises(RateLimitExceeded):
            limiter.entry("k", breaker=one).__enter__()
        with other.call("k"):  # the probe
            with pytest.raises(BreakerOpen):
                Context().run(limiter.entry("k", breaker=one).__enter__)  # not inside the probe
        assert one.state("k") == "closed"
        assert limiter.stats("k").error == 1


async def test_a_probe_that_the_limit_refuses_goes_to_another_process_of_tasks(
    redis_url: str, prefix: str
) -> None:
    settings = settings_of(prefix)
    async with (
        AsyncCircuitBreaker(redis_url, RULE, **settings) as one,
        AsyncCircuitBreaker(redis_url, RULE, **settings) as other,
        AsyncLimiter(redis_url, "1/minute", **settings) as limiter,
    ):
        with pytest.raises(OSError, match="down"):
            async with limiter.entry("k", breaker=one):
                raise OSError("down")
        await one.flush()
        with pytest.raises(BreakerOpen):
            await limiter.entry("k", breaker=other).__aenter__()
        settings["time"].advance(5)
        with pytest.raises(RateLimitExceeded):
            await limiter.entry("k", breaker=one).__aenter__()
        async with other.call("k"):  # the probe
            entering = limiter.entry("k", breaker=one).__aenter__()
            with pytest.raises(BreakerOpen):
                await Context().run(asyncio.ensure_future, entering)  # not inside the probe
        assert await one.state("k") == "closed"
        assert (await limiter.stats("k")).error == 1
