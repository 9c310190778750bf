"""`RateLimiter` of LangChain. The chat models answer at once: all that takes time is the limit.

The tests run with langchain-core 0.3.7, before which tasks did not await a limiter, and the newest.
"""

from __future__ import annotations

import asyncio
import copy
import pickle
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from importlib import import_module
from typing import Any

import pytest

from distwindow import ConfigurationError, Key, Limiter, RateLimitExceeded, StoreError
from distwindow.contrib.langchain import RateLimited, RateLimiter, RateLimiterStoreError
from tests.clock_and_stores import ManualClock, fresh_key
from tests.servers import Standalone, until

from .fleet import admissions, in_processes, most_in_any

exceptions: Any = import_module("langchain_core.exceptions")
FakeListChatModel: Any = import_module(
    "langchain_core.language_models.fake_chat_models"
).FakeListChatModel
REFUSED = getattr(exceptions, "ModelRateLimitError", exceptions.LangChainException)
FAR_S = 60.0
"""Far beyond what a step of these tests takes."""
Call = Callable[[Any], str]


def invoked(model: Any) -> str:
    return str(model.invoke("hello").content)


def streamed(model: Any) -> str:
    return "".join(chunk.content for chunk in model.stream("hello"))


def ainvoked(model: Any) -> str:
    async def call() -> str:
        return str((await model.ainvoke("hello")).content)

    return asyncio.run(call())


def astreamed(model: Any) -> str:
    async def call() -> str:
        return "".join([chunk.content async for chunk in model.astream("hello")])

    return asyncio.run(call())


WAYS: tuple[Call, ...] = (invoked, streamed, ainvoked, astreamed)
each_way = pytest.mark.parametrize("call", WAYS)


def model_of(limiter: RateLimiter, answer: str = "hi") -> Any:
    return FakeListChatModel(responses=[answer], rate_limiter=limiter)


@pytest.fixture
def limiter_of() -> Iterator[Callable[..., RateLimiter]]:
    """Return a function that makes limiters, which are closed at the end."""
    made: list[RateLimiter] = []

    def make(*arguments: Any, **options: Any) -> RateLimiter:
        options = {"key": fresh_key(), "timeout": 10.0, **options}
        made.append(RateLimiter(*arguments, **options))
        return made[-1]

    yield make
    for limiter in made:
        asyncio.run(limiter.aclose())


Make = Callable[..., RateLimiter]


# -- one window ------------------------------------------------------------------------------------


def test_calls_of_threads_and_tasks_count_in_one_window(where: str, limiter_of: Make) -> None:
    model = model_of(limiter_of(where, "4/hour strict", max_wait=0))
    assert [call(model) for call in WAYS] == ["hi"] * 4
    for call in WAYS:
        with pytest.raises(RateLimited):
            call(model)


def test_models_and_limiters_with_one_key_share_it(redis_url: str, limiter_of: Make) -> None:
    key = fresh_key()
    first, second = (limiter_of(redis_url, "2/hour", key=key, max_wait=0) for _ in range(2))
    other = limiter_of(redis_url, "2/hour", max_wait=0)
    assert invoked(model_of(first)) == ainvoked(model_of(second)) == "hi"
    for limiter in (first, second):
        with pytest.raises(RateLimited):
            invoked(model_of(limiter))
    assert invoked(model_of(other)) == "hi"
    with Limiter(redis_url, "2/hour") as plain:
        assert not plain.try_acquire(key)


def test_without_blocking_it_answers_at_once(where: str, limiter_of: Make) -> None:
    limiter = limiter_of(where, "2/hour")
    assert limiter.acquire(blocking=False) is True
    assert asyncio.run(limiter.aacquire(blocking=False)) is True
    assert limiter.acquire(blocking=False) is False
    assert asyncio.run(limiter.aacquire(blocking=False)) is False


def test_a_call_waits_until_there_is_room(limiter_of: Make) -> None:
    clock = ManualClock()
    model = model_of(limiter_of("memory://", "1/minute strict", time=clock))
    began = clock.now_ms()
    for minutes, call in enumerate(WAYS):
        assert call(model) == "hi"
        assert clock.now_ms() - began >= minutes * 60_000


# -- refusals --------------------------------------------------------------------------------------


@each_way
def test_a_refusal_is_an_error_of_both(limiter_of: Make, call: Call) -> None:
    clock = ManualClock()
    limiter = limiter_of("memory://", "1/minute strict", key="acct", max_wait=60, time=clock)
    limiter.acquire()
    with pytest.raises(RateLimited) as caught:
        call(model_of(limiter))
    error = caught.value
    assert isinstance(error, RateLimitExceeded)
    assert isinstance(error, REFUSED)
    assert error.retry_after == 61.0  # a minute, and the rest of the bucket
    assert str(error) == (
        "the model was not called: rate limit 1/minute strict exceeded for 'acct'; "
        "retry in 61.000 s"
    )
    assert str(pickle.loads(pickle.dumps(error))) == str(error)


@each_way
def test_a_refusal_falls_back(limiter_of: Make, call: Call) -> None:
    limiter = limiter_of("memory://", "1/hour", max_wait=0)
    model = model_of(limiter).with_fallbacks(
        [FakeListChatModel(responses=["other"])], exceptions_to_handle=(REFUSED,)
    )
    assert [call(model), call(model)] == ["hi", "other"]


# -- batches ---------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.timeout(60)
def test_batches_of_threads_and_tasks_hold_the_limit(redis_url: str, limiter_of: Make) -> None:
    """Both at once: none waits for another for ever, and no second has more than its limit."""
    limiter = limiter_of(redis_url, "20/second strict")
    model = model_of(limiter)
    moments = [admissions(limiter._of_threads), admissions(limiter._of_tasks)]
    # Of an older version FakeListChatModel counts its answers without a lock.
    inputs: list[Any] = ["hello"] * 50

    async def batches() -> list[Any]:
        of_threads = asyncio.to_thread(model.batch, inputs)
        return [*await asyncio.gather(of_threads, model.abatch(inputs))]

    answers = asyncio.run(batches())
    assert [len(each) for each in answers] == [50, 50]
    assert [len(each) for each in moments] == [50, 50]
    assert most_in_any(moments[0] + moments[1], 1000) <= 20


@pytest.mark.timeout(60)
def test_a_cancelled_call_leaves_its_turn_to_the_others(where: str, limiter_of: Make) -> None:
    limiter = limiter_of(where, "2/second strict")
    model = model_of(limiter)

    async def calls() -> list[Any]:
        tasks = [asyncio.create_task(model.ainvoke("hello")) for _ in range(5)]
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        next(task for task in tasks if not task.done()).cancel()
        return await asyncio.gather(*tasks, return_exceptions=True)

    answers = asyncio.run(calls())
    cancelled = [each for each in answers if isinstance(each, asyncio.CancelledError)]
    assert len(cancelled) == 1
    assert [each.content for each in answers if each not in cancelled] == ["hi"] * 4


# -- four processes --------------------------------------------------------------------------------


def called_for_calls(url: str, key: str, calls: int) -> list[int]:
    """Make calls in a process of the fleet; return when each was admitted."""
    limiter = RateLimiter(url, "10/second strict", key=key, timeout=10.0)
    moments = [admissions(limiter._of_threads), admissions(limiter._of_tasks)]
    model = model_of(limiter)
    for _ in range(calls // 2):
        invoked(model)
        ainvoked(model)
    asyncio.run(limiter.aclose())
    return moments[0] + moments[1]


@pytest.mark.fleet
def test_four_processes_have_ten_calls_in_any_second(redis_url: str) -> None:
    moments = in_processes(called_for_calls, redis_url, fresh_key(), 10)
    assert len(moments) == 40
    assert most_in_any(moments, 1000) <= 10


# -- the store is away -----------------------------------------------------------------------------


@pytest.fixture(scope="module")
def stopped_url() -> str:
    """`redis://…` of a server that was there, and is not any more."""
    with Standalone() as server:
        return server.url


def outcome(call: Call, model: Any) -> Any:
    try:
        return call(model)
    except exceptions.LangChainException as exc:
        return type(exc)


@each_way
@pytest.mark.parametrize(
    ("policy", "expected"),
    [
        ("allow", "hi"),
        ("deny", RateLimited),
        ("raise", RateLimiterStoreError),
        ("local", "hi"),
        (lambda key, cost, limits, error: True, "hi"),
    ],
)
def test_calls_of_a_stopped_redis_get_what_the_policy_says(
    stopped_url: str, limiter_of: Make, call: Call, policy: Any, expected: Any
) -> None:
    model = model_of(limiter_of(stopped_url, "10/minute", on_store_error=policy))
    assert outcome(call, model) is expected or outcome(call, model) == expected


def test_a_process_may_have_its_share_of_the_limit(stopped_url: str, limiter_of: Make) -> None:
    limiter = limiter_of(stopped_url, "4/hour", on_store_error="local", share=0.5, max_wait=0)
    assert [limiter.acquire(blocking=False) for _ in range(3)] == [True, True, False]


def test_errors_name_the_store_without_its_password(limiter_of: Make) -> None:
    url = "redis://:secret@127.0.0.1:1/0"
    limiter = limiter_of(url, "10/minute", key="acct", on_store_error="raise")
    with pytest.raises(RateLimiterStoreError, match=r"127\.0\.0\.1:1") as caught:
        limiter.acquire()
    assert isinstance(caught.value, StoreError)
    assert caught.value.charged is False
    assert "secret" not in str(caught.value)
    assert repr(limiter) == "RateLimiter('redis://:***@127.0.0.1:1/0', '10/minute', key='acct')"
    assert "secret" not in repr(model_of(limiter))  # as traces have it
    denying = limiter_of(url, "10/minute", key="acct", on_store_error="deny")
    with pytest.raises(RateLimited) as denied:
        denying.acquire()
    assert str(denied.value) == "the model was not called: the store of 'acct' is away"
    assert denying.acquire(blocking=False) is False
    assert asyncio.run(denying.aacquire(blocking=False)) is False


@pytest.mark.slow
@pytest.mark.timeout(60)
@pytest.mark.parametrize("call", [invoked, ainvoked])
def test_a_call_that_waits_is_denied_when_it_asks_again(limiter_of: Make, call: Call) -> None:
    with Standalone() as server, ThreadPoolExecutor() as threads:
        limiter = limiter_of(server.url, "1/3s strict", on_store_error="deny", timeout=0.5)
        call(model_of(limiter))
        waiting = threads.submit(call, model_of(limiter))
        queues = [of.decider.queues for of in (limiter._of_threads, limiter._of_tasks)]
        until(lambda: any(each.by_name for each in queues), FAR_S, what="a call that waits")
        server.stop()
        with pytest.raises(RateLimited, match="is away"):
            waiting.result(FAR_S)


def test_a_silent_server_holds_allowed_calls_for_the_timeout_only(limiter_of: Make) -> None:
    with Standalone() as server:
        limiter = limiter_of(server.url, "1/hour", timeout=0.2)
        assert invoked(model_of(limiter)) == "hi"
        server.pause()
        began = time.monotonic()
        assert invoked(model_of(limiter)) == "hi"
        assert time.monotonic() - began < FAR_S / 2
        server.resume()


# -- what LangChain does with a limiter ------------------------------------------------------------


def test_what_is_made_of_a_model_has_its_limiter(limiter_of: Make) -> None:
    limiter = limiter_of("memory://", "3/hour", max_wait=0)
    model = model_of(limiter)
    made = [model, model.bind(stop=["."]), model.with_config(tags=["tag"])]
    assert [invoked(each) for each in made] == ["hi"] * 3
    for each in made:
        with pytest.raises(RateLimited):
            invoked(each)


def test_a_copy_says_what_to_do(limiter_of: Make) -> None:
    """LangChain's own cannot be copied or pickled, either."""
    limiter = limiter_of("memory://", "3/hour")
    for copied in (copy.deepcopy, pickle.dumps):
        with pytest.raises(TypeError, match="make one in each process"):
            copied(limiter)


# -- mistakes and the end --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "options", "error", "text"),
    [
        (("redis://h", "10/minute"), {}, TypeError, "'key'"),
        (("redis://h", "10/minute"), {"key": "k", "maxwait": 1}, TypeError, "'maxwait'"),
        (("10/minute", "redis://h"), {"key": "k"}, ConfigurationError, "the second"),
        (("redis://h", "ten"), {"key": "k"}, ConfigurationError, "ten"),
        (("redis://h", "1/minute"), {"key": ""}, ValueError, "empty"),
        (("redis://h", "1/minute"), {"key": 7}, TypeError, "str, bytes or Key"),
        (("redis://h", "1/minute"), {"key": "k", "max_wait": "1"}, ConfigurationError, "max_wait"),
        (("redis://h", "1/minute"), {"key": "k", "max_wait": -1}, ConfigurationError, "max_wait"),
        (
            ("redis://h", "1/minute"),
            {"key": "k", "on_store_error": "alow"},
            ConfigurationError,
            '"allow"',
        ),
        ((None, "1/minute"), {"key": "k"}, ConfigurationError, "is no URL; write one, such as"),
        (("redis://h", "1/minute"), {"key": "k", "share": 0.5}, ConfigurationError, "share=0.5"),
    ],
)
def test_mistakes_are_found_when_it_is_made(
    arguments: Any, options: Any, error: type[Exception], text: str
) -> None:
    with pytest.raises(error) as caught:
        RateLimiter(*arguments, **options)
    assert text in str(caught.value)


def test_keys_may_be_bytes_and_have_tags(limiter_of: Make) -> None:
    for key in (b"acct", Key("requests", tag="acct")):
        assert limiter_of("memory://", "1/hour", key=key).acquire()


def test_a_closed_one_raises(redis_url: str, limiter_of: Make) -> None:
    limiter = limiter_of(redis_url, "9/hour")
    limiter.close()
    with pytest.raises(ConfigurationError, match="closed"):
        limiter.acquire()
    assert asyncio.run(limiter.aacquire())
    asyncio.run(limiter.aclose())
    with pytest.raises(ConfigurationError, match="closed"):
        asyncio.run(limiter.aacquire())
