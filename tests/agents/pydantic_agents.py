"""A process with agents of pydantic-ai that share a limit with others.

python -m tests.agents.pydantic_agents at_once|holds|tokens REDIS_URL PREFIX
"""

from __future__ import annotations

import asyncio
import json
import random
import sys
from collections.abc import Callable, Coroutine
from typing import Any

import redis.asyncio
from pydantic_ai import Agent
from pydantic_ai.messages import (
    ModelMessage,
    ModelRequest,
    ModelResponse,
    TextPart,
    UserPromptPart,
)
from pydantic_ai.models import ModelRequestParameters
from pydantic_ai.models.concurrency import ConcurrencyLimitedModel
from pydantic_ai.models.function import FunctionModel
from pydantic_ai.settings import ModelSettings
from pydantic_ai.usage import RequestUsage

from distwindow.contrib.pydantic_ai import ConcurrencyLimiter, RateLimitedModel

AGENTS, CALLS, LIMIT = 4, 8, 3
"""Of each process; and how many may run at once."""
TOKENS = 1000
"""In each second."""
PATIENT_S = 60.0


async def at_once(url: str, prefix: str) -> list[int]:
    """Return how many requests were running as each began, by a counter of the server."""
    server = redis.asyncio.Redis.from_url(url)
    seen = []

    async def answer(messages: Any, info: Any) -> ModelResponse:
        seen.append(int(await server.incr(f"{prefix}-running")))
        await asyncio.sleep(random.random() / 50)
        await server.decr(f"{prefix}-running")
        return ModelResponse(parts=[TextPart("yes")])

    limiter = ConcurrencyLimiter(url, LIMIT, key="model", prefix=prefix, timeout=PATIENT_S / 10)

    async def run() -> None:
        agent = Agent(ConcurrencyLimitedModel(FunctionModel(answer), limiter=limiter))
        for _ in range(CALLS):
            await agent.run("do you?")

    await asyncio.gather(*(run() for _ in range(AGENTS)))
    await limiter.aclose()
    await server.aclose()
    return seen


async def holds(url: str, prefix: str) -> list[int]:
    """Hold all slots until the process is killed."""
    limiter = ConcurrencyLimiter(url, LIMIT, key="model", prefix=prefix, ttl=2.0, timeout=0.9)
    for _ in range(LIMIT):
        await limiter.acquire("model")
    print("holds", flush=True)
    await asyncio.sleep(PATIENT_S)
    return []


async def tokens(url: str, prefix: str) -> list[tuple[int, int, int]]:
    """Return of each request when it was admitted by the clock of the store (ms), its estimate, and
    the tokens that it has used.
    """
    admitted: dict[Any, int] = {}
    calls = []

    async def answer(messages: Any, info: Any) -> ModelResponse:
        estimate = int(info.model_settings["max_tokens"])
        used = random.randint(0, 2 * estimate) if random.random() < 0.2 else estimate // 2
        calls.append((admitted[asyncio.current_task()], estimate, used))
        usage = RequestUsage(input_tokens=used // 2, output_tokens=used - used // 2)
        return ModelResponse(parts=[TextPart("yes")], usage=usage)

    def estimate(messages: Any, settings: Any, parameters: Any) -> int:
        return int(settings["max_tokens"])

    model = RateLimitedModel(
        FunctionModel(answer), url, requests="60/second strict", tokens=f"{TOKENS}/second strict",
        key="account", estimate=estimate, max_wait=None, prefix=prefix, timeout=PATIENT_S / 10,
    )  # fmt: skip
    reserve = model._calls.reserve

    async def noted(estimate: int) -> Any:
        reservation = await reserve(estimate)
        admitted[asyncio.current_task()] = reservation.decision.now_ms
        return reservation

    model._calls.reserve = noted  # type: ignore[method-assign]
    asked: list[ModelMessage] = [ModelRequest(parts=[UserPromptPart("do you?")])]

    async def run() -> None:
        for _ in range(CALLS):
            settings = ModelSettings(max_tokens=random.choice([50, 100, 200]))
            await model.request(asked, settings, ModelRequestParameters())

    await asyncio.gather(*(run() for _ in range(AGENTS)))
    await model.aclose()
    return calls


PROGRAMS: dict[str, Callable[[str, str], Coroutine[Any, Any, list[Any]]]] = {
    "at_once": at_once, "holds": holds, "tokens": tokens,
}  # fmt: skip

if __name__ == "__main__":
    what, *arguments = sys.argv[1:]
    print(json.dumps(asyncio.run(PROGRAMS[what](*arguments))))
