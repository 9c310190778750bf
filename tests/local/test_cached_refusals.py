"""Cached refusals: they take no round trip, are counted all the same, and end when they may be
wrong.
"""

from __future__ import annotations

import time
from typing import Any

import pytest

from distwindow import Key, RateLimitExceeded
from tests.clock_and_stores import ManualClock, fresh_key
from tests.harness import Harness, LimiterAdapter
from tests.lifecycle.worker_options import MODES, NEVER, SOON
from tests.servers import Proxy, until


def full(limiter: LimiterAdapter, key: Any = "k", most: int = 100) -> None:
    """Call until a call is refused."""
    for _ in range(most):
        if not limiter.try_acquire(key):
            return
    pytest.fail(f"{key} is not full after {most}")


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(
    ("limits", "key"),
    [("5/hour", "k"), (["5/hour", "1000/day"], "k"), ("5/hour strict", Key("k", tag="t"))],
    ids=str,
)
def test_a_cached_refusal_takes_no_round_trip(
    harness: Harness, proxy: Proxy, prefix: str, mode: str, limits: Any, key: Any
) -> None:
    limiter = harness.limiter(proxy.url, limits, prefix=prefix, consistency=mode, **NEVER)
    full(limiter, key)
    before = proxy.requests
    refusals = limiter.each([key] * 200)
    assert proxy.requests == before
    assert not any(refusals)
    assert {d.source for d in refusals} == {"local" if mode == "eventual" else "deny_cache"}
    for one in refusals:
        assert (one.key, one.cost, one.remaining, one.reason) == (key, 1, 0, "over_limit")
        assert one.limit == limiter.limiter.limits[0]
        assert one.charged is None
        assert 0 < one.retry_after <= one.reset_after <= 3660  # strict has one bucket more
    retries = [one.retry_after for one in refusals]
    assert retries == sorted(retries, reverse=True)


@pytest.mark.parametrize("mode", MODES)
def test_a_refusal_is_repeated_only_for_its_cost_and_larger_ones(
    harness: Harness, proxy: Proxy, prefix: str, mode: str
) -> None:
    limiter = harness.limiter(proxy.url, "10/hour", prefix=prefix, consistency=mode, **NEVER)
    assert limiter.try_acquire("k", 6)
    assert not limiter.try_acquire("k", 5)
    before = proxy.requests
    assert not any(limiter.try_acquire("k", cost) for cost in (5, 6, 10, 5))
    assert proxy.requests == before
    with pytest.raises(ValueError, match="cost=11 can never be admitted"):
        limiter.try_acquire("k", 11)
    assert limiter.try_acquire("k", 4)
    assert not limiter.try_acquire("k", 1)
    assert not limiter.try_acquire("k", 5)


@pytest.mark.parametrize("mode", MODES)
def test_refusals_are_counted_in_the_store_within_the_interval(
    harness: Harness, redis_url: str, prefix: str, mode: str
) -> None:
    limiter = harness.limiter(redis_url, "5/hour", prefix=prefix, consistency=mode, **SOON)
    other = harness.limiter(redis_url, "5/hour", prefix=prefix)
    full(limiter)
    limiter.each(["k"] * 49)
    shortest, blocked = 20.0, 50
    for _ in range(3):  # a busy machine may delay some of the flushes
        began = time.monotonic()
        until(lambda: other.stats("k").blocked == blocked, timeout=20)  # noqa: B023 - used here
        shortest = min(shortest, time.monotonic() - began)
        limiter.each(["k"] * 10)  # and again after the worker has flushed
        blocked += 10
    assert shortest < 0.05 + 0.2
    until(lambda: other.stats("k").blocked == blocked, timeout=20)
    assert other.stats("k").passed == 5


@pytest.mark.parametrize("mode", MODES)
def test_stats_of_this_process_include_cached_refusals_at_once(
    harness: Harness, redis_url: str, prefix: str, mode: str
) -> None:
    limiter = harness.limiter(redis_url, "5/hour", prefix=prefix, consistency=mode, **NEVER)
    full(limiter)
    limiter.each(["k"] * 9)
    stats = limiter.stats("k")
    assert (stats.passed, stats.blocked) == (5, 10)
    limiter.each(["k"] * 9)
    assert limiter.stats("k").blocked == 19
    limiter.flush()
    assert limiter.stats("k").blocked == 19


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("by", ["refund", "reset"])
def test_a_cached_refusal_ends_at_once_after_an_own(
    harness: Harness, redis_url: str, prefix: str, mode: str, by: str
) -> None:
    limiter = harness.limiter(redis_url, "5/hour", prefix=prefix, consistency=mode, **NEVER)
    last = limiter.each(["k"] * 5)[-1]
    assert last
    assert not limiter.try_acquire("k")
    if by == "refund":
        assert limiter.refund(last) == 1
        if mode == "eventual":
            limiter.flush()  # what was refunded, here or elsewhere, is seen with the next poll
    else:
        limiter.reset("k")
    assert [d.allowed for d in limiter.each(["k"] * 6)] == [True] * (1 if by == "refund" else 5) + [
        False
    ] * (5 if by == "refund" else 1)


@pytest.mark.parametrize("limits", ["5/10s 10 buckets", "5/hour"])
@pytest.mark.parametrize("by", ["refund", "reset"])
def test_a_cached_refusal_ends_within_a_second_after_anothers(
    harness: Harness, redis_url: str, prefix: str, by: str, limits: str
) -> None:
    clock = ManualClock()
    options: dict[str, Any] = {"prefix": prefix, "clock": "client", "time": clock, **NEVER}
    limiter, other = (harness.limiter(redis_url, limits, **options) for _ in range(2))
    last = limiter.each(["k"] * 5)[-1]
    assert not limiter.try_acquire("k")
    if by == "refund":
        assert other.refund(last) == 1
    else:
        other.reset("k")
    clock.move(900)
    assert limiter.try_acquire("k").source == "deny_cache"
    clock.move(100)
    assert limiter.try_acquire("k")


def test_a_cached_refusal_ends_when_the_window_has_room(
    harness: Harness, redis_url: str, prefix: str
) -> None:
    """A cached refusal ends at the millisecond that it named, and not before."""
    clock = ManualClock()
    options: dict[str, Any] = {"prefix": prefix, "clock": "client", "time": clock, **NEVER}
    limiter = harness.limiter(redis_url, "5/second 10 buckets", **options)
    key = fresh_key()
    for _ in range(30):
        clock.move(37)
        decision = limiter.try_acquire(key)
        if not decision:
            wait = round(decision.retry_after * 1000)
            for _ in range(3):
                assert round(limiter.try_acquire(key).retry_after * 1000) == wait
            clock.move(wait - 1)
            assert not limiter.try_acquire(key)
            clock.move(1)
            assert limiter.try_acquire(key)


@pytest.mark.parametrize("mode", ["direct", "leased"])
def test_peek_and_guards_use_a_cached_refusal(
    harness: Harness, proxy: Proxy, prefix: str, mode: str
) -> None:
    limiter = harness.limiter(proxy.url, "5/hour", prefix=prefix, consistency=mode, **NEVER)
    full(limiter)
    before = proxy.requests
    seen = limiter.peek("k")
    assert (seen.allowed, seen.source, seen.remaining) == (False, "deny_cache", 0)
    with pytest.raises(RateLimitExceeded):
        limiter.acquire("k", timeout=0.01)
    assert proxy.requests == before
    limiter.flush()
    assert limiter.stats("k").blocked == 2  # `peek` counts nothing
