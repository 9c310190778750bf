"""`priority=True` on both limiters: what is borrowed, how long callers wait, what becomes of the
permits. Each call has a given time: in memory, and on Redis.
"""

from __future__ import annotations

import asyncio
import math
import re
import threading
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
import redis

from distwindow import AsyncLimiter, ConfigurationError, Limiter, RateLimitExceeded
from distwindow.runtime.steps import Sleep
from distwindow.waiting.waiting import PermitWaiter
from tests.clock_and_stores import Awaited, ManualClock, fresh_key
from tests.limiter.first_call import each_limiter, error_of
from tests.servers import until

Scenario = Callable[[Any, str, ManualClock], Awaitable[Any]]
Run = Callable[..., Any]


KINDS = ["blocking", "asyncio"]


def runner(kind: str, where: str) -> Run:
    """Return a function that runs `scenario(limiter, key, clock)` with a limiter of this kind, all
    of whose calls are awaited. It begins with a minute of the clock.
    """

    async def play(scenario: Scenario, limits: str, **options: Any) -> None:
        clock = ManualClock(1_700_000_040_000)
        common: Any = {"clock": "client", "time": clock, "timeout": 10, **options}
        if kind == "blocking":
            with Limiter(where, limits, **common) as blocking:
                await scenario(Awaited(blocking), fresh_key(), clock)
        else:
            async with AsyncLimiter(where, limits, **common) as limiter:
                await scenario(limiter, fresh_key(), clock)

    return lambda scenario, limits, **options: asyncio.run(play(scenario, limits, **options))


@pytest.fixture(params=KINDS)
def run(request: pytest.FixtureRequest, where: str) -> Run:
    """Return the runner of either kind, in memory and on Redis."""
    return runner(request.param, where)


@pytest.fixture(params=KINDS)
def run_in_memory(request: pytest.FixtureRequest) -> Run:
    """Return the runner of either kind, in memory: there a wait only moves the clock."""
    return runner(request.param, "memory://")


async def first_call(
    limiter_class: type, store: str, method: str, *args: Any, **options: Any
) -> None:
    """Make the first call of a new limiter, with priority unless `options` say otherwise."""
    options.setdefault("priority", True)
    if limiter_class is Limiter:
        getattr(Limiter(store, "5/minute"), method)("key", *args, **options)
    else:
        await getattr(AsyncLimiter(store, "5/minute"), method)("key", *args, **options)


WAIT = {"max_wait": 600.0}


def test_a_full_window_lends_permits_of_the_first_bucket_with_room(run: Run) -> None:
    async def scenario(limiter: Any, key: str, clock: ManualClock) -> None:
        await limiter.try_acquire(key, 3)
        clock.move(60_000)
        await limiter.try_acquire(key, 3)
        assert not await limiter.try_acquire(key)
        decision = await limiter.try_acquire(key, 2, priority=True)
        # The three permits of the first bucket leave the window after five minutes.
        assert (decision.allowed, decision.reason, decision.wait) == (True, "borrowed", 240.0)
        assert decision.retry_after == 0.0
        assert decision.remaining == 0
        # One permit more would borrow more than half of the limit, 3, in a window.
        assert (await limiter.try_acquire(key, 1, priority=True)).wait == 240.0
        refused = await limiter.try_acquire(key, 1, priority=True)
        assert (refused.allowed, refused.reason) == (False, "over_limit")

    run(scenario, "6/5 minutes 5 buckets", **WAIT)


def test_with_room_a_priority_call_is_a_plain_one(run: Run) -> None:
    async def scenario(limiter: Any, key: str, clock: ManualClock) -> None:
        decision = await limiter.try_acquire(key, 2, priority=True)
        assert (decision.allowed, decision.reason, decision.wait) == (True, "ok", 0.0)
        assert decision.remaining == 4
        assert (await limiter.stats(key)).borrowed == 0
        assert await limiter.refund(decision) == 2

    run(scenario, "6/5 minutes 5 buckets", **WAIT)


def test_borrowed_permits_enter_their_bucket_even_if_nobody_opens_it(run: Run) -> None:
    async def scenario(limiter: Any, key: str, clock: ManualClock) -> None:
        await limiter.try_acquire(key, 6)
        decision = await limiter.try_acquire(key, 2, priority=True)
        assert decision.wait == 300.0
        stats = await limiter.stats(key)
        assert (stats.passed, stats.borrowed, stats.remaining) == (6, 2, 0)
        clock.move(300_000 - 1)
        assert (await limiter.stats(key)).passed == 6
        clock.move(1)
        for _ in range(5):  # until the bucket expires, five minutes later
            stats = await limiter.stats(key)
            assert (stats.passed, stats.borrowed, stats.remaining) == (2, 2, 4)
            clock.move(60_000)
        stats = await limiter.stats(key)
        assert (stats.passed, stats.borrowed, stats.remaining) == (0, 0, 6)

    run(scenario, "6/5 minutes 5 buckets", **WAIT)


def test_plain_calls_leave_room_for_what_is_promised(run: Run) -> None:
    async def scenario(limiter: Any, key: str, clock: ManualClock) -> None:
        await limiter.try_acquire(key, 5)
        clock.move(60_000)
        assert (await limiter.try_acquire(key, 3, priority=True)).wait == 240.0
        # One permit is left in this window, but the window with the promised three has two more.
        assert (await limiter.try_acquire(key, 1)).allowed
        assert not (await limiter.try_acquire(key, 1)).allowed
        clock.move(240_000)
        assert not (await limiter.try_acquire(key, 3)).allowed
        assert (await limiter.try_acquire(key, 2)).remaining == 0

    run(scenario, "6/5 minutes 5 buckets", **WAIT)


def test_acquire_waits_the_borrowed_time_out(run_in_memory: Run) -> None:
    async def scenario(limiter: Any, key: str, clock: ManualClock) -> None:
        await limiter.acquire(key, 6, priority=True)
        assert clock.slept == []
        decision = await limiter.acquire(key, 2, priority=True)
        assert decision.reason == "borrowed"
        assert sum(clock.slept) == pytest.approx(300.0)
        assert (await limiter.stats(key)).passed == 2

    run_in_memory(scenario, "6/5 minutes 5 buckets", **WAIT)


def test_acquire_waits_for_a_moment_at_which_it_can_borrow(run_in_memory: Run) -> None:
    async def scenario(limiter: Any, key: str, clock: ManualClock) -> None:
        began = clock.now_ms()
        await limiter.acquire(key, 6)
        decision = await limiter.acquire(key, 2, priority=True)
        # Sixty seconds before the bucket begins it could borrow from it.
        assert (decision.reason, decision.wait) == ("borrowed", 60.0)
        assert clock.slept == [pytest.approx(240.0), pytest.approx(60.0)]
        assert clock.now_ms() == began + 300_000

    run_in_memory(scenario, "6/5 minutes 5 buckets", max_wait=60.0)


@pytest.mark.parametrize("timeout", [0.0, 0.5, 59.0, 200.0, 239.999, 299.999])
def test_acquire_does_not_borrow_beyond_its_timeout(run_in_memory: Run, timeout: float) -> None:
    async def scenario(limiter: Any, key: str, clock: ManualClock) -> None:
        await limiter.acquire(key, 6)
        with pytest.raises(RateLimitExceeded):
            await limiter.acquire(key, 2, timeout=timeout, priority=True)
        assert sum(clock.slept) <= timeout
        assert len(clock.slept) <= 2  # it does not ask ever more often as the timeout comes nearer
        stats = await limiter.stats(key)
        assert stats.borrowed == 0

    run_in_memory(scenario, "6/5 minutes 5 buckets", max_wait=60.0)


def test_a_refund_gives_back_in_its_own_bucket_before_and_after_it_began(run: Run) -> None:
    async def scenario(limiter: Any, key: str, clock: ManualClock) -> None:
        await limiter.try_acquire(key, 6)
        first = await limiter.try_acquire(key, 2, priority=True)
        second = await limiter.try_acquire(key, 1, priority=True)
        assert await limiter.refund(first) == 2
        assert (await limiter.stats(key)).borrowed == 1
        # What was given back can be borrowed again, and no more.
        assert (await limiter.try_acquire(key, 2, priority=True)).wait == first.wait
        assert not await limiter.try_acquire(key, 1, priority=True)
        clock.move(300_000)
        assert (await limiter.stats(key)).passed == 3
        assert await limiter.refund(second) == 1
        stats = await limiter.stats(key)
        assert (stats.passed, stats.borrowed) == (2, 2)

    run(scenario, "6/5 minutes 5 buckets", **WAIT)


@pytest.mark.parametrize("options", [{"max_wait": 0}, {"borrow_share": 0}, {"max_wait": 59.9}])
def test_settings_under_which_nothing_is_lent(run: Run, options: dict[str, Any]) -> None:
    async def scenario(limiter: Any, key: str, clock: ManualClock) -> None:
        await limiter.try_acquire(key, 6)
        assert not await limiter.try_acquire(key, 1, priority=True)
        stats = await limiter.stats(key)
        assert (stats.passed, stats.blocked, stats.borrowed) == (6, 1, 0)

    run(scenario, "6/minute 1 buckets", **(WAIT | options))


def test_a_share_of_one_lends_the_whole_limit(run: Run) -> None:
    async def scenario(limiter: Any, key: str, clock: ManualClock) -> None:
        await limiter.try_acquire(key, 6)
        assert (await limiter.try_acquire(key, 6, priority=True)).wait == 60.0
        clock.move(60_000)
        refused = await limiter.try_acquire(key)
        assert (refused.allowed, refused.retry_after) == (False, 60.0)

    run(scenario, "6/minute 1 buckets", borrow_share=1, **WAIT)


def test_a_share_is_taken_as_it_is_written(run: Run) -> None:
    """0.29 * 100 is less than 29 as a float."""

    async def scenario(limiter: Any, key: str, clock: ManualClock) -> None:
        await limiter.try_acquire(key, 100)
        assert not await limiter.try_acquire(key, 30, priority=True)
        assert await limiter.try_acquire(key, 29, priority=True)

    run(scenario, "100/minute 1 buckets", borrow_share=0.29, **WAIT)


def test_of_several_limits_all_lend_or_none(run: Run) -> None:
    """The minute has room, the second has none: the call is counted in the minute when it
    proceeds, and the minute lends nothing, because its bucket of then is the newest one.
    """

    async def scenario(limiter: Any, key: str, clock: ManualClock) -> None:
        await limiter.try_acquire(key, 4)
        decision = await limiter.try_acquire(key, 2, priority=True)
        assert (decision.reason, decision.wait) == ("borrowed", 60.0)
        minute, hour = (await limiter.stats(key)).windows
        assert (minute.passed, minute.borrowed, minute.borrowed_coming) == (4, 2, 2)
        assert (hour.passed, hour.borrowed, hour.borrowed_coming) == (6, 0, 0)
        # The hour has no permit left that may be lent: nothing is counted in the minute either.
        clock.move(60_000)
        assert await limiter.try_acquire(key, 2)
        refused = await limiter.try_acquire(key, 1, priority=True)
        assert not refused.allowed
        minute, hour = (await limiter.stats(key)).windows
        assert (minute.passed, minute.borrowed_coming, hour.passed, hour.borrowed_coming) == (
            4,
            0,
            8,
            0,
        )
        assert await limiter.refund(decision) == 2
        minute, hour = (await limiter.stats(key)).windows
        assert (minute.passed, minute.borrowed, hour.passed) == (2, 0, 6)

    run(scenario, "4/minute 1 buckets; 8/hour 1 buckets", **WAIT)


# -- consistency ----------------------------------------------------------------------------------


@each_limiter
def test_eventual_cannot_lend(limiter_class: type, redis_url: str) -> None:
    async def call() -> None:
        limiter = limiter_class(redis_url, "5/minute", consistency="eventual")
        if limiter_class is Limiter:
            limiter.try_acquire(fresh_key(), priority=True)
        else:
            await limiter.try_acquire(fresh_key(), priority=True)

    with pytest.raises(ConfigurationError, match='needs consistency="direct" or "leased"'):
        asyncio.run(call())


@each_limiter
@pytest.mark.parametrize("terms", ["paced 1s", "warmup 10m"])
def test_shaped_limits_cannot_lend(limiter_class: type, terms: str, redis_url: str) -> None:
    async def call() -> None:
        limiter = limiter_class(redis_url, f"60/minute {terms}")
        result = limiter.try_acquire(fresh_key(), priority=True)
        if limiter_class is AsyncLimiter:
            await result

    with pytest.raises(ConfigurationError, match="neither paced nor warm up"):
        asyncio.run(call())


@pytest.mark.parametrize("consistency", ["direct", "leased", "eventual"])
def test_in_memory_every_consistency_lends(consistency: Any) -> None:
    limiter = Limiter("memory://", "2/minute 1 buckets", consistency=consistency, max_wait=60)
    limiter.try_acquire("key", 2)
    assert limiter.try_acquire("key", priority=True).reason == "borrowed"


def test_a_priority_call_that_borrows_nothing_leaves_what_a_plain_call_does(redis_url: str) -> None:
    plain, other = fresh_key(), fresh_key()
    with (
        Limiter(redis_url, "2/hour", timeout=10) as limiter,
        redis.Redis.from_url(redis_url) as client,
    ):
        for _ in range(3):
            limiter.try_acquire(plain)
            limiter.try_acquire(other)
        fields = client.hkeys(next(client.scan_iter(f"*{{{plain}}}*", count=10_000)))
        limiter.try_acquire(other, priority=True)
        for key in (plain, other):
            assert len(list(client.scan_iter(f"*{{{key}}}*", count=10_000))) == 1
        assert client.hkeys(next(client.scan_iter(f"*{{{other}}}*", count=10_000))) == fields


def test_leased_permits_are_left_to_plain_calls(redis_url: str) -> None:
    key = fresh_key()
    with Limiter(redis_url, "40/hour 1 buckets", consistency="leased", timeout=10) as limiter:
        until(lambda: limiter.try_acquire(key).source == "lease", what="a lease")
        decision = limiter.try_acquire(key, priority=True)
        assert (decision.source, decision.reason, decision.wait) == ("store", "ok", 0.0)


def test_a_cached_refusal_does_not_refuse_a_priority_call(redis_url: str) -> None:
    key = fresh_key()
    with Limiter(redis_url, "2/hour 1 buckets", max_wait=3600, timeout=10) as limiter:
        limiter.try_acquire(key, 2)
        assert limiter.try_acquire(key).source == "store"
        assert limiter.try_acquire(key).source == "deny_cache"
        decision = limiter.try_acquire(key, priority=True)
        assert (decision.source, decision.reason) == ("store", "borrowed")
        assert 0 < decision.wait <= 3600


# -- queues ---------------------------------------------------------------------------------------


def test_a_priority_caller_does_not_wait_for_those_without() -> None:
    clock = ManualClock(auto_advance=False)
    limiter = Limiter("memory://", "2/minute 1 buckets", time=clock, max_wait=60)
    limiter.acquire("key", 2)
    waiter = threading.Thread(target=limiter.acquire, args=["key", 2], daemon=True)
    waiter.start()
    until(lambda: len(clock.slept) == 1, what="the waiter without priority sleeps")
    admitted: list[Any] = []
    first = threading.Thread(
        target=lambda: admitted.append(limiter.acquire("key", priority=True)), daemon=True
    )
    first.start()
    until(lambda: len(clock.slept) == 2, what="the priority caller sleeps its wait")
    clock.move(60_000)
    until(lambda: bool(admitted), what="the priority caller is served")
    assert admitted[0].reason == "borrowed"
    assert limiter.stats("key").passed == 1  # the other one needs two, and has to wait on
    clock.move(60_000)
    waiter.join(10)
    assert not waiter.is_alive()
    first.join(10)


# -- bad input ------------------------------------------------------------------------------------


@each_limiter
@pytest.mark.parametrize(
    ("option", "value", "message"),
    [
        *(("max_wait", v, "is not a number of seconds of at least 0")
          for v in (-1, -0.001, math.nan, math.inf, True, "1", None)),
        *(("borrow_share", v, "is not a part of the limit, from 0 to 1")
          for v in (-0.1, 1.1, math.nan, math.inf, True, "x", None)),
    ],
)  # fmt: skip
def test_an_option_that_can_never_work(
    limiter_class: type, option: str, value: Any, message: str
) -> None:
    exc = error_of(limiter_class, "memory://", **{option: value})
    assert isinstance(exc, ConfigurationError)
    assert f"{option}={value!r} {message}" in str(exc)


@each_limiter
@pytest.mark.parametrize("method", ["try_acquire", "acquire"])
@pytest.mark.parametrize("priority", [1, "high", 0.5, [1]])
def test_a_priority_is_true_or_false(limiter_class: type, method: str, priority: Any) -> None:
    message = re.escape(f"priority={priority!r} is neither True nor False")
    with pytest.raises(ConfigurationError, match=message):
        asyncio.run(first_call(limiter_class, "memory://", method, priority=priority))


@each_limiter
@pytest.mark.parametrize(("cost", "message"), [(0, "at least 1"), (6, "can never be admitted")])
def test_the_cost_of_a_priority_call_is_checked(
    limiter_class: type, cost: int, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        asyncio.run(first_call(limiter_class, "memory://", "try_acquire", cost))


@pytest.mark.parametrize(("timeout", "waits"), [(0.2, False), (0.6, True), (None, True)])
def test_a_caller_borrows_within_its_timeout_and_leaves_the_queue_before_it_waits(
    timeout: float | None, waits: bool
) -> None:
    """So the next one borrows while it waits."""
    clock = ManualClock(1_700_000_040_000)
    limiter = Limiter("memory://", "10/10s", max_wait=1.0, time=clock)
    limiter.try_acquire("k", cost=10)
    clock.advance(9.5)
    call = limiter.decider.borrowing.call("k", 1, True)
    queues = limiter.decider.queues
    waiter = PermitWaiter(queues, call.acquire, timeout, priority=True)
    waiter._queues.join(waiter)
    operation = call.wait_until_admitted(waiter)
    step: Any = next(operation)
    reply = limiter._store.execute(step)
    if waits:
        assert operation.send(reply) == Sleep(0.5)
        assert not queues.by_name
    else:
        with pytest.raises(RateLimitExceeded):
            operation.send(reply)
