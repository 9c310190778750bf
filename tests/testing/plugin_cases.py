"""Run with the plugin by tests/testing/test_pytest_plugin.py. No store is at the URL."""

from __future__ import annotations

import asyncio
import gc
import itertools
import weakref
from collections.abc import Callable
from contextlib import AsyncExitStack
from typing import Any

import celery
import httpx2
import pytest

import distwindow
from distwindow import (
    AdaptiveBreaker,
    AsyncAdaptiveBreaker,
    AsyncCircuitBreaker,
    AsyncConcurrency,
    AsyncGuard,
    AsyncLimiter,
    Blocked,
    CircuitBreaker,
    Concurrency,
    ConfigurationError,
    ConsecutiveFailures,
    Decision,
    FlowRule,
    Guard,
    Limiter,
    RateLimitExceeded,
    StoreError,
    guarded,
)
from distwindow.contrib.httpx2 import (
    AsyncRateLimitTransport,
    AsyncUpstreamLimits,
    RateLimitTransport,
    UpstreamLimited,
    UpstreamLimits,
)
from distwindow.support.async_use import run_at_once
from distwindow.testing import ManualClock
from distwindow.testing.pytest_plugin import classes_with_a_store

URL = "redis://127.0.0.1:1/0"
TRIES = 10
FLOW = [FlowRule("r", 5)]
FAILURES = ConsecutiveFailures(2, open_for=10)
MADE: dict[tuple[type, str], tuple[Any, int]] = {
    **{
        (cls, consistency): (cls(URL, "5/minute", prefix=consistency, consistency=consistency), 5)
        for cls in (Limiter, AsyncLimiter)
        for consistency in ("direct", "leased", "eventual")
    },
    (Limiter, "paced"): (Limiter(URL, "1/minute paced 500ms"), 1),
    (Concurrency, ""): (Concurrency(URL, 1), 1),
    (AsyncConcurrency, ""): (AsyncConcurrency(URL, 1), 1),
    (CircuitBreaker, ""): (CircuitBreaker(URL, FAILURES), 2),
    (AsyncCircuitBreaker, ""): (AsyncCircuitBreaker(URL, FAILURES), 2),
    (AdaptiveBreaker, ""): (AdaptiveBreaker(URL), TRIES),
    (AsyncAdaptiveBreaker, ""): (AsyncAdaptiveBreaker(URL), TRIES),
    (Guard, ""): (Guard(URL, FLOW), 5),
    (AsyncGuard, ""): (AsyncGuard(URL, FLOW), 5),
}
"""What was made when this file was imported, and how many of its calls are admitted at once."""


def block_of(made: Any) -> Any:
    """Return a call of `made`, to be entered."""
    if isinstance(made, (Concurrency, AsyncConcurrency)):
        return made.hold("r", timeout=0)
    if isinstance(made, (Limiter, AsyncLimiter, Guard, AsyncGuard)):
        return made.entry("r")
    return made.call("r")


def admitted(made: Any) -> int:
    """Return how many of the calls of `made` were admitted before the first that was not.
    Those of a circuit breaker fail.
    """
    run = asyncio.run if type(made).__name__.startswith("Async") else run_at_once
    return run(count_admitted(made))


async def count_admitted(made: Any) -> int:
    async with AsyncExitStack() as stack:
        for number in range(TRIES):
            block = block_of(made)
            try:
                if hasattr(block, "__aenter__"):
                    entered = await stack.enter_async_context(block)
                else:
                    entered = stack.enter_context(block)
            except Blocked:
                return number
            if "CircuitBreaker" in type(made).__name__:
                entered.fail()
                await stack.pop_all().aclose()
    return TRIES


every_made = pytest.mark.parametrize(
    "made", MADE.values(), ids=[f"{c.__name__}-{w}" for c, w in MADE]
)


def test_all_classes_that_open_a_store_are_here() -> None:
    web = {cls for cls in classes_with_a_store() if cls.__module__.startswith("distwindow.contrib")}
    assert {cls for cls, _ in MADE} == {*classes_with_a_store()} - web


@pytest.mark.parametrize("attempt", [1, 2])
@every_made
def test_what_was_made_at_import_is_on_an_empty_store(
    distwindow_clock: ManualClock, made: tuple[Any, int], attempt: int
) -> None:
    face, expected = made
    assert admitted(face) == expected
    distwindow_clock.advance(600)
    is_breaker = isinstance(face, (CircuitBreaker, AsyncCircuitBreaker))
    assert admitted(face) == (1 if is_breaker else expected)  # a breaker admits one probe


@pytest.mark.distwindow_off
@every_made
def test_all_calls_are_admitted_when_limits_are_off(made: tuple[Any, int]) -> None:
    assert admitted(made[0]) == TRIES


def test_others_are_as_they_were_made() -> None:
    with pytest.raises(StoreError):
        MADE[Limiter, "leased"][0].try_acquire("r")
    with pytest.raises(StoreError):
        decorated()


limiter = Limiter(URL, "2/minute")


@limiter.limit("f")
def decorated() -> None: ...


@guarded(Guard(URL, [FlowRule("g", 2)]), "g")
def guarded_function() -> None: ...


statuses = itertools.cycle([200, 429, 200])
answers = httpx2.MockTransport(lambda request: httpx2.Response(next(statuses)))
upstream = UpstreamLimits(URL, "5/minute", max_wait=0)
async_upstream = AsyncUpstreamLimits(URL, "5/minute", max_wait=0)
outgoing = httpx2.Client(transport=RateLimitTransport(upstream, answers))


app = celery.Celery("eager", broker="memory://", set_as_current=False)
app.conf.task_always_eager = True


@app.task(shared=False)
def task() -> bool:
    return limiter.try_acquire("task").allowed


@pytest.mark.parametrize("call", [decorated, guarded_function])
def test_decorated_functions_are_limited(
    distwindow_clock: ManualClock, call: Callable[[], None]
) -> None:
    call()
    call()
    with pytest.raises(Blocked):
        call()


def test_tasks_that_are_run_eagerly_are_limited(distwindow_clock: ManualClock) -> None:
    assert [task.delay().get() for _ in range(3)] == [True, True, False]


def test_calls_are_listed_and_reset(
    distwindow_calls: list[Decision], distwindow_reset: Callable[[], None]
) -> None:
    made_here = AsyncLimiter(URL, "2/minute", time=ManualClock())
    assert [limiter.try_acquire(key).allowed for key in "aaa"] == [True, True, False]
    assert asyncio.run(made_here.peek("a")).allowed  # of another clock, so on a store of its own
    assert [(call.key, call.allowed) for call in distwindow_calls] == [
        ("a", True), ("a", True), ("a", False),
    ]  # fmt: skip
    distwindow_reset()
    assert limiter.try_acquire("a")


def test_calls_that_wait_or_borrow_are_listed(distwindow_calls: list[Decision]) -> None:
    for _ in range(3):
        limiter.acquire("a")
    assert [call.allowed for call in distwindow_calls] == [True, True, False, True]
    limiter.try_acquire("b", priority=True)
    assert distwindow_calls[-1].key == "b"


def call_out() -> int:
    return int(outgoing.get("https://api.example/").status_code)


async def call_out_awaited() -> int:
    transport = AsyncRateLimitTransport(async_upstream, answers)
    async with httpx2.AsyncClient(transport=transport) as client:
        return int((await client.get("https://api.example/")).status_code)


@pytest.mark.parametrize("call", [call_out, lambda: asyncio.run(call_out_awaited())])
def test_calls_that_go_out_are_limited(
    distwindow_clock: ManualClock, call: Callable[[], int]
) -> None:
    events: list[Any] = []
    for limits in (upstream, async_upstream):
        limits.on_event(events.append)
    assert [call(), call()] == [200, 429]
    with pytest.raises(UpstreamLimited, match="has asked to wait"):
        call()
    assert [type(event).__name__ for event in events] == ["Pause"]
    distwindow_clock.advance(600)
    assert call() == 200


@pytest.mark.distwindow_off
def test_calls_that_go_out_are_sent_when_limits_are_off() -> None:
    assert len([call_out() for _ in range(TRIES)]) == TRIES


def test_what_entries_have_not_sent_is_reset_too(distwindow_reset: Callable[[], None]) -> None:
    with limiter.entry("a"):
        pass
    distwindow_reset()
    assert limiter.minute("a").success == 0


def test_objects_of_one_url_share_what_is_counted(distwindow_clock: ManualClock) -> None:
    other = AsyncLimiter(URL, "2/minute")
    limiter.acquire("a", cost=2)
    assert not asyncio.run(other.peek("a"))
    assert asyncio.run(AsyncLimiter(URL.replace(":1/", ":2/"), "2/minute").peek("a"))
    assert Limiter("memory://", "2/minute").try_acquire("a", cost=2)
    assert Limiter("memory://", "2/minute").try_acquire("a", cost=2)


def test_a_wait_moves_the_clock(distwindow_clock: ManualClock) -> None:
    for _ in range(3):
        limiter.acquire("a")
    assert sum(distwindow_clock.slept) == pytest.approx(60)
    limiter.acquire("a")
    with pytest.raises(RateLimitExceeded):
        limiter.acquire("a", timeout=5)


class Subclass(Limiter):
    def __init__(self, url: str) -> None:
        super().__init__(url, "1/minute")
        self.own = "kept"


of_subclass = Subclass(URL)


@pytest.mark.parametrize("attempt", [1, 2])
def test_a_limiter_that_is_closed_is_open_in_the_next_test(
    distwindow_clock: ManualClock, attempt: int
) -> None:
    assert of_subclass.own == "kept"
    with of_subclass:
        assert of_subclass.try_acquire("a")
        assert not of_subclass.try_acquire("a")


attempts: list[str] = []


@pytest.mark.flaky(reruns=1)
def test_a_test_that_is_run_again_begins_again(distwindow_clock: ManualClock) -> None:
    attempts.append("a")
    assert limiter.try_acquire("a", cost=2)
    assert attempts[1:], "the first attempt fails"


changes: list[Any] = []
heard = CircuitBreaker(URL, FAILURES)
heard.on_change(changes.append)


def test_listeners_are_called(distwindow_clock: ManualClock) -> None:
    assert admitted(heard) == 2
    assert [change.state for change in changes] == ["open"]


of_iterators = Limiter(URL, iter(["2/minute", "100/hour"]))


def test_limits_may_be_an_iterator(distwindow_clock: ManualClock) -> None:
    assert of_iterators.try_acquire("a", cost=2)


class Holder:
    """One of whose methods is an argument of what it holds."""

    def __init__(self) -> None:
        self.limiter = Limiter(URL, "2/minute", on_store_error=self.answer)

    def answer(self, *_: Any) -> bool:
        return True


def test_what_a_test_has_made_is_not_kept(distwindow_reset: Callable[[], None]) -> None:
    made = [Holder(), Limiter(URL, "2/minute"), CircuitBreaker(URL, FAILURES)]
    distwindow_reset()
    alive = [weakref.ref(each) for each in made]
    made.clear()
    gc.collect()
    assert [each() for each in alive] == [None] * 3


def test_the_clock_may_be_asked_for_later(request: pytest.FixtureRequest) -> None:
    with pytest.raises(StoreError):
        limiter.try_acquire("a")
    clock: ManualClock = request.getfixturevalue("distwindow_clock")
    assert limiter.try_acquire("a", cost=2)
    clock.advance(60)
    assert limiter.try_acquire("a", cost=2)


def test_the_next_test_is_as_if_nobody_had_asked() -> None:
    with pytest.raises(StoreError):
        limiter.try_acquire("a")


def test_mistakes_are_found_as_without_the_plugin(distwindow_clock: ManualClock) -> None:
    with pytest.raises(ConfigurationError, match="redis:/"):
        Limiter("redis:/localhost", "1/second")
    with pytest.raises(TypeError, match="limits"):
        Limiter(URL)  # type: ignore[call-arg]
    with pytest.raises(ConfigurationError, match="the URL of the store comes first"):
        Limiter("1/second")  # type: ignore[call-arg]
    with pytest.raises(ConfigurationError, match="open_for"):
        CircuitBreaker(URL, ConsecutiveFailures(2, open_for=0.05))
    assert distwindow.__version__
