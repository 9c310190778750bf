"""What would silently count nothing: `with` for `async with`, a condition without `await`, a second
`with` of a limiter, a block as a condition, another event loop. Each is an error that says what to
write.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from typing import Any

import pytest

from distwindow import (
    AdaptiveBreaker,
    AsyncAdaptiveBreaker,
    AsyncCircuitBreaker,
    AsyncConcurrency,
    AsyncGuard,
    AsyncLimiter,
    CircuitBreaker,
    Concurrency,
    ConfigurationError,
    DistwindowError,
    ErrorCount,
    FlowRule,
    Guard,
    Limiter,
)
from distwindow.contrib.asgi import RateLimits

MADE: dict[str, Callable[..., Any]] = {
    "limiter": lambda url="memory://": AsyncLimiter(url, "5/hour"),
    "concurrency": lambda url="memory://": AsyncConcurrency(url, 5),
    "breaker": lambda url="memory://": AsyncCircuitBreaker(url, ErrorCount(5)),
    "adaptive": lambda url="memory://": AsyncAdaptiveBreaker(url),
    "guard": lambda url="memory://": AsyncGuard(url, rules=[FlowRule("k", 5)]),
}
BLOCKS: dict[str, tuple[str, Callable[[Any], Any]]] = {
    "entry": ("limiter", lambda limiter: limiter.entry("k")),
    "hold": ("concurrency", lambda slots: slots.hold("k")),
    "call": ("breaker", lambda breaker: breaker.call("k")),
    "adaptive call": ("adaptive", lambda breaker: breaker.call("k")),
    "guard entry": ("guard", lambda guard: guard.entry("k")),
}


def assert_refused(block: Any) -> None:
    with pytest.raises(TypeError, match=r"write `async with` in place of `with`") as raised, block:
        pytest.fail("the block has begun")
    assert type(block).__name__ in str(raised.value)
    with contextlib.ExitStack() as stack, pytest.raises(TypeError, match="write `async with`"):
        stack.enter_context(block)


@pytest.mark.parametrize("name", MADE)
async def test_what_is_closed_by_async_with(name: str) -> None:
    made = MADE[name]()
    assert_refused(made)
    async with made:
        pass


@pytest.mark.parametrize("name", BLOCKS)
async def test_a_block_that_is_awaited_can_still_be_entered(name: str) -> None:
    owner, make = BLOCKS[name]
    async with MADE[owner]() as made:
        block = make(made)
        assert_refused(block)
        async with block:
            pass


async def test_a_slot_that_was_got_without_waiting() -> None:
    async with AsyncConcurrency("memory://", 1) as slots:
        slot = await slots.try_hold("k")
        assert_refused(slot)
        assert slot.held
        async with slot:
            pass
        assert not slot.held


async def test_nothing_is_counted() -> None:
    async with AsyncLimiter("memory://", "5/hour") as limiter:
        assert_refused(limiter.entry("k"))
        assert (await limiter.stats("k")).passed == 0


ASKED: dict[str, tuple[str, Callable[[Any], Any]]] = {
    "try_acquire": ("limiter", lambda limiter: limiter.try_acquire("k")),
    "borrowing": ("limiter", lambda limiter: limiter.try_acquire("k", priority=True)),
    "try_acquire_all": ("limiter", lambda limiter: limiter.try_acquire_all([("k", "5/hour", 1)])),
    "peek": ("limiter", lambda limiter: limiter.peek("k")),
    "try_hold": ("concurrency", lambda slots: slots.try_hold("k")),
}


@pytest.mark.parametrize("name", ASKED)
async def test_a_condition_without_await(name: str) -> None:
    owner, ask = ASKED[name]
    async with MADE[owner]() as made:
        asked = ask(made)
        with pytest.raises(TypeError, match="write `await` before it"):
            assert asked
        assert await asked


@pytest.mark.parametrize("name", ASKED)
async def test_what_is_awaited_goes_wherever_a_coroutine_goes(name: str) -> None:
    owner, ask = ASKED[name]
    async with MADE[owner]() as made:
        assert await asyncio.create_task(ask(made))
        assert all(await asyncio.gather(ask(made), ask(made)))
        assert await asyncio.wait_for(ask(made), 10)
        ask(made).close()


async def test_a_call_that_is_not_awaited_counts_nothing() -> None:
    async with AsyncLimiter("memory://", "5/hour") as limiter:
        limiter.try_acquire("k")
        assert (await limiter.peek("k")).remaining == 5


async def entered(block: Any) -> None:
    async with block:
        pass


OWNERS = {**MADE, "web": lambda url: RateLimits(url, on_store_error="raise")}
CALLS: dict[str, tuple[str, Callable[[Any], Any]]] = {
    **ASKED,
    **{f"{name} entered": (name, entered) for name in OWNERS},
    **{f"{name} closed": (name, lambda made: made.aclose()) for name in MADE},
    "entry": ("limiter", lambda limiter: entered(limiter.entry("k"))),
    "hold": ("concurrency", lambda slots: entered(slots.hold("k"))),
    "guard entry": ("guard", lambda guard: entered(guard.entry("k"))),
    "waiting": ("limiter", lambda limiter: limiter.acquire("k")),
}


@pytest.mark.parametrize("url", ["memory://", "redis://127.0.0.1:1/0"])
@pytest.mark.parametrize("name", CALLS)
def test_under_another_framework_a_call_says_what_to_do(url: str, name: str) -> None:
    """The calls are driven as trio drives them: there is no event loop of asyncio, and nothing is
    taken that they yield to one. Some of `memory://` need none, and end.
    """
    owner, call = CALLS[name]
    made = OWNERS[owner](url)
    end: BaseException | None = None
    for _ in range(100):
        with pytest.raises((DistwindowError, StopIteration)) as ended:
            pytest.fail(f"it yields {call(made).send(None)!r}")
        end = ended.value
        if not isinstance(end, StopIteration):
            break
    if url != "memory://" or name.endswith(("entered", "closed", "waiting")):
        assert isinstance(end, ConfigurationError)
        assert "under trio" in str(end)


OWN_LIVES: dict[str, Callable[[], Any]] = {
    "limiter": lambda: Limiter("memory://", "5/hour"),
    "concurrency": lambda: Concurrency("memory://", 5),
    "breaker": lambda: CircuitBreaker("memory://", ErrorCount(5)),
    "adaptive": lambda: AdaptiveBreaker("memory://"),
    "guard": lambda: Guard("memory://", rules=[FlowRule("k", 5)]),
}
NOTHING = r"was (entered|closed) before, and its own `with` block limits nothing: .* a new one"


@pytest.mark.parametrize("name", OWN_LIVES)
def test_a_second_with_of_the_object_itself(name: str) -> None:
    made = OWN_LIVES[name]()
    with made, pytest.raises(RuntimeError, match=NOTHING), made:
        pytest.fail("the block has begun")
    closed = OWN_LIVES[name]()
    closed.close()
    for one in (made, closed):
        with pytest.raises(RuntimeError, match=NOTHING), one:
            pytest.fail("the block has begun")


@pytest.mark.parametrize("name", MADE)
async def test_a_second_async_with_of_the_object_itself(name: str) -> None:
    made = MADE[name]()
    async with made:
        with pytest.raises(RuntimeError, match=NOTHING):
            await made.__aenter__()
    with pytest.raises(RuntimeError, match=NOTHING):
        await made.__aenter__()


@pytest.mark.parametrize("name", BLOCKS)
@pytest.mark.parametrize("kinds", [MADE, OWN_LIVES], ids=["awaited", "blocking"])
def test_a_block_is_no_condition(name: str, kinds: dict[str, Callable[[], Any]]) -> None:
    owner, make = BLOCKS[name]
    written = "`async with " if kinds is MADE else "`with "
    with pytest.raises(TypeError, match=f"as a condition it would admit .*: write {written}"):
        assert make(kinds[owner]())
