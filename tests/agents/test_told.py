"""What the default observer is told of the calls of models."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from importlib import import_module
from typing import Any

import pytest

from distwindow import set_default_observer
from tests.clock_and_stores import fresh_key
from tests.observer.told import Told

CALLS, AMOUNT = 5, 2
AWAY = "redis://127.0.0.1:1/0"
"""Nothing listens there."""
OPTIONS: dict[str, Any] = {"max_wait": 0, "timeout": 10.0}


def langchain(store: str, **options: Any) -> None:
    """Half of the calls in threads, half of them in tasks."""
    pytest.importorskip("langchain_core")
    ours: Any = import_module("distwindow.contrib.langchain")
    limiter = ours.RateLimiter(store, f"{AMOUNT}/hour", key=fresh_key(), **OPTIONS, **options)

    async def call_in_tasks() -> None:
        for _ in range(CALLS // 2):
            with suppress(ours.RateLimited, ours.RateLimiterStoreError):
                await limiter.aacquire()
        await limiter.aclose()

    for _ in range(CALLS - CALLS // 2):
        with suppress(ours.RateLimited, ours.RateLimiterStoreError):
            limiter.acquire()
    asyncio.run(call_in_tasks())


def pydantic_ai(store: str, **options: Any) -> None:
    of_pydantic: Any = pytest.importorskip("pydantic_ai")
    ours: Any = import_module("distwindow.contrib.pydantic_ai")
    answers = import_module("pydantic_ai.models.test").TestModel(custom_output_text="hi")
    errors = (import_module("pydantic_ai.exceptions").ModelHTTPError, ours.StoreError)
    model = ours.RateLimitedModel(
        answers, store, requests=f"{AMOUNT}/hour", key=fresh_key(), **OPTIONS, **options
    )

    async def call() -> None:
        for _ in range(CALLS):
            with suppress(*errors):
                await of_pydantic.Agent(model).run("do you?")
        await model.aclose()

    asyncio.run(call())


@pytest.fixture
def told() -> Iterator[Told]:
    told = Told()
    set_default_observer(told)
    yield told
    set_default_observer(None)


@pytest.mark.parametrize("call", [langchain, pydantic_ai])
def test_calls_are_told_as_they_are_decided(
    call: Callable[..., None], redis_url: str, told: Told
) -> None:
    call(redis_url)
    assert _found(told) == {("allowed", "ok"): AMOUNT, ("refused", "over_limit"): CALLS - AMOUNT}


@pytest.mark.parametrize("call", [langchain, pydantic_ai])
@pytest.mark.parametrize(
    ("answers", "result"), [("allow", "allowed"), ("deny", "refused"), ("raise", "error")]
)
def test_calls_without_the_store_are_told_as_they_are_answered(
    call: Callable[..., None], answers: str, result: str, told: Told
) -> None:
    call(AWAY, on_store_error=answers)
    assert _found(told) == {(result, "store_down"): CALLS}


def _found(told: Told) -> Counter[tuple[str, str]]:
    found = Counter[tuple[str, str]]()
    for counts in told.counts:
        found[counts.result, counts.reason] += counts.calls
    return found
