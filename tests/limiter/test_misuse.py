"""Mistakes that would pass unnoticed, or be hard to understand without an error of their own:
clocks, refunds, keys, copies. And the `repr` of limiters.
"""

from __future__ import annotations

import asyncio
import copy
import functools
import multiprocessing
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import redis
import redis.asyncio

from distwindow import AsyncLimiter, ConfigurationError, Decision, Limiter
from distwindow.support.async_use import result_of
from tests.clock_and_stores import ManualClock
from tests.limiter.first_call import SECRET, each_limiter

# -- clocks ---------------------------------------------------------------------------------------


class AwaitedClock(ManualClock):
    # Not the signature of `ManualClock`: limiters have to refuse such a clock.
    async def sleep(self, seconds: float) -> None:  # type: ignore[override]
        self.advance(seconds)


class Sleep:
    async def __call__(self, seconds: float) -> None: ...


class ObjectClock(ManualClock):
    # Not a method: limiters have to notice that it is awaited.
    sleep = Sleep()  # type: ignore[assignment]


class PartialClock(ManualClock):
    # Not a method: limiters have to notice that it is awaited.
    sleep = staticmethod(functools.partial(asyncio.sleep))  # type: ignore[assignment]


@each_limiter
@pytest.mark.parametrize("store", ["memory://", "redis://127.0.0.1:1/0"])
@pytest.mark.parametrize("clock", [AwaitedClock, ObjectClock, PartialClock])
def test_a_clock_whose_sleep_is_awaited(
    limiter_class: Any, store: str, clock: Callable[[], Any]
) -> None:
    instead = "its sleep is a coroutine function, .* write it as a plain function: def sleep"
    with pytest.raises(ConfigurationError, match=instead):
        limiter_class(store, "1/second", time=clock())


def test_a_clock_whose_sleep_returns_a_coroutine() -> None:
    """The first sleep notices it and raises, so that no call waits in a busy loop."""
    clock = ManualClock()
    # An object's own attribute, in place of the method.
    clock.sleep = lambda seconds: AwaitedClock().sleep(seconds)  # type: ignore[assignment, method-assign]
    limiter = Limiter("memory://", "1/second", time=clock)
    limiter.acquire("k")
    with pytest.raises(ConfigurationError, match="returns a coroutine, which nothing awaits"):
        limiter.acquire("k", timeout=5)


@each_limiter
def test_a_clock_that_is_a_class(limiter_class: Any) -> None:
    with pytest.raises(ConfigurationError, match="time=ManualClock is a class; make an object"):
        limiter_class("memory://", "1/second", time=ManualClock)


@each_limiter
async def test_a_plain_sleep_serves_both(limiter_class: Any) -> None:
    clock = ManualClock()
    limiter = limiter_class("memory://", "1/second", time=clock)
    began = clock.monotonic()
    for _ in range(3):
        assert await result_of(limiter.acquire("k"))
    assert 1 < clock.monotonic() - began < 3


# -- refunds --------------------------------------------------------------------------------------


@each_limiter
@pytest.mark.parametrize("thing", [None, True, 1, "user:42", (True, "k", 1), object()])
async def test_a_refund_of_what_is_no_decision(limiter_class: Any, thing: Any) -> None:
    message = "refund takes the Decision that try_acquire or acquire has returned, not "
    with pytest.raises(TypeError) as caught:
        await result_of(limiter_class("memory://", "1/second").refund(thing))
    assert str(caught.value) == message + repr(thing)


async def test_a_refund_of_a_call_that_was_not_awaited() -> None:
    limiter = AsyncLimiter("memory://", "1/second")
    call = limiter.try_acquire("k")
    with pytest.raises(TypeError, match=r"not <.*>; await the call first"):
        # A coroutine is no decision, as is tested here.
        await limiter.refund(call)  # type: ignore[arg-type]
    await call


@each_limiter
async def test_a_refund_of_what_was_not_charged(limiter_class: Any) -> None:
    limiter = limiter_class("memory://", "1/hour")
    peeked = await result_of(limiter.peek("k"))
    assert await result_of(limiter.try_acquire("k"))
    refused = await result_of(limiter.try_acquire("k"))
    nothing = "nothing was charged by this decision, as {}; there is nothing to give back"
    for decision, why in [(refused, "the call was refused"), (peeked, "peek counts nothing")]:
        with pytest.raises(ValueError, match=nothing.format(why)):
            await result_of(limiter.refund(decision))


# -- keys -----------------------------------------------------------------------------------------


@each_limiter
@pytest.mark.parametrize("mode", ["memory", "direct", "leased", "eventual"])
@pytest.mark.parametrize("key", [b"text", b"\xff"])
async def test_a_memoryview_is_no_key(
    limiter_class: Any, mode: str, key: bytes, redis_url: str, prefix: str
) -> None:
    """This holds also where equal bytes have been used as a key before."""
    options = {} if mode == "memory" else {"consistency": mode, "timeout": 5}
    limiter = limiter_class(
        "memory://" if mode == "memory" else redis_url, "4/hour", prefix=prefix, **options
    )
    decisions: list[Decision] = []
    for _ in range(6):
        with pytest.raises(TypeError, match="a key is str, bytes or Key, not memoryview"):
            await result_of(limiter.try_acquire(memoryview(key)))
        decisions.append(await result_of(limiter.try_acquire(key)))
    assert not decisions[-1]
    for name in ("acquire", "peek", "stats", "reset"):
        with pytest.raises(TypeError, match="a key is str, bytes or Key, not memoryview"):
            await result_of(getattr(limiter, name)(memoryview(key)))
    await result_of(limiter.close() if limiter_class is Limiter else limiter.aclose())


# -- copies ---------------------------------------------------------------------------------------


@each_limiter
@pytest.mark.parametrize("store", ["memory://", "redis://127.0.0.1:1/0"])
@pytest.mark.parametrize(
    "made",
    [
        *(functools.partial(pickle.dumps, protocol=n) for n in range(pickle.HIGHEST_PROTOCOL + 1)),
        copy.copy,
        copy.deepcopy,
    ],
)
def test_the_error_of_a_copy_names_where_to_make_another_limiter(
    limiter_class: Any, store: str, made: Callable[[Any], Any]
) -> None:
    message = f"{limiter_class.__name__} cannot be pickled or copied, .*; make one in each process"
    with pytest.raises(TypeError, match=message):
        made(limiter_class(store, "1/second"))


def test_a_limiter_as_an_argument_of_a_spawned_process() -> None:
    context = multiprocessing.get_context("spawn")
    process = context.Process(target=print, args=(Limiter("memory://", "1/second"),))
    with pytest.raises(TypeError, match="Limiter cannot be pickled or copied"):
        process.start()


# -- repr -----------------------------------------------------------------------------------------


@each_limiter
def test_the_repr_of_a_limiter(limiter_class: Any) -> None:
    limiter = limiter_class(
        f"redis://user:{SECRET}@host:6379/0",
        ["100/second", "1000/hour strict"],
        prefix="api",
        consistency="leased",
    )
    assert repr(limiter) == (
        f"{limiter_class.__name__}('redis://user:***@host:6379/0', '100/second; 1000/hour strict', "
        "prefix='api', consistency='leased')"
    )
    assert "'memory://', '1/second'" in repr(limiter_class("memory://", "1/second"))


def test_the_repr_of_limiters_of_clients() -> None:
    client = redis.Redis(host="host", password=SECRET)
    assert "'Redis client of host:6379', '1/second'" in repr(Limiter(client, "1/second"))
    local = redis.Redis(unix_socket_path="/run/redis.sock", password=SECRET)
    assert "'Redis client of /run/redis.sock'" in repr(Limiter(local, "1/second"))
    awaiting = redis.asyncio.Redis(host="host", port=7, password=SECRET)
    assert "'Redis client of host:7'" in repr(AsyncLimiter(awaiting, "1/second"))
