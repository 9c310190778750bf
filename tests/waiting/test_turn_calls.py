"""`enqueue=True` on both limiters, and `acquire` that waits by turns. Each call has a given time,
but in the tests of `acquire`, which wait on a server with its own clock.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from distwindow import AsyncLimiter, ConfigurationError, Key, Limit, Limiter
from distwindow.waiting.commands import AcquireTurn
from tests.clock_and_stores import Awaited, ManualClock, fresh_key
from tests.event_loops import uvloop_param

Scenario = Callable[[Any, str, ManualClock], Awaitable[Any]]
Run = Callable[..., Any]


@pytest.fixture(params=["blocking", "asyncio", uvloop_param()])
def run(request: pytest.FixtureRequest, where: str) -> Run:
    """Return what runs `scenario(limiter, key, clock)` with a limiter of either kind."""

    async def play(scenario: Scenario, limits: str, **options: Any) -> None:
        clock = ManualClock(1_700_000_040_000)
        common: Any = {"clock": "client", "time": clock, "timeout": 10, **options}
        if request.param == "blocking":
            with Limiter(where, limits, **common) as blocking:
                await scenario(Awaited(blocking), fresh_key(), clock)
        else:
            async with AsyncLimiter(where, limits, **common) as limiter:
                await scenario(limiter, fresh_key(), clock)

    return lambda scenario, limits, **options: asyncio.run(play(scenario, limits, **options))


FIVE, HOURLY = "5/5 minutes 5 buckets", "10/hour 6 buckets"


def test_each_refused_call_is_told_a_turn_of_its_own(run: Run) -> None:
    async def scenario(limiter: Any, key: str, clock: ManualClock) -> None:
        for _ in range(5):
            assert await limiter.try_acquire(key, enqueue=True)
        refused = [await limiter.try_acquire(key, enqueue=True) for _ in range(4)]
        assert [decision.retry_after for decision in refused] == [300.0, 360.0, 420.0, 480.0]
        assert {(d.allowed, d.reason, d.remaining) for d in refused} == {(False, "over_limit", 0)}
        stats = await limiter.stats(key)
        assert (stats.passed, stats.blocked) == (5, 4)

    run(scenario, FIVE)


def test_a_cached_refusal_answers_plain_calls_only(run: Run, where: str) -> None:
    async def scenario(limiter: Any, key: str, clock: ManualClock) -> None:
        await limiter.try_acquire(key, 5)
        first = await limiter.try_acquire(key)
        again = await limiter.try_acquire(key)
        assert (first.retry_after, again.retry_after) == (300.0, 300.0)
        turns = [await limiter.try_acquire(key, enqueue=True) for _ in range(2)]
        assert [turn.retry_after for turn in turns] == [300.0, 360.0]
        if where != "memory://":
            assert again.source == "deny_cache"
            assert {turn.source for turn in turns} == {"store"}

    run(scenario, FIVE)


def test_what_a_turn_admits_can_be_refunded(run: Run) -> None:
    async def scenario(limiter: Any, key: str, clock: ManualClock) -> None:
        decision = await limiter.try_acquire(key, 3, enqueue=True)
        assert await limiter.refund(decision) == 3
        clock.move(-70_000)  # the ring is ahead of now
        decision = await limiter.try_acquire(key, 2, enqueue=True)
        assert await limiter.refund(decision) == 2
        assert (await limiter.stats(key)).passed == 0

    run(scenario, FIVE)


def test_reset_ends_the_line(run: Run) -> None:
    async def scenario(limiter: Any, key: str, clock: ManualClock) -> None:
        for _ in range(3):
            await limiter.try_acquire(key, 5)
            turns = [(await limiter.try_acquire(key, enqueue=True)).retry_after for _ in range(2)]
            assert turns == [300.0, 360.0]
            await limiter.reset(key)

    run(scenario, FIVE)


def test_of_several_limits_the_line_is_that_of_the_one_that_has_room_last(run: Run) -> None:
    async def scenario(limiter: Any, key: str, clock: ManualClock) -> None:
        for _ in range(5):
            assert await limiter.try_acquire(key)
        for limit, room_in_s, step_s in (FIVE, 300.0, 60.0), (HOURLY, None, 360.0):
            turns = [await limiter.try_acquire(key, enqueue=True) for _ in range(3)]
            assert {turn.limit for turn in turns} == {Limit(limit)}
            first, *later = (turn.retry_after for turn in turns)
            assert later == [first + step_s, first + 2 * step_s]
            assert first == (room_in_s or (await limiter.try_acquire(key)).retry_after)
            clock.move(300_000)
            for _ in range(5):
                await limiter.try_acquire(key)

    run(scenario, f"{FIVE}; {HOURLY}")


def test_calls_over_several_keys_take_places_in_the_line_of_what_refuses(run: Run) -> None:
    """Two crowds that have one limit in common take turns in its line, and not each its own."""

    async def scenario(limiter: Any, key: str, clock: ManualClock) -> None:
        def both(own: str) -> list[Any]:
            return [(Key(own, tag=key), HOURLY, 1), (Key("all", tag=key), FIVE, 1)]

        for _ in range(5):
            assert await limiter.try_acquire_all(both("a"), enqueue=True)
        turns = [await limiter.try_acquire_all(both("ab"[n % 2]), enqueue=True) for n in range(4)]
        assert [turn.retry_after for turn in turns] == [300.0, 360.0, 420.0, 480.0]
        assert {turn.key for turn in turns} == {Key("all", tag=key)}
        plain = await limiter.try_acquire_all(both("b"))
        assert plain.retry_after == 300.0
        clock.move(300_000)
        admitted = await limiter.try_acquire_all(both("b"), enqueue=True)
        assert await limiter.refund(admitted) == 1
        for limits in (FIVE, "5/minute paced 1s"):
            wrong = [(Key("a", tag=key), limits, 1)]
            with pytest.raises(
                ConfigurationError, match="enqueue=1 is" if limits is FIVE else "paced"
            ):
                await limiter.try_acquire_all(wrong, enqueue=1 if limits is FIVE else True)

    run(scenario, FIVE)


def test_leased_permits_are_spent_first(redis_url: str) -> None:
    with Limiter(redis_url, "1000000/hour", consistency="leased", timeout=10) as limiter:
        key = fresh_key()
        sources = [limiter.try_acquire(key, enqueue=n % 2 == 1).source for n in range(400)]
    assert "lease" in sources[1::2]


# -- what can never work ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("limits", "options", "arguments", "why"),
    [
        (FIVE, {"consistency": "eventual"}, {}, "sync_interval"),
        ("5/minute paced 1s", {}, {}, "paced"),
        ("500/minute warmup 10m", {}, {}, "warm"),
        (FIVE, {}, {"priority": True}, "exclude each other"),
        (FIVE, {}, {"enqueue": 1}, "enqueue=1 is neither True nor False"),
        (FIVE, {}, {"enqueue": "yes"}, "enqueue='yes' is neither True nor False"),
    ],
)
@pytest.mark.parametrize("kind", ["blocking", "asyncio"])
def test_calls_that_make_no_sense(
    redis_url: str,
    kind: str,
    limits: str,
    options: dict[str, Any],
    arguments: dict[str, Any],
    why: str,
) -> None:
    called = {"enqueue": True, **arguments}

    async def in_a_loop() -> None:
        async with AsyncLimiter(redis_url, limits, timeout=10, **options) as limiter:
            await limiter.try_acquire("key", **called)

    def in_this_thread() -> None:
        with Limiter(redis_url, limits, timeout=10, **options) as limiter:
            limiter.try_acquire("key", **called)

    with pytest.raises(ConfigurationError, match=why):
        asyncio.run(in_a_loop()) if kind == "asyncio" else in_this_thread()


@pytest.mark.parametrize("cost", [0, -1, 6, 1.5, True])
def test_a_cost_that_can_never_be_admitted(run: Run, cost: Any) -> None:
    async def scenario(limiter: Any, key: str, clock: ManualClock) -> None:
        with pytest.raises(ValueError, match="cost="):
            await limiter.try_acquire(key, cost, enqueue=True)
        with pytest.raises(ValueError, match="key"):
            await limiter.try_acquire("", enqueue=True)

    run(scenario, FIVE)


# -- acquire ------------------------------------------------------------------------------------


def count_turn_calls(limiter: Any) -> list[AcquireTurn]:
    """Have the calls of `acquire_turn` noted in the list that is returned."""
    sent: list[AcquireTurn] = []
    execute = limiter._store.execute

    def counted(command: Any, *args: Any) -> Any:
        if isinstance(command, AcquireTurn):
            sent.append(command)
        return execute(command, *args)

    limiter._store.execute = counted
    return sent


def test_acquire_without_waiting_is_the_plain_call(redis_url: str) -> None:
    with Limiter(redis_url, "5/minute", timeout=10) as limiter:
        sent = count_turn_calls(limiter)
        for _ in range(5):
            limiter.acquire("plain" + fresh_key())
        assert sent == []


Sent = list[list[AcquireTurn]]


def all_wait_by_turns(sent: Sent) -> bool:
    """True if each process has asked by turns, and some ask for the next turn with their own."""
    return all(sent) and any(command.takes_next for commands in sent for command in commands)


def wait_in_threads(redis_url: str) -> Sent:
    """Have 40 threads wait for one full window; return the turn calls of each process."""
    key, limiters = fresh_key(), [Limiter(redis_url, "40/300ms", timeout=10) for _ in range(4)]
    sent = [count_turn_calls(limiter) for limiter in limiters]
    admitted: list[int] = []
    while limiters[0].try_acquire(key):
        pass

    def wait(limiter: Limiter) -> None:
        admitted.append(limiter.acquire(key, timeout=60).now_ms)

    threads = [threading.Thread(target=wait, args=[limiters[n % 4]]) for n in range(40)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert len(admitted) == 40
    for limiter in limiters:
        limiter.close()
    return sent


async def wait_in_tasks(redis_url: str) -> Sent:
    limiters = [AsyncLimiter(redis_url, "40/300ms", timeout=10) for _ in range(4)]
    key, sent = fresh_key(), [count_turn_calls(limiter) for limiter in limiters]
    while await limiters[0].try_acquire(key):
        pass
    calls = [limiters[n % 4].acquire(key, timeout=60) for n in range(40)]
    assert all(await asyncio.gather(*calls))
    for limiter in limiters:
        await limiter.aclose()
    return sent


# Each limiter stands for a process, which has one place in the line. If the machine stalls, the
# window ends before all of them have to wait: then they try once more.


@pytest.mark.slow
def test_threads_of_several_processes_wait_by_turns(redis_url: str) -> None:
    for _ in range(20):
        sent = wait_in_threads(redis_url)
        if all_wait_by_turns(sent) and any(one.held_ms for calls in sent for one in calls):
            return
    pytest.fail("20 times some process did not ask by turns, or none held its turn")


@pytest.mark.slow
async def test_tasks_of_several_processes_wait_by_turns(redis_url: str) -> None:
    for _ in range(20):
        if all_wait_by_turns(await wait_in_tasks(redis_url)):
            return
    pytest.fail("20 times some process did not ask by turns")


@pytest.mark.parametrize("kind", ["eventual", "paced"])
def test_where_there_are_no_turns_acquire_waits_as_before(redis_url: str, kind: str) -> None:
    limits = "5/100ms 1 buckets" if kind == "eventual" else "50/second paced 1s"
    options: Any = {"consistency": "eventual", "sync_interval": 0.01} if kind == "eventual" else {}
    with Limiter(redis_url, limits, timeout=10, **options) as limiter:
        sent, key = count_turn_calls(limiter), fresh_key()
        assert all(limiter.acquire(key, timeout=20) for _ in range(12))
        assert sent == []


def test_leases_wait_by_turns_and_lease_again(redis_url: str) -> None:
    with Limiter(redis_url, "200/100ms 1 buckets", consistency="leased", timeout=10) as limiter:
        key = fresh_key()
        decisions = [limiter.acquire(key, timeout=20) for _ in range(500)]
        assert any(decision.source == "lease" for decision in decisions)
    by_bucket: dict[int, int] = {}
    for decision in decisions:
        if decision.source == "store":
            bucket = decision.now_ms // 100
            by_bucket[bucket] = by_bucket.get(bucket, 0) + 1
    assert max(by_bucket.values()) <= 200
