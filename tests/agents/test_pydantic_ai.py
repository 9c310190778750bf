"""The limits of pydantic-ai's models. Each model is a function, and reports what it has used.

The tests run with pydantic-ai-slim 1.54, the first that has limiters of others, and the newest.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import re
import subprocess
import sys
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from functools import partial
from types import SimpleNamespace
from typing import Any

import anyio
import pytest
from pydantic_ai import Agent
from pydantic_ai.exceptions import ConcurrencyLimitExceeded, ModelHTTPError
from pydantic_ai.messages import (
    ModelMessage,
    ModelRequest,
    ModelResponse,
    TextPart,
    UserPromptPart,
)
from pydantic_ai.models import Model, ModelRequestParameters
from pydantic_ai.models.concurrency import ConcurrencyLimitedModel
from pydantic_ai.models.fallback import FallbackModel
from pydantic_ai.models.function import FunctionModel
from pydantic_ai.models.test import TestModel as FixedModel
from pydantic_ai.models.wrapper import WrapperModel
from pydantic_ai.settings import ModelSettings
from pydantic_ai.usage import RequestUsage

from distwindow import (
    ConcurrencyExceeded,
    ConfigurationError,
    Key,
    Limiter,
    RateLimitExceeded,
    StoreError,
)
from distwindow.contrib.pydantic_ai import ConcurrencyLimiter, RateLimitedModel, estimate_tokens
from distwindow.stores.memory import MemoryStore
from tests.agents.pydantic_agents import AGENTS, CALLS, LIMIT, TOKENS
from tests.clock_and_stores import ManualClock
from tests.programs import ROOT, printed
from tests.servers import Proxy
from tests.servers.faults import Blackhole, Refuse

FAR_S = 60.0
"""Far beyond what a step of these tests takes."""
ASKED: list[ModelMessage] = [ModelRequest(parts=[UserPromptPart("do you?")])]
KNOWS_ENDS = hasattr(ModelResponse(parts=[]), "state")
"""From pydantic-ai 1.100 on a stream says whether it was read to its end."""


def usage(tokens: int) -> RequestUsage:
    return RequestUsage(input_tokens=tokens // 2, output_tokens=tokens - tokens // 2)


def model_of(answer: Callable[[], int | BaseException | None]) -> Model:
    """Return a model whose requests use so many tokens, or raise that; None: it reports none."""

    async def function(messages: Any, info: Any) -> ModelResponse:
        used = answer()
        if isinstance(used, BaseException):
            raise used
        return ModelResponse(parts=[TextPart("yes")], usage=usage(used or 7))

    class Unreported(WrapperModel):
        async def request(self, *call: Any) -> ModelResponse:
            response = await super().request(*call)
            if response.usage.total_tokens == 7:
                response.usage = RequestUsage()
            return response

    return Unreported(FunctionModel(function))


async def ask(model: Model, settings: ModelSettings | None = None) -> str:
    response = await model.request(ASKED, settings, ModelRequestParameters())
    part = response.parts[0]
    assert isinstance(part, TextPart)
    return part.content


def started(what: str, url: str, prefix: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "tests.agents.pydantic_agents", what, url, prefix], cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)}, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip


def results(what: str, url: str, prefix: str, processes: int = 2) -> list[Any]:
    """Return what the program returns in so many processes."""
    running = [started(what, url, prefix) for _ in range(processes)]
    outputs = [process.communicate(timeout=2 * FAR_S)[0] for process in running]
    assert [process.returncode for process in running] == [0] * processes
    return [each for output in outputs for each in json.loads(output)]


# -- how many run at once --------------------------------------------------------------------------


@pytest.mark.parametrize("streamed", [False, True])
async def test_no_more_agents_ask_at_once_than_the_limit(
    where: str, prefix: str, streamed: bool
) -> None:
    running: list[int] = []
    most: list[int] = []

    async def answer(messages: Any, info: Any) -> ModelResponse:
        running.append(1)
        most.append(len(running))
        await asyncio.sleep(0.001)
        running.pop()
        return ModelResponse(parts=[TextPart("yes")])

    async def stream(messages: Any, info: Any) -> AsyncIterator[str]:
        running.append(1)
        most.append(len(running))
        yield "y"
        await asyncio.sleep(0.001)
        yield "es"
        running.pop()

    limiter = ConcurrencyLimiter(where, 3, key="model", prefix=prefix)
    model = ConcurrencyLimitedModel(FunctionModel(answer, stream_function=stream), limiter)

    async def work() -> None:
        for _ in range(5):
            if streamed:
                async with Agent(model).run_stream("do you?") as result:
                    assert await result.get_output() == "yes"
            else:
                assert (await Agent(model).run("do you?")).output == "yes"

    await asyncio.gather(*(work() for _ in range(8)))
    assert len(most) == 8 * 5
    assert max(most) <= 3
    await limiter.aclose()


@pytest.mark.fleet
def test_no_more_ask_at_once_in_several_processes(redis_url: str, prefix: str) -> None:
    seen = results("at_once", redis_url, prefix)
    assert len(seen) == 2 * AGENTS * CALLS
    assert max(seen) <= LIMIT


async def test_a_stream_that_another_task_closes_frees_its_slot(
    redis_url: str, prefix: str
) -> None:
    """Early, too: long before the slot's time is over."""

    async def stream(messages: Any, info: Any) -> AsyncIterator[str]:
        yield "y"
        yield "es"

    mine, others = (
        ConcurrencyLimiter(redis_url, 1, key="model", prefix=prefix, ttl=3600) for _ in "12"
    )
    model = ConcurrencyLimitedModel(FunctionModel(stream_function=stream), limiter=mine)
    opened = model.request_stream(ASKED, None, ModelRequestParameters())
    await asyncio.create_task(opened.__aenter__())
    waiting = asyncio.create_task(others.acquire("model"))
    await asyncio.sleep(0.05)
    assert not waiting.done()
    await asyncio.create_task(opened.__aexit__(None, None, None))
    await asyncio.wait_for(waiting, FAR_S)
    await mine.aclose()
    await others.aclose()


@pytest.mark.fleet
async def test_the_slots_of_a_process_that_is_killed_are_free_after_ttl(
    redis_url: str, prefix: str
) -> None:
    process = started("holds", redis_url, prefix)
    assert process.stdout is not None
    assert process.stdout.readline() == "holds\n"
    limiter = ConcurrencyLimiter(redis_url, LIMIT, key="model", prefix=prefix)
    waiting = [asyncio.create_task(limiter.acquire("model")) for _ in range(LIMIT)]
    await asyncio.sleep(0.1)
    assert not any(task.done() for task in waiting)
    process.kill()
    await asyncio.wait_for(asyncio.gather(*waiting), FAR_S)
    await limiter.aclose()
    process.communicate()


async def test_who_waits_too_long_or_is_cancelled_gets_no_slot_and_leaves_none(prefix: str) -> None:
    limiter = ConcurrencyLimiter("memory://", 1, key="model", prefix=prefix, max_wait=0.01)
    await limiter.acquire("model:a")
    with pytest.raises(ConcurrencyLimitExceeded, match="model:b was not called: all slots") as e:
        await limiter.acquire("model:b")
    assert isinstance(e.value.__cause__, ConcurrencyExceeded)
    patient = ConcurrencyLimiter("memory://", 1, key="k")
    await patient.acquire("model")
    waiting = [asyncio.create_task(patient.acquire("model")) for _ in range(3)]
    await asyncio.sleep(0.01)
    waiting[0].cancel()
    patient.release()
    await asyncio.wait_for(waiting[1], FAR_S)
    assert not waiting[2].done()
    patient.release()
    await asyncio.wait_for(waiting[2], FAR_S)
    patient.release()
    with pytest.raises(RuntimeError, match="more often than acquire"):
        patient.release()
    await limiter.aclose()
    await patient.aclose()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this platform does not fork")
def test_a_forked_child_begins_without_the_slots_of_its_parent(redis_url: str, prefix: str) -> None:
    program = f"""
import asyncio, os
from distwindow.contrib.pydantic_ai import ConcurrencyLimiter
limiter = ConcurrencyLimiter({redis_url!r}, 1, key="k", prefix={prefix!r}, ttl=3600, timeout=10)
async def main():
    await limiter.acquire("model")
    child = os.fork()
    if not child:
        try:
            limiter.release()
        except RuntimeError:
            os._exit(0)
        os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    limiter.release()
    await asyncio.wait_for(limiter.acquire("model"), {FAR_S})
    print("freed")
    await limiter.aclose()
asyncio.run(main())
"""
    assert printed("-W", "ignore", "-c", program) == "freed\n"


@pytest.mark.fleet
def test_threads_with_loops_of_their_own_share_one_limiter(redis_url: str, prefix: str) -> None:
    """As `run_sync` in a server with threads."""
    running: list[int] = []
    most: list[int] = []
    limiter = ConcurrencyLimiter(redis_url, 2, key="k", prefix=prefix, ttl=3600)

    async def answer(messages: Any, info: Any) -> ModelResponse:
        running.append(1)
        most.append(len(running))
        await asyncio.sleep(0.002)
        running.pop()
        return ModelResponse(parts=[TextPart("yes")], usage=usage(10))

    inner = RateLimitedModel(
        FunctionModel(answer), redis_url, requests="1000/second", tokens="100000/second",
        key="k", prefix=prefix,
    )  # fmt: skip
    model = ConcurrencyLimitedModel(inner, limiter)

    def work(number: int) -> None:
        for _ in range(5):
            assert asyncio.run(ask(model)) == "yes"

    with ThreadPoolExecutor(6) as threads:
        list(threads.map(work, range(6)))
    assert len(most) == 6 * 5
    assert max(most) <= 2

    async def close() -> None:
        await limiter.aclose()
        await inner.aclose()

    asyncio.run(close())


# -- requests and tokens ---------------------------------------------------------------------------


def passed(store: Any, key: Any, clock: ManualClock, limit: str = "1000000/minute") -> int:
    return Limiter(store, limit, time=clock).stats(key).passed


TOKENS_KEY = Key("tokens", tag="k")


def limited(wrapped: Model, store: Any, clock: ManualClock, **options: Any) -> RateLimitedModel:
    options = {"key": "k", "tokens": "1000000/minute", "estimate": 100, **options}
    return RateLimitedModel(wrapped, store, time=clock, **options)


@pytest.mark.parametrize("seed", range(5))
async def test_a_minute_has_no_more_tokens_than_the_limit_and_what_estimates_lacked(
    clock: ManualClock, seed: int
) -> None:
    chance = random.Random(seed)
    store = MemoryStore(clock)
    calls: list[tuple[int, int, int]] = []

    async def answer(messages: Any, info: Any) -> ModelResponse:
        estimate = int(info.model_settings["max_tokens"])
        used = chance.choice([0, estimate // 2, estimate, 2 * estimate]) + 1
        calls.append((clock.now_ms(), estimate, used))
        for _ in range(chance.randrange(5)):
            await asyncio.sleep(0)
        return ModelResponse(parts=[TextPart("yes")], usage=usage(used))

    def estimate(messages: Any, settings: Any, parameters: Any) -> int:
        return int(settings["max_tokens"])

    async def work(model: Model) -> None:
        for _ in range(20):
            settings = ModelSettings(max_tokens=chance.randrange(1, 400))
            await ask(model, settings)
            clock.advance(chance.random())

    models = [
        limited(
            FunctionModel(answer), store, clock, requests="20/minute strict",
            tokens="2000/minute strict", estimate=estimate, max_wait=None,
        )
        for _ in range(2)
    ]  # fmt: skip
    await asyncio.gather(*(work(model) for model in models for _ in range(4)))
    assert len(calls) == 2 * 4 * 20
    check_windows(calls, 60_000, 2000, 20)


def check_windows(
    calls: list[tuple[int, int, int]], window_ms: int, tokens: int, requests: int
) -> None:
    for began, _, _ in calls:
        window = [call for call in calls if began <= call[0] < began + window_ms]
        lacked = sum(max(0, used - estimate) for _, estimate, used in window)
        assert sum(used for _, _, used in window) <= tokens + lacked
        assert len(window) <= requests


@pytest.mark.fleet
def test_several_processes_have_no_more_tokens_than_the_limit(redis_url: str, prefix: str) -> None:
    calls = [tuple(call) for call in results("tokens", redis_url, prefix)]
    assert len(calls) == 2 * AGENTS * CALLS
    check_windows(calls, 1000, TOKENS, 60)


HTTP = partial(ModelHTTPError, model_name="m")


@pytest.mark.parametrize(
    ("answer", "counted"),
    [
        (30, 30), (100, 100), (250, 250), (None, 100),
        (HTTP(400), 0), (HTTP(429), 0), (HTTP(499), 0), (HTTP(500), 0), (HTTP(529), 0),
        (ConnectionError("gone"), 100), (asyncio.CancelledError(), 100),
    ],
)  # fmt: skip
async def test_what_a_request_has_used_is_counted(
    clock: ManualClock, answer: Any, counted: int
) -> None:
    store = MemoryStore(clock)
    model = limited(model_of(lambda: answer), store, clock, requests="9/minute")
    if isinstance(answer, BaseException):
        with pytest.raises(type(answer)):
            await ask(model)
    else:
        await ask(model)
    await model.aclose()
    assert passed(store, TOKENS_KEY, clock) == counted
    assert passed(store, "k", clock, "9/minute") == 1


@pytest.mark.parametrize("how", ["whole", "early", "cancelled", "failed", "refused", "own error"])
async def test_what_a_stream_has_used_is_counted_at_its_end(clock: ManualClock, how: str) -> None:
    """Of one that was not read to its end the estimate stays, as its report is a part."""
    store = MemoryStore(clock)

    async def stream(messages: Any, info: Any) -> AsyncIterator[str]:
        if how == "refused":
            raise HTTP(400)
        yield "yes " * 10
        if how == "failed":
            raise HTTP(429)
        yield "and no" * 10

    async def read(model: Model) -> None:
        async with model.request_stream(ASKED, None, ModelRequestParameters()) as response:
            async for _ in response:
                if how == "early":
                    return
                if how == "cancelled":
                    await asyncio.sleep(FAR_S)
                if how == "own error":
                    raise HTTP(404)
            reported.append(response.get().usage.total_tokens)

    reported: list[int] = []
    model = limited(FunctionModel(stream_function=stream), store, clock, estimate=500)
    if how == "cancelled":
        with anyio.move_on_after(0.05):
            await read(model)
    elif how in ("failed", "refused", "own error"):
        with pytest.raises(ModelHTTPError):
            await read(model)
    else:
        await read(model)
    await model.aclose()
    if how == "whole" and KNOWS_ENDS:
        assert 0 < reported[0] < 500
        assert passed(store, TOKENS_KEY, clock) == reported[0]
    else:
        assert passed(store, TOKENS_KEY, clock) == (0 if how == "refused" else 500)


async def test_a_stream_that_has_reported_more_than_its_estimate_counts_it(
    clock: ManualClock,
) -> None:
    store = MemoryStore(clock)

    async def stream(messages: Any, info: Any) -> AsyncIterator[str]:
        yield "yes " * 100
        yield "and no"

    model = limited(FunctionModel(stream_function=stream), store, clock, estimate=5)
    async with model.request_stream(ASKED, None, ModelRequestParameters()) as response:
        async for _ in response:
            break
    await model.aclose()
    assert passed(store, TOKENS_KEY, clock) > 100


@pytest.mark.skipif(not hasattr(Model, "compact_messages"), reason="it has none")
async def test_to_compact_messages_is_a_request_too(clock: ManualClock) -> None:
    store = MemoryStore(clock)

    class Compacting(FixedModel):
        async def compact_messages(self, *call: Any, **options: Any) -> ModelResponse:
            return ModelResponse(parts=[TextPart("short")], usage=usage(30))

    model = limited(Compacting(), store, clock, requests="9/minute")
    context: Any = SimpleNamespace(
        messages=ASKED, model_settings=None, model_request_parameters=ModelRequestParameters()
    )
    await model.compact_messages(context, instructions="be short")
    await model.aclose()
    assert passed(store, TOKENS_KEY, clock) == 30
    assert passed(store, "k", clock, "9/minute") == 1


@pytest.mark.parametrize("streamed", [False, True])
async def test_who_finds_no_room_falls_back_to_another_model(
    clock: ManualClock, streamed: bool
) -> None:
    store = MemoryStore(clock)
    first = limited(
        FixedModel(custom_output_text="first"), store, clock, requests="2/minute strict",
        tokens=None, estimate=None, max_wait=0,
    )  # fmt: skip
    agent = Agent(FallbackModel(first, FixedModel(custom_output_text="second")))
    answers = []
    for _ in range(4):
        if streamed:
            async with agent.run_stream("do you?") as result:
                answers.append(await result.get_output())
        else:
            answers.append((await agent.run("do you?")).output)
    assert answers == ["first", "first", "second", "second"]
    with pytest.raises(ModelHTTPError) as caught:
        await Agent(first).run("do you?")
    body: Any = caught.value.body
    assert caught.value.status_code == 429
    assert isinstance(caught.value.__cause__, RateLimitExceeded)
    assert "the model was not called: rate limit 2/minute" in body["detail"]
    assert 0 < body["retry_after"] <= 61
    assert getattr(caught.value, "retry_after", body["retry_after"]) > 0
    clock.advance(61)
    assert (await agent.run("do you?")).output == "first"
    await first.aclose()


async def test_an_error_names_the_key_that_was_given(clock: ManualClock) -> None:
    """And not that of the tokens, which nobody has written."""
    model = limited(FixedModel(), "memory://", clock, tokens="100/minute", max_wait=0)
    await model.request(ASKED, None, ModelRequestParameters())
    with pytest.raises(ModelHTTPError, match="100/minute exceeded for 'k'; retry in") as caught:
        await model.request(ASKED, None, ModelRequestParameters())
    assert isinstance(caught.value.__cause__, RateLimitExceeded)
    assert caught.value.__cause__.decision.key == "k"
    await model.aclose()


async def test_who_may_wait_waits(clock: ManualClock) -> None:
    store = MemoryStore(clock)
    model = limited(model_of(lambda: 100), store, clock, tokens="200/minute", max_wait=90)
    began = clock.monotonic()
    for _ in range(3):
        assert await ask(model) == "yes"
    assert 30 <= clock.monotonic() - began <= 90
    await model.aclose()


def test_an_estimate_is_a_number_or_a_function_and_never_above_the_limit(
    clock: ManualClock,
) -> None:
    async def count(messages: Any, settings: Any, parameters: Any) -> int:
        assert messages == ASKED
        return 70

    def guess(messages: Any, settings: Any, parameters: Any) -> int:
        return int(settings["max_tokens"]) * 2

    settings = ModelSettings(max_tokens=40)
    for estimate, tokens in [(60, 60), (count, 70), (guess, 80), (None, 41), (10**9, 500)]:
        store = MemoryStore(clock)

        async def main(store: Any = store, estimate: Any = estimate) -> None:
            model = limited(
                model_of(lambda: None), store, clock, estimate=estimate, tokens="500/minute"
            )
            await ask(model, settings)
            await model.aclose()

        asyncio.run(main())
        assert passed(store, TOKENS_KEY, clock, "500/minute") == tokens


def test_the_default_estimate_counts_texts_and_the_largest_answer() -> None:
    asked: list[ModelMessage] = [
        ModelRequest(parts=[UserPromptPart("a" * 400)], instructions="b" * 80),
        ModelResponse(parts=[TextPart("c" * 40)]),
        ModelRequest(parts=[UserPromptPart(["d" * 40])]),
    ]
    assert estimate_tokens(asked, {"max_tokens": 50}) == 100 + 20 + 10 + 10 + 50
    assert estimate_tokens(asked, None) == 100 + 20 + 10 + 10 + 1  # as `request` may have them


async def test_its_windows_are_those_of_everything_with_its_key(clock: ManualClock) -> None:
    store = MemoryStore(clock)
    limiter = Limiter(store, "3/minute strict", time=clock)
    mine = limited(model_of(lambda: 1), store, clock, requests="3/minute strict", max_wait=0)
    default = limited(FixedModel(), store, clock, key=None, requests="3/minute strict")
    await ask(mine)
    assert limiter.try_acquire("k", 2)
    with pytest.raises(ModelHTTPError):
        await ask(mine)
    await default.request(ASKED, None, ModelRequestParameters())
    assert limiter.stats(f"{default.system}:{default.model_name}").passed == 1


# -- without the store -----------------------------------------------------------------------------


@asynccontextmanager
async def closing(it: Any) -> AsyncGenerator[Any, None]:
    yield it
    await it.aclose()


@pytest.mark.parametrize("fault", [Refuse, Blackhole])
@pytest.mark.parametrize("policy", ["allow", "deny", "raise"])
@pytest.mark.parametrize("kind", ["at once", "rate"])
async def test_without_the_store_requests_get_what_the_policy_says(
    proxy: Proxy, prefix: str, fault: Any, policy: Any, kind: str
) -> None:
    options: Any = {"on_store_error": policy, "prefix": prefix, "timeout": 0.3}
    wrapped = FixedModel(custom_output_text="yes")
    limiter = ConcurrencyLimiter(proxy.url, 2, key="k", max_wait=10 * FAR_S, **options)
    model: Any = ConcurrencyLimitedModel(wrapped, limiter)
    if kind == "rate":
        model = RateLimitedModel(
            wrapped, proxy.url, requests="9/minute", tokens="99999/minute", key="k", **options
        )
    async with closing(model if kind == "rate" else limiter):
        agent = Agent(model)
        proxy.fault = fault()
        for _ in range(3):
            if policy == "allow":
                assert (await asyncio.wait_for(agent.run("?"), FAR_S)).output == "yes"
                continue
            error: Any = StoreError
            if policy == "deny":
                error = ModelHTTPError if kind == "rate" else ConcurrencyLimitExceeded
            with pytest.raises(error) as caught:
                await asyncio.wait_for(agent.run("?"), FAR_S)
            if policy == "deny" and kind == "rate":
                assert "the store of its limits is away" in str(caught.value)


async def test_without_the_store_a_process_may_have_its_share(prefix: str) -> None:
    model = RateLimitedModel(
        FixedModel(custom_output_text="yes"), "redis://127.0.0.1:1/0", requests="4/hour",
        prefix=prefix, on_store_error="local", share=0.5, max_wait=0,
    )  # fmt: skip
    async with closing(model):
        for _ in range(2):
            assert (await Agent(model).run("?")).output == "yes"
        with pytest.raises(ModelHTTPError, match="4/hour exceeded"):
            await Agent(model).run("?")


# -- mistakes --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"tokens": None, "estimate": None}, "give requests= or tokens="),
        ({"requests": "9/minute", "tokens": None}, "estimate= means nothing without tokens="),
        ({"share": 0.5}, "share=0.5 means nothing"),
        ({"requests": "9 per fortnight"}, "fortnight"),
        ({"tokens": "10/second paced 500ms"}, "paced or warms up"),
        ({"estimate": 0}, "estimate=0 is no whole number"),
        ({"estimate": "100"}, "estimate='100' is no whole number"),
        ({"estimate": lambda messages: 1}, "is called with 3 arguments"),
        ({"max_wait": -1}, "max_wait=-1 is no number"),
        ({"on_store_error": "alow"}, "on_store_error='alow' is none of"),
        ({"timeout": 0}, "timeout=0"),
        ({"key": ""}, "key='' is no str such as"),
        ({"key": 4}, "key=4 is no str such as"),
        ({"key": Key("a", tag="b")}, "tag='b') is no str such as"),
    ],
)  # fmt: skip
def test_wrong_arguments_of_a_model_are_named(clock: ManualClock, options: Any, text: str) -> None:
    with pytest.raises(ConfigurationError, match=re.escape(text)):
        limited(FixedModel(), "memory://", clock, **options)


@pytest.mark.parametrize("wrapped", [None, 4, Agent(FixedModel())])
def test_what_is_no_model_is_named(clock: ManualClock, wrapped: Any) -> None:
    with pytest.raises(ConfigurationError, match='write "openai:gpt-5" or a Model, not '):
        limited(wrapped, "memory://", clock)


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"max_wait": "5"}, "max_wait='5' is no number"),
        ({"on_store_error": "local"}, "on_store_error='local' is none of"),
        ({"limit": 0}, "limit=0 is not a whole number"),
        ({"ttl": 0.1}, "ttl=0.1 is less than twice"),
        ({"key": ""}, "empty"),
        ({"limits": 3}, "unexpected keyword argument 'limits'"),
    ],
)
def test_wrong_arguments_of_a_limiter_are_named(options: Any, error: str) -> None:
    options = {"limit": 3, "key": "k", "timeout": 0.5, **options}
    with pytest.raises((ConfigurationError, ValueError, TypeError), match=error):
        ConcurrencyLimiter("memory://", **options)


@pytest.mark.parametrize("estimate", ["100", 0, 1.5, None])
async def test_an_estimate_that_is_no_number_is_an_error_of_the_request(
    clock: ManualClock, estimate: Any
) -> None:
    def count(messages: Any, settings: Any, parameters: Any) -> Any:
        return estimate

    model = limited(FixedModel(), "memory://", clock, estimate=count)
    with pytest.raises(ValueError, match="estimate="):
        await ask(model)


async def test_after_aclose_requests_say_so(clock: ManualClock) -> None:
    model = limited(FixedModel(), "memory://", clock)
    limiter = ConcurrencyLimiter("memory://", 1, key="k")
    await model.aclose()
    await limiter.aclose()
    with pytest.raises(ConfigurationError, match="is closed; make a new one"):
        await ask(model)
    with pytest.raises(ConfigurationError, match="is closed; make a new one"):
        await limiter.acquire("model")
