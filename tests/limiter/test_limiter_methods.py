"""What `peek`, `stats`, `refund`, `reset`, `entry` and `limit` of both limiters promise: with a
manual clock, in memory and on Redis.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

import pytest

from distwindow import AsyncLimiter, Limiter, RateLimitExceeded
from tests.clock_and_stores import Awaited, ManualClock, fresh_key


@pytest.fixture
def limiter(where: str, clock: ManualClock) -> Iterator[Limiter]:
    with Limiter(where, "5/minute", clock="client", time=clock, timeout=10) as one:
        yield one


RunScenario = Callable[[Callable[[Any], Any]], Any]


@pytest.fixture(params=["blocking", "asyncio"])
def run(request: pytest.FixtureRequest, where: str, clock: ManualClock) -> RunScenario:
    """Return a function that calls `await scenario(limiter)`, with a limiter of either kind, all
    of whose calls are awaited.
    """

    async def play(scenario: Callable[[Any], Awaitable[Any]]) -> Any:
        options: Any = {"clock": "client", "time": clock, "timeout": 10}
        if request.param != "blocking":
            async with AsyncLimiter(where, "5/minute", **options) as one:
                return await scenario(one)
        with Limiter(where, "5/minute", **options) as other:
            return await scenario(Awaited(other))

    return lambda scenario: asyncio.run(play(scenario))


# -- peek, stats, refund, reset -------------------------------------------------------------------


def test_peek_counts_nothing(run: RunScenario) -> None:
    async def scenario(limiter: Any) -> None:
        key = fresh_key()
        for _ in range(20):
            decision = await limiter.peek(key)
            assert (decision.allowed, decision.remaining, decision.reset_after) == (True, 5, 0.0)
        for _ in range(5):
            await limiter.try_acquire(key)
        for _ in range(20):
            decision = await limiter.peek(key)
            assert (decision.allowed, decision.remaining, decision.reason) == (
                False,
                0,
                "over_limit",
            )
        stats = await limiter.stats(key)
        assert (stats.passed, stats.blocked) == (5, 0)
        with pytest.raises(ValueError, match="nothing was charged"):
            await limiter.refund(await limiter.peek(fresh_key()))

    run(scenario)


def test_a_decision_explains_itself(run: RunScenario, clock: ManualClock) -> None:
    async def scenario(limiter: Any) -> None:
        key = fresh_key()
        clock.move(-(clock.now_ms() % 60_000))
        decision = await limiter.try_acquire(key, 2)
        assert decision
        assert decision == (
            True, key, 2, limiter_limit(limiter), 3, 0.0, 60.0, 0.0, "ok", decision.source,
            clock.now_ms(), decision.charged,
        )  # fmt: skip
        clock.move(7_000)
        refused = await limiter.try_acquire(key, 4)
        assert not refused
        assert (refused.remaining, refused.retry_after, refused.reset_after) == (3, 53.0, 53.0)
        assert refused.charged is None
        assert refused.source in ("store", "local")

    run(scenario)


def limiter_limit(limiter: Any) -> Any:
    return (limiter._limiter if isinstance(limiter, Awaited) else limiter).limits[0]


def test_a_refund_gives_back_in_its_own_bucket_only(run: RunScenario, clock: ManualClock) -> None:
    async def scenario(limiter: Any) -> None:
        key = fresh_key()
        old = await limiter.try_acquire(key, 2)
        clock.move(12_000)
        new = await limiter.try_acquire(key, 3)
        assert await limiter.refund(old) == 2
        assert [b.passed for b in (await limiter.stats(key)).buckets if b.passed] == [3]
        assert await limiter.refund(old) == 0, "there is nothing left of it in its bucket"
        assert await limiter.refund(new) == 3
        assert (await limiter.peek(key)).remaining == 5
        too_old = await limiter.try_acquire(key)
        clock.move(60_000)
        await limiter.try_acquire(key, 5)
        assert await limiter.refund(too_old) == 0, "its bucket has left the window"
        assert not await limiter.try_acquire(key)

    run(scenario)


def test_a_refund_returns_what_the_limit_that_held_most_has_given_back(
    where: str, clock: ManualClock
) -> None:
    limits = "5/minute; 20/hour"
    with Limiter(where, limits, clock="client", time=clock, timeout=10) as limiter:
        key = fresh_key()
        decision = limiter.try_acquire(key, 3)
        clock.move(120_000)  # the minute is over, so its permits have returned by themselves
        assert limiter.refund(decision) == 3
        assert [window.remaining for window in limiter.stats(key).windows] == [5, 20]
        assert limiter.refund(decision) == 0, "no limit holds anything of it any more"


def test_reset_frees_everything(run: RunScenario) -> None:
    async def scenario(limiter: Any) -> None:
        key = fresh_key()
        while await limiter.try_acquire(key):
            pass
        assert await limiter.reset(key) is None
        decision = await limiter.try_acquire(key)
        assert (decision.allowed, decision.remaining) == (True, 4)
        stats = await limiter.stats(key)
        assert (stats.passed, stats.blocked) == (1, 0)
        await limiter.reset(fresh_key())

    run(scenario)


# -- entry ----------------------------------------------------------------------------------------


class WorkError(Exception):
    pass


def fail_after(ms: int, clock: ManualClock) -> None:
    clock.move(ms)
    raise WorkError("mine")


def test_an_entry_records_success_error_and_time(limiter: Limiter, clock: ManualClock) -> None:
    key = fresh_key()
    with limiter.entry(key) as entry:
        assert entry.decision.remaining == 4
        clock.move(37)
    with pytest.raises(WorkError, match="mine"), limiter.entry(key, 2):
        fail_after(5, clock)
    stats = limiter.stats(key)
    assert (stats.passed, stats.success, stats.error) == (3, 1, 1)
    assert (stats.rt_sum_ms, stats.rt_min_ms, stats.avg_rt_ms) == (42, 5, 21.0)
    entered = False
    with pytest.raises(RateLimitExceeded) as caught, limiter.entry(key, 3):
        entered = True
    assert not entered
    assert caught.value.decision.cost == 3
    assert caught.value.retry_after == caught.value.decision.retry_after > 0
    stats = limiter.stats(key)
    assert (stats.passed, stats.blocked, stats.success + stats.error) == (3, 3, 2)


async def test_an_entry_of_an_asyncio_limiter_records_them_too(
    where: str, clock: ManualClock
) -> None:
    key = fresh_key()
    options: Any = {"clock": "client", "time": clock, "timeout": 10}
    async with AsyncLimiter(where, "2/minute", **options) as limiter:
        async with limiter.entry(key) as entry:
            assert entry.decision.remaining == 1
            clock.move(11)
        with pytest.raises(WorkError):
            async with limiter.entry(key):
                raise WorkError
        with pytest.raises(RateLimitExceeded):
            async with limiter.entry(key):
                pytest.fail("refused, and entered all the same")
        stats = await limiter.stats(key)
    assert (stats.passed, stats.blocked, stats.success, stats.error) == (2, 1, 1, 1)
    assert (stats.rt_sum_ms, stats.rt_min_ms) == (11, 0)


def test_an_entry_that_was_not_entered_has_no_decision(limiter: Limiter) -> None:
    with pytest.raises(RuntimeError, match="not been entered"):
        _ = limiter.entry(fresh_key()).decision


# -- the decorator --------------------------------------------------------------------------------


def test_a_limited_function(limiter: Limiter) -> None:
    key = fresh_key()

    @limiter.limit(key, cost=2)
    def double(x: int) -> int:
        """Twice."""
        return 2 * x

    assert (double(1), double(x=4)) == (2, 8)
    with pytest.raises(RateLimitExceeded) as caught:
        double(3)
    assert caught.value.decision.key == key
    assert (double.__name__, double.__doc__) == ("double", "Twice.")
    assert str(inspect.signature(double)) == "(x: 'int') -> 'int'"
    assert limiter.peek(key).remaining == 1


def test_key_and_cost_from_the_arguments(limiter: Limiter) -> None:
    name = fresh_key()

    class Shop:
        def __init__(self, tenant: str) -> None:
            self.tenant = tenant

        @limiter.limit("{self.tenant}", cost=lambda self, items, **_: len(items))
        def sell(self, items: list[str], *, wrapped: bool = False) -> str:
            return f"{self.tenant} {items} {wrapped}"

    one, other = Shop(f"{name}-1"), Shop(f"{name}-2")
    assert one.sell(["a", "b", "c"], wrapped=True) == f"{name}-1 ['a', 'b', 'c'] True"
    with pytest.raises(RateLimitExceeded):
        one.sell(["a", "b", "c"])
    assert other.sell(items := ["a"] * 5) == f"{name}-2 {items} False"
    with pytest.raises(ValueError, match="cost=0"):
        one.sell([])
    assert limiter.peek(f"{name}-1").remaining == 2


def test_the_functions_own_exceptions_pass_and_its_call_is_charged(limiter: Limiter) -> None:
    key = fresh_key()

    @limiter.limit(key)
    def fail() -> None:
        raise WorkError

    with pytest.raises(WorkError):
        fail()
    assert limiter.peek(key).remaining == 4


async def test_limited_coroutine_functions(where: str, clock: ManualClock) -> None:
    options: Any = {"clock": "client", "time": clock, "timeout": 10}
    async with AsyncLimiter(where, "5/minute", **options) as limiter:
        key = fresh_key()

        class Shop:
            @limiter.limit(key=lambda self, n: key, cost=lambda self, n: n)
            async def sell(self, n: int) -> int:
                return n

        assert inspect.iscoroutinefunction(Shop.sell)
        assert [await Shop().sell(2), await Shop().sell(2)] == [2, 2]
        with pytest.raises(RateLimitExceeded):
            await Shop().sell(2)
        assert await Shop().sell(1) == 1
