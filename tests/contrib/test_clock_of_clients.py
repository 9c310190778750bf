"""`clock="client"`, for servers that do not execute `TIME`, can be given to all integrations."""

from __future__ import annotations

import asyncio
import importlib
import inspect
import pkgutil
from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from typing import Any

import celery
import pytest

from distwindow import ConfigurationError, Limit, contrib
from distwindow.contrib.asgi import RateLimits
from distwindow.contrib.celery import RateLimits as CeleryRateLimits
from distwindow.contrib.http import LimitedRequest
from distwindow.contrib.tasks import AsyncTaskGate, TaskGate, TaskLimits
from tests.web.test_rate_limits import Blocking

TASK = TaskLimits("task", lambda: None, "5/hour")


def modules() -> Iterator[Any]:
    for found in pkgutil.iter_modules(contrib.__path__, "distwindow.contrib."):
        with suppress(Exception):  # a library that does not go with these versions, or settings
            yield importlib.import_module(found.name)


def test_each_integration_has_the_option() -> None:
    makers = [module.RateLimits for module in modules() if hasattr(module, "RateLimits")]
    assert len(makers) >= 7
    for maker in makers:
        options = inspect.signature(maker).parameters
        assert options["clock"].default in ("server", None), maker
        is_web = "trusted_proxies" in options
        assert ("share" in options) == is_web, maker


def ask_blocking(url: str, **options: Any) -> Any:
    rate_limits = Blocking(url, on_store_error="allow", **options)
    limit = rate_limits.limit("5/hour")
    decision = rate_limits.run(limit.decide({}, LimitedRequest()))
    rate_limits.close()
    return decision


def ask_asgi(url: str, **options: Any) -> Any:
    async def ask() -> Any:
        async with RateLimits(url, on_store_error="allow", **options) as rate_limits:
            return await rate_limits.limit("5/hour", name="n", key=str).check({"headers": []})

    return asyncio.run(ask())


def ask_gate(url: str, **options: Any) -> Any:
    gate = TaskGate(url, **options)
    gate.add(TASK)
    return gate._limiter(TASK).try_acquire("k")


def ask_async_gate(url: str, **options: Any) -> Any:
    async def ask() -> Any:
        gate = AsyncTaskGate(url, **options)
        gate.add(TASK)
        async with gate._limiter(TASK) as limiter:
            return await limiter.try_acquire("k")

    return asyncio.run(ask())


def ask_celery(url: str, **options: Any) -> Any:
    limits = CeleryRateLimits(celery.Celery("app"), url, **options)
    with closing(limits.settings().limiters(url)) as limiters:
        return limiters.get((Limit("5/hour"),)).try_acquire("k")


@pytest.mark.parametrize("ask", [ask_blocking, ask_asgi, ask_gate, ask_async_gate, ask_celery])
def test_it_is_used(timeless_url: str, prefix: str, ask: Callable[..., Any]) -> None:
    with pytest.raises(ConfigurationError, match='clock="client"'):
        ask(timeless_url, prefix=prefix)
    assert ask(timeless_url, prefix=prefix, clock="client").source == "store"
