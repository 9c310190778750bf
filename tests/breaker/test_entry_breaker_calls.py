"""`limiter.entry(key, breaker=...)`: probes, waits, keys, cancellation, bad input; an oracle."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from distwindow import (
    AdaptiveBreaker,
    AsyncAdaptiveBreaker,
    AsyncCircuitBreaker,
    AsyncLimiter,
    BreakerOpen,
    CircuitBreaker,
    ConfigurationError,
    ErrorCount,
    Limiter,
    RateLimitExceeded,
    SlowRatio,
)
from distwindow.testing import ManualClock
from tests.breaker.entry_breaker_worlds import IN_BOTH_WORLDS, World


@IN_BOTH_WORLDS
async def test_a_probe_that_the_limit_refuses_goes_to_another_call(is_async: bool) -> None:
    world = World(is_async)
    await world.open()
    world.use_up()
    world.clock.advance(5)
    assert await world.enter() == "RateLimitExceeded"
    probe = world.breaker.call("k")
    assert await world.enter(probe) == "", "the one probe is free again"
    assert await world.enter(world.breaker.call("k")) == "BreakerOpen", "and was that one"


@IN_BOTH_WORLDS
async def test_a_probe_that_the_limit_refuses_goes_to_another_process(
    is_async: bool, redis_url: str, prefix: str
) -> None:
    clock, shared = ManualClock(), {"prefix": prefix, "timeout": 5.0, "clock": "client"}
    one, other = [
        World(is_async, None, "1/minute", redis_url, clock, shared=shared) for _ in range(2)
    ]
    assert await one.enter() == ""
    await one.leave(OSError())
    await one.result_of(one.breaker.flush())
    assert await other.enter() == "BreakerOpen"
    clock.advance(5)
    assert await one.enter(one.new_entry()) == "RateLimitExceeded"
    probe = other.breaker.call("k")
    assert await other.enter(probe) == ""
    assert await one.enter(one.new_entry()) == "BreakerOpen"
    await other.leave(context=probe)
    assert await one.result_of(one.breaker.state("k")) == "closed"
    for world in (one, other):
        await world.close()


@IN_BOTH_WORLDS
async def test_an_open_breaker_takes_no_permits_of_the_limit(is_async: bool) -> None:
    world = World(is_async)
    await world.open()
    refused = [await world.enter(world.new_entry()) for _ in range(20)]
    assert refused == ["BreakerOpen"] * 20
    world.clock.advance(5)
    assert await world.enter() == ""
    stats = Limiter(world.store, "5/minute", time=world.clock).stats("k")
    assert (stats.passed, stats.blocked) == (1, 0)


@IN_BOTH_WORLDS
async def test_the_wait_of_a_paced_limit_is_no_time_of_the_service(is_async: bool) -> None:
    rule = SlowRatio(max_rt=0.1, ratio=0.3, min_calls=1)
    world = World(is_async, rule, limit="1/second paced 5s")
    waited = 0.0
    for _ in range(2):
        entry = world.new_entry()
        began = world.clock.monotonic()
        assert await world.enter(entry) == ""
        waited = world.clock.monotonic() - began
        assert await world.leave(context=entry) == ""
    assert waited == pytest.approx(1.0)
    assert await world.enter() == "", "no call of the service was slow"
    world.clock.advance(0.2)
    await world.leave()
    assert await world.enter(world.new_entry()) == "BreakerOpen", "this one was"


@IN_BOTH_WORLDS
async def test_the_call_of_another_key(is_async: bool) -> None:
    """A limit for each user, and one breaker for the service."""
    world = World(is_async)
    entry = world.limiter.entry("user:1", breaker=world.breaker.call("payments"))
    await world.enter(entry)
    await world.leave(OSError(), entry)
    other = world.limiter.entry("user:2", breaker=world.breaker.call("payments"))
    assert await world.enter(other) == "BreakerOpen"
    assert await world.enter(world.limiter.entry("user:2", breaker=world.breaker)) == ""


@IN_BOTH_WORLDS
async def test_a_call_that_is_under_way_elsewhere_is_not_taken_away(is_async: bool) -> None:
    world = World(is_async)
    call = world.breaker.call("k")
    await world.enter(call)
    entry = world.limiter.entry("k", breaker=call)
    assert await world.enter(entry) == "RuntimeError"
    assert world.ends == []
    await world.leave(OSError(), call)
    assert world.ends == [True]


@IN_BOTH_WORLDS
async def test_an_adaptive_breaker(is_async: bool) -> None:
    world = World(is_async, limit="100/minute")
    make: Any = AsyncAdaptiveBreaker if is_async else AdaptiveBreaker
    breaker = make(world.store, k=1.1, draw=lambda: 0.0, time=world.clock)
    outcomes = []
    for _ in range(20):
        entry = world.limiter.entry("a", breaker=breaker)
        outcomes.append(await world.enter(entry))
        if not outcomes[-1]:
            await world.leave(OSError(), entry)
    assert outcomes[:5] == [""] * 5
    assert outcomes[-1] == "BreakerOpen"


async def test_a_task_that_is_cancelled_while_it_acquires_gives_the_probe_back() -> None:
    world = World(True)
    await world.open()
    world.clock.advance(5)

    async def never(*_: Any) -> Any:
        await asyncio.Event().wait()

    world.entry._settings = world.entry._settings._replace(admit=never)
    entering = asyncio.create_task(world.entry.__aenter__())
    await asyncio.sleep(0)
    entering.cancel()
    with pytest.raises(asyncio.CancelledError):
        await entering
    assert world.ends == [None]
    assert await world.enter(world.breaker.call("k")) == "", "the probe is free"


def test_what_is_no_breaker_of_this_world_is_an_error() -> None:
    clock = ManualClock()
    blocking, awaited = Limiter("memory://", "5/s", time=clock), AsyncLimiter("memory://", "5/s")
    with CircuitBreaker("memory://", ErrorCount(1)) as breaker:
        for wrong in (AsyncCircuitBreaker("memory://", ErrorCount(1)), "payments", object()):
            with pytest.raises(ConfigurationError, match="an entry of Limiter takes a CircuitBr"):
                blocking.entry("k", breaker=wrong)  # type: ignore[arg-type]
        for wrong in (breaker, breaker.call("k")):
            with pytest.raises(ConfigurationError, match="of AsyncLimiter takes an AsyncCircuitB"):
                awaited.entry("k", breaker=wrong)  # type: ignore[arg-type]


# -- the same as one inside the other -------------------------------------------------------------

STEPS = st.lists(
    st.tuples(st.sampled_from(["ok", "error", "ignored", "fail"]), st.sampled_from([0, 1, 5, 30])),
    max_size=40,
)


def outcome_of(one: Any, outer: Any, how: str) -> str:
    try:
        with outer, one as entry:
            if how == "error":
                raise OSError
            if how == "ignored":
                raise EOFError
            if how == "fail":
                entry.fail()
                if outer is not one and hasattr(outer, "fail"):
                    outer.fail()
    except (OSError, EOFError, RateLimitExceeded, BreakerOpen) as exc:
        return type(exc).__name__
    return ""


class _Nothing:
    def __enter__(self) -> None: ...

    def __exit__(self, *_: object) -> None: ...


@given(STEPS)
def test_it_is_the_same_as_an_entry_inside_a_call(steps: list[tuple[str, int]]) -> None:
    rule = ErrorCount(3, open_for=4)
    together, nested = World(False, rule, ignore=EOFError), World(False, rule, ignore=EOFError)
    for how, seconds in steps:
        one = outcome_of(together.new_entry(), _Nothing(), how)
        other = outcome_of(nested.limiter.entry("k"), nested.breaker.call("k"), how)
        assert one == other
        for world in (together, nested):
            world.clock.advance(seconds)
        assert together.ends == nested.ends
        assert together.breaker.state("k") == nested.breaker.state("k")
        assert together.limiter.stats("k") == nested.limiter.stats("k")
