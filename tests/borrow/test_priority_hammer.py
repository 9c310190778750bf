"""Three processes with threads and tasks call one key with and without priority, in real time on a
real server.

A call is written into the bucket in which it proceeds: that of the store's time and its `wait`. No
window may hold more than the limit, nor more borrowed permits than its share. The store refuses a
plain call of cost 1 only if a window is full that contains the bucket of now: so for each such
refusal one of these windows must hold *exactly* the limit. One more would be an excess, one less a
permit that was charged and lost.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from distwindow import Limit, Limiter
from tests.attack.fleet import called
from tests.clock_and_stores import fresh_key

pytestmark = pytest.mark.slow  # the quick tier stays under a minute

MAX_WAIT_S, SHARE = 0.06, 0.5


def hammer(url: str, limit: Limit, key: str, seconds: float) -> list[dict[str, Any]]:
    """Return the calls of all processes."""
    windows = {"w": {"limits": str(limit), "max_wait": MAX_WAIT_S, "borrow_share": SHARE}}
    calls = {"keys": [key], "priorities": [True, False]}
    return called(url, windows, calls, seconds, ["sync", "async", "sync"], threads=6).calls


def check(calls: list[dict[str, Any]], limit: Limit) -> Counter[str]:
    """Check every window. Return how many calls had which outcome, and how many buckets with a
    refusal were checked (`full`).
    """
    width, span = limit.bucket_ms, limit.span
    passed: Counter[int] = Counter()
    borrowed: Counter[int] = Counter()
    refused: set[int] = set()
    for call in calls:
        proceeds_at = call["now"] + call["wait_ms"]
        number = proceeds_at // width
        if call["ok"]:
            passed[number] += call["cost"]
        elif call["by"] == "store" and not call["priority"]:
            refused.add(number)
        if call["reason"] == "borrowed":
            assert call["priority"]
            assert proceeds_at % width == 0
            assert 0 < call["wait_ms"] <= MAX_WAIT_S * 1000
            borrowed[number] += call["cost"]

    def held(permits: Counter[int], end: int) -> int:
        return sum(permits[number] for number in range(end - span + 1, end + 1))

    for number in range(min(passed), max(passed) + 1):
        assert held(passed, number) <= limit.amount
        assert held(borrowed, number) <= limit.amount * SHARE
    for number in refused:
        assert max(held(passed, number + i) for i in range(span)) == limit.amount
    return Counter(call["reason"] for call in calls) + Counter(full=len(refused))


@pytest.mark.parametrize("bound", ["leap", "strict"])
def test_no_window_holds_more_than_the_limit_and_full_ones_hold_it_exactly(
    redis_url: str, bound: str
) -> None:
    limit = Limit(f"30/100ms {bound} 10 buckets")
    counted: Counter[str] = Counter()
    for _ in range(10):  # a machine that stalls leaves few windows to check in one run
        counted += check(hammer(redis_url, limit, fresh_key(), 1.5), limit)
        if counted["borrowed"] > 50 and counted["ok"] > 100 and counted["full"] > 20:
            return
    pytest.fail(f"only {counted} in ten runs")


def test_every_borrowed_permit_is_in_the_ring(redis_url: str) -> None:
    """In a window that outlasts the test: what was lent is in coming buckets, all of it once."""
    limit, key = Limit(400, per=3600, buckets=60), fresh_key()
    with Limiter(redis_url, limit, timeout=30, max_wait=3600) as limiter:
        calls = hammer(redis_url, limit, key, 0.7)
        lent = [limiter.try_acquire(key, priority=True) for _ in range(250)]
        stats = limiter.stats(key)
    admitted = sum(call["cost"] for call in calls if call["reason"] == "ok")
    assert stats.passed == admitted + sum(d.reason == "ok" for d in lent)
    assert stats.borrowed == sum(d.reason == "borrowed" for d in lent) == limit.amount // 2
