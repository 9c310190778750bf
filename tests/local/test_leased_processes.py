"""Leases on a real server: all processes together never spend more than the limit, and few calls
reach the store.
"""

from __future__ import annotations

import time
from contextlib import suppress
from typing import Any

import pytest

from distwindow import Limit, Limiter, StoreError
from tests.harness import PLENTY, Harness, admin, count_outcomes, used
from tests.local.caller_processes import call_in_processes, most_aligned, most_anywhere
from tests.servers import (
    Blackhole,
    Delay,
    DropReply,
    Proxy,
    Refuse,
    ResetAfterSend,
    Standalone,
    until,
)


def leased(limit: Any, prefix: str, **options: Any) -> dict[str, Any]:
    given = {"limits": str(limit), "prefix": prefix, "consistency": "leased", "timeout": 5}
    return {**given, **options}


@pytest.mark.slow
@pytest.mark.parametrize(("bound", "amount"), [("leap", 1500), ("strict", 40)])
def test_never_more_than_the_limit(redis_url: str, prefix: str, bound: str, amount: int) -> None:
    limit = Limit(f"{amount}/500ms {bound} 5 buckets")
    spans, sources = call_in_processes(redis_url, leased(limit, prefix), 1.8, kill=1)
    assert sources["lease True"] > 0 or amount == 40
    assert most_aligned(spans, limit) <= amount
    if bound == "strict":
        assert most_anywhere(spans, limit) <= amount
    # Leases withhold little from the other processes: more than half of the limit is spent.
    assert len(spans) > 0.5 * amount * 1.8 / 0.6


@pytest.mark.slow
def test_a_killed_process_loses_no_more_than_its_lease(redis_url: str, prefix: str) -> None:
    """No more than one lease is lost, as the other processes refund what they have not spent."""
    spans, _ = call_in_processes(redis_url, leased(PLENTY, prefix), 1, kill=1)
    with admin(redis_url) as server:
        total = used(server, prefix)
    assert len(spans) <= total
    # A lease lasts a quarter of a second, at a quarter of the rate of all. The calls of the last 50
    # ms before the kill may not have been reported.
    assert total - len(spans) < 0.4 * len(spans) / 1


@pytest.mark.slow
def test_everything_is_spent_once_the_limit_is_reached(redis_url: str, prefix: str) -> None:
    spans, sources = call_in_processes(redis_url, leased("2000/day", prefix), 0.8)
    assert sources["deny_cache False"] > 0
    with admin(redis_url) as server:
        assert used(server, prefix) == len(spans) <= 2000
    with Limiter(redis_url, "2000/day", prefix=prefix) as other:
        stats = other.stats("k")
    assert stats.blocked == sources["deny_cache False"] + sources["store False"]


@pytest.mark.slow
def test_leases_are_prefetched(redis_url: str, prefix: str) -> None:
    """Under a steady load callers rarely wait for the store."""
    spans, sources = call_in_processes(
        redis_url, leased("1000000/10s 10 buckets", prefix), 1.5, pause_s=0.002
    )
    calls = sum(sources.values())
    assert len(spans) == calls > 1500
    # The first calls are decided by the store, and so are some as a bucket ends each second.
    assert sources["store True"] < 0.04 * calls


# -- one process ----------------------------------------------------------------------------------


def test_few_calls_reach_the_store(
    harness: Harness, proxy: Proxy, redis_url: str, prefix: str
) -> None:
    limiter = harness.limiter(proxy.url, PLENTY, prefix=prefix, consistency="leased", timeout=5)
    decisions = limiter.each(["k"] * 3000)
    assert all(decisions)
    assert proxy.requests < 200
    left = [(999_999 - n, d.remaining) for n, d in enumerate(decisions) if d.source == "lease"]
    assert len(left) > 2800
    assert all(there_is == reported for there_is, reported in left)
    limiter.close()
    with admin(redis_url) as server:
        assert used(server, prefix) == 3000


def test_exactly_the_limit_where_one_process_calls(
    harness: Harness, redis_url: str, prefix: str
) -> None:
    limiter = harness.limiter(redis_url, "777/day", prefix=prefix, consistency="leased", timeout=5)
    calls = limiter.burst(["k"] * 1000, at_once=8)
    assert count_outcomes(calls) == {"ok": 777, "refused": 223}
    # If the worker is flushing at this moment, the last refusals are in its next flush.
    until(lambda: limiter.stats("k").blocked == 223, timeout=10)
    assert limiter.stats("k").passed == 777


@pytest.mark.slow
def test_unspent_permits_are_refunded_soon_after_the_calls_end(
    harness: Harness, redis_url: str, prefix: str
) -> None:
    """Unspent permits are refunded soon after the calls end, without a close, so that others can
    spend them.
    """
    options: dict[str, Any] = {"prefix": prefix, "consistency": "leased", "timeout": 5}
    limiter = harness.limiter(redis_url, PLENTY, flush_interval=0.05, **options)
    with admin(redis_url) as server:
        # A refund may come between the calls and any look at the server: so no look comes first.
        assert "lease" in {decision.source for decision in limiter.each(["k"] * 1000)}
        until(lambda: used(server, prefix) == 1000, timeout=5)
        assert limiter.limiter.decider.strategy._get("k").permits_left == 0
        assert all(limiter.each(["k"] * 500))
        until(lambda: used(server, prefix) == 1500, timeout=5)


def test_own_refund_and_reset(harness: Harness, redis_url: str, prefix: str) -> None:
    options: dict[str, Any] = {"prefix": prefix, "consistency": "leased", "timeout": 5}
    limiter = harness.limiter(redis_url, PLENTY, **options)
    decisions = limiter.each(["k"] * 400)
    by_lease = [d for d in decisions if d.source == "lease"]
    assert len(by_lease) > 300
    assert [limiter.refund(d) for d in by_lease[:10]] == [1] * 10
    limiter.flush()  # a lease that is being fetched at the reset may be charged after it
    limiter.reset("k")
    assert limiter.stats("k").passed == 0
    assert all(limiter.each(["k"] * 50))
    limiter.close()
    with admin(redis_url) as server:
        assert used(server, prefix) == 50


def test_several_limits_are_leased_together(harness: Harness, redis_url: str, prefix: str) -> None:
    limits = ["5000/hour", "300/day"]
    limiter = harness.limiter(redis_url, limits, prefix=prefix, consistency="leased", timeout=5)
    decisions = limiter.each(["k"] * 400)
    assert sum(map(bool, decisions)) == 300
    assert "lease" in {d.source for d in decisions}
    assert str(decisions[-1].limit) == "300/day"
    limiter.close()
    with admin(redis_url) as server:
        assert used(server, prefix) == 600


@pytest.mark.slow
@pytest.mark.parametrize(
    "fault",
    [DropReply(), Refuse(), ResetAfterSend(), Blackhole(), Delay(replies=0.08)],
    ids=lambda fault: type(fault).__name__,
)
def test_never_more_whatever_is_lost_on_the_way(
    harness: Harness, proxy: Proxy, redis_url: str, prefix: str, fault: Any
) -> None:
    options: dict[str, Any] = {"prefix": prefix, "consistency": "leased", "flush_interval": 0.02}
    limiters = [harness.limiter(url, "3000/day", **options, timeout=0.1) for url in [proxy.url] * 2]
    admitted = 0

    def some(calls: int) -> None:
        nonlocal admitted
        for limiter in limiters:
            for _ in range(calls):
                with suppress(StoreError):
                    admitted += bool(limiter.try_acquire("k"))

    some(300)
    with proxy.inject(fault):
        ends = time.monotonic() + 0.2
        while time.monotonic() < ends:
            some(1)
    some(2000)
    with admin(redis_url) as server:
        assert admitted <= 3000
        for limiter in limiters:
            limiter.close()
        assert admitted <= used(server, prefix) <= 3000


def test_a_server_that_stands_still_ends_the_lease_in_time(harness: Harness, prefix: str) -> None:
    """Leased permits may be spent until the bucket ends; after that, calls raise."""
    with Standalone() as own:
        options: dict[str, Any] = {"prefix": prefix, "consistency": "leased", "timeout": 0.1}
        limiter = harness.limiter(own.url, "1000000/100s 500 buckets", **options)

        def are_answered() -> bool:
            try:
                return len(limiter.each(["k"] * 500)) == 500
            except StoreError:  # the machine has stood still for longer than the timeout
                return False

        until(are_answered)
        own.pause()
        try:
            began, failed = time.monotonic(), False
            while not failed:
                try:
                    assert limiter.try_acquire("k")
                except StoreError:
                    failed = True
            # Until the bucket of 0.2 s ends, not for the window of 100 s.
            assert time.monotonic() - began < 10
        finally:
            own.resume()
