"""Limits that are paced or warm up, as callers see them: on memory and on Redis, for threads and
tasks, with every `consistency`, and over several processes.
"""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import redis

from distwindow import AsyncLimiter, Limit, Limiter, RateLimitExceeded
from tests.clock_and_stores import ManualClock, fresh_key
from tests.harness import Harness

STORES = ["memory://", "redis"]
ROOT = Path(__file__).parents[2]

CHILD = """
import json, sys
from distwindow import Limiter
url, prefix, limit, calls = sys.argv[1:]
limiter = Limiter(url, limit, prefix=prefix, timeout=5)
print("ready", flush=True)
sys.stdin.readline()
for _ in range(int(calls)):
    d = limiter.acquire("k", timeout=30)
    print(json.dumps([d.now_ms, round(d.wait * 1e6)]))
"""


def url_of(store: str, redis_url: str) -> str:
    return redis_url if store == "redis" else store


@pytest.mark.parametrize("store", STORES)
@pytest.mark.parametrize("consistency", ["direct", "leased", "eventual"])
def test_calls_at_once_are_promised_moments_one_after_the_other(
    harness: Harness, redis_url: str, prefix: str, store: str, consistency: str
) -> None:
    options = {"prefix": prefix, "consistency": consistency, "timeout": 2.0}
    limiter = harness.limiter(url_of(store, redis_url), "10/second paced 30s", **options)
    calls = limiter.burst(["k"] * 60, at_once=12)
    decisions: list[Any] = [call.outcome for call in calls]
    assert all(decision.allowed for decision in decisions)
    assert {decision.source for decision in decisions} <= {"store", "local"}
    moments = sorted(d.now_ms * 1000 + round(d.wait * 1e6) for d in decisions)
    gaps = [after - before for before, after in pairwise(moments)]
    assert min(gaps) >= 100_000
    assert max(d.wait for d in decisions) <= 30
    assert {d.reason for d in decisions if d.wait} == {"paced"}
    assert limiter.stats("k").passed <= 60
    assert limiter.try_acquire("k").wait > 1
    limiter.reset("k")
    assert limiter.try_acquire("k").wait == 0.0


@pytest.mark.parametrize("store", STORES)
def test_a_wait_beyond_max_wait_is_a_refusal(
    harness: Harness, redis_url: str, prefix: str, store: str
) -> None:
    limiter = harness.limiter(
        url_of(store, redis_url), "1/minute paced 2m", prefix=prefix, timeout=10
    )
    first, second, third, refused = (limiter.try_acquire("k") for _ in range(4))
    assert (first.wait, first.reason, first.remaining) == (0.0, "ok", 2)
    assert second.allowed
    assert 59 < second.wait <= 60
    assert third.allowed
    assert 119 < third.wait <= 120
    assert not refused.allowed
    assert (refused.reason, refused.wait, refused.remaining) == ("over_limit", 0.0, 0)
    assert 59 < refused.retry_after <= 60
    assert limiter.peek("k").retry_after <= refused.retry_after
    stats = limiter.stats("k")
    assert stats.blocked >= 1
    # A refund gives the permits back, and not the time: what was promised stays promised.
    assert limiter.refund(third) in (0, 1)
    assert not limiter.try_acquire("k").allowed
    with pytest.raises(RateLimitExceeded):
        limiter.acquire("k", timeout=1.0)


def test_acquire_waits_until_its_moment() -> None:
    clock = ManualClock()
    limiter = Limiter("memory://", "4/second paced 1s", time=clock)
    begin = clock.now_ms()
    proceeded = []
    for _ in range(5):
        limiter.acquire("k")
        proceeded.append(clock.now_ms() - begin)
    assert proceeded == [0, 250, 500, 750, 1000]
    assert clock.slept == [0.25] * 4


def test_acquire_asks_for_no_moment_after_its_timeout() -> None:
    clock = ManualClock()
    limiter = Limiter("memory://", "1/second paced 10s", time=clock)
    for _ in range(4):
        assert limiter.try_acquire("k").allowed
    with pytest.raises(RateLimitExceeded) as raised:
        limiter.acquire("k", timeout=3.9)
    assert clock.slept == [], "it is certain at once"
    assert not raised.value.decision.allowed
    # Nothing was promised to the one that gave up: the next one gets that moment.
    assert limiter.acquire("k", timeout=4.0).wait == 4.0
    assert clock.slept == [4.0]


def test_acquire_waits_until_it_can_be_promised_a_moment_and_then_for_that() -> None:
    clock = ManualClock()
    limiter = Limiter("memory://", "1/second paced 2s", time=clock)
    for _ in range(3):
        assert limiter.try_acquire("k").allowed
    begin = clock.now_ms()
    assert limiter.acquire("k", timeout=3.0).wait == 2.0
    assert clock.slept == [1.0, 2.0]
    assert clock.now_ms() - begin == 3000
    limiter.try_acquire("k")
    limiter.try_acquire("k")
    with pytest.raises(RateLimitExceeded):
        limiter.acquire("k", timeout=2.9)


async def test_tasks_that_acquire_together_keep_the_pace_without_delay() -> None:
    """The next waiter asks while the one before sleeps, so no time between calls is lost."""
    clock = ManualClock()
    async with AsyncLimiter("memory://", "10/second paced 5s", time=clock) as limiter:
        decisions = await asyncio.gather(*(limiter.acquire("k") for _ in range(20)))
    moments = sorted(d.now_ms + d.wait * 1000 for d in decisions)
    assert [round(b - a, 3) for a, b in pairwise(moments)] == [100.0] * 19


@pytest.mark.parametrize("shape", ["decorator", "entry"])
def test_a_limited_function_and_an_entry_wait_until_their_moment(shape: str) -> None:
    clock = ManualClock()
    limiter = Limiter("memory://", "2/second paced 1s", time=clock)
    ran: list[int] = []

    @limiter.limit("k")
    def limited() -> None:
        ran.append(clock.now_ms())

    def call() -> None:
        if shape == "decorator":
            limited()
            return
        with limiter.entry("k"):
            ran.append(clock.now_ms())

    begin = clock.now_ms()
    for _ in range(3):
        call()
    assert [at - begin for at in ran] == [0, 500, 1000]
    for _ in range(2):
        limiter.try_acquire("k")
    with pytest.raises(RateLimitExceeded):
        call()
    assert len(ran) == 3


async def test_a_limited_coroutine_and_an_async_entry_wait_until_their_moment() -> None:
    clock = ManualClock()
    async with AsyncLimiter("memory://", "2/second paced 1s", time=clock) as limiter:

        @limiter.limit("k")
        async def limited() -> int:
            return clock.now_ms()

        begin = await limited()
        assert await limited() - begin == 500
        async with limiter.entry("k"):
            assert clock.now_ms() - begin == 1000


@pytest.mark.parametrize("consistency", ["direct", "leased", "eventual"])
def test_a_limit_warms_up(redis_url: str, prefix: str, consistency: Any) -> None:
    limiter = Limiter(redis_url, "300/minute warmup 1h", prefix=prefix, consistency=consistency)
    with limiter:
        decisions = [limiter.try_acquire("k") for _ in range(101)]
        assert [d.allowed for d in decisions] == [True] * 100 + [False]
        assert [d.remaining for d in decisions] == [*range(99, -1, -1), 0]
        refused = decisions[-1]
        assert 0 < refused.retry_after <= 60
        assert limiter.try_acquire("k").source == "store", "a refusal may end early: not repeated"
        assert limiter.stats("k").passed == 100


def test_a_cost_that_no_cold_limit_admits_is_an_error() -> None:
    limiter = Limiter("memory://", "300/minute warmup 1h")
    for call in (
        lambda: limiter.try_acquire("k", 101),
        lambda: limiter.acquire("k", 101),
        lambda: limiter.try_acquire_all([("k", "300/minute warmup 1h", 101)]),
    ):
        with pytest.raises(ValueError, match="cost=101 can never be admitted while 300/minute war"):
            call()
    assert limiter.try_acquire("k", 100).allowed
    with pytest.raises(ValueError, match="the smallest limit is 300"):
        Limiter("memory://", "300/minute paced 1m").try_acquire("k", 301)


@pytest.mark.parametrize("store", STORES)
def test_several_limits_admit_together_or_not_at_all(
    harness: Harness, redis_url: str, prefix: str, store: str
) -> None:
    limits = ["60/minute paced 10s", "5/hour"]
    limiter = harness.limiter(url_of(store, redis_url), limits, prefix=prefix, timeout=10)
    decisions = [limiter.try_acquire("k") for _ in range(5)]
    assert all(decision.allowed for decision in decisions)
    assert str(decisions[-1].limit) == "60/minute paced 10s"
    assert 3 < decisions[-1].wait <= 4
    refused = limiter.try_acquire("k")
    assert (refused.allowed, str(refused.limit)) == (False, "5/hour")
    # The refusal has left the promised moment alone.
    alone = harness.limiter(url_of(store, redis_url), limits[0], prefix=prefix, timeout=10)
    if store == "redis":
        assert alone.try_acquire("k").wait <= decisions[-1].wait + 1


def test_calls_over_several_keys_wait_for_the_longest(redis_url: str, prefix: str) -> None:
    with Limiter(redis_url, "5/hour", prefix=prefix, consistency="leased") as limiter:
        slow, quick = Limit("1/minute paced 5m"), Limit("60/minute paced 5m")
        items = [("slow", slow, 1), ("quick", quick, 1), ("plain", "5/hour", 1)]
        first, second = limiter.try_acquire_all(items), limiter.try_acquire_all(items)
        assert first.wait == 0.0
        assert 59 < second.wait <= 60
        assert (second.key, second.limit, second.reason) == ("slow", slow, "paced")
        # The quick one proceeds with it, so its next call comes a second later.
        third = limiter.try_acquire_all([("quick", quick, 1)])
        assert second.wait < third.wait <= 61


def test_the_state_is_deleted_once_it_makes_no_difference(redis_url: str, prefix: str) -> None:
    server, key = redis.Redis.from_url(redis_url), fresh_key()
    with Limiter(redis_url, "10/hour paced 1h", prefix=prefix) as limiter:
        for _ in range(3):
            limiter.try_acquire(key)
    (name,) = server.scan_iter(match=f"{prefix}:*:shaping", count=10_000)
    # The moment is 720 s ahead, and any call would proceed at once an interval later.
    assert 4000 < server.pttl(name) / 1000 <= 720 + 3600 + 1
    with Limiter(redis_url, "60/minute warmup 2m", prefix=prefix) as limiter:
        limiter.try_acquire(key + "w")
    names = set(server.scan_iter(match=f"{prefix}:*:shaping", count=10_000)) - {name}
    assert 360 < server.pttl(names.pop()) / 1000 <= 480
    server.close()


@pytest.mark.slow
@pytest.mark.parametrize("limit", ["200/second paced 5s", "3000/second paced 5s"])
def test_processes_together_keep_the_pace(redis_url: str, prefix: str, limit: str) -> None:
    """By the store's own clock: when each call was decided, and how long it was told to wait."""
    calls, processes = 150, 2
    children = [
        subprocess.Popen(
            [sys.executable, "-c", CHILD, redis_url, prefix, limit, str(calls)],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for _ in range(processes)
    ]
    for child in children:
        assert child.stdout is not None
        assert child.stdout.readline() == "ready\n"
    for child in children:
        assert child.stdin is not None
        child.stdin.write("\n")
        child.stdin.flush()
    printed = "".join(child.communicate(timeout=60)[0] for child in children)
    rows = [json.loads(line) for line in printed.splitlines()]
    assert len(rows) == calls * processes
    assert max(wait for _, wait in rows) <= 5_000_000
    moments = sorted(now_ms * 1000 + wait for now_ms, wait in rows)
    interval_us = 1_000_000 / Limit(limit).amount
    # Waits are rounded up to one us.
    assert min(b - a for a, b in pairwise(moments)) > interval_us - 1
    for first in range(0, len(moments), 7):
        for last in range(first + 1, len(moments)):
            assert moments[last] - moments[first] > (last - first) * interval_us - 1


def test_a_real_wait_is_served(redis_url: str, prefix: str) -> None:
    with Limiter(redis_url, "20/second paced 1s", prefix=prefix, timeout=5) as limiter:
        began = time.monotonic()  # before the first, whose reply may come late
        for _ in range(5):
            limiter.acquire("k")
        assert time.monotonic() - began >= 0.195
