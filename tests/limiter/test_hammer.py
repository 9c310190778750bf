"""Two processes with sixteen threads and thirty tasks call one key, in real time on a real server.

All times are the store's, from `Decision.now_ms`. The store refuses a call of cost 1 only when the
window is full, so at each such refusal the window must hold *exactly* the limit: one more would be
an excess, one less a permit that was charged and lost. A cached refusal has only an estimate of the
store's time, and is counted apart.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from distwindow import Limit, Limiter
from tests.attack.fleet import called
from tests.attack.history import History, check_any_window
from tests.clock_and_stores import fresh_key

pytestmark = pytest.mark.slow  # the quick tier stays under a minute


def hammer(url: str, limit: Limit, key: str, seconds: float, costs: list[int]) -> History:
    """Return the calls of all processes."""
    windows = {"w": {"limits": str(limit)}}
    calls = {"keys": [key], "costs": costs}
    return called(url, windows, calls, seconds, ["sync", "async"], threads=20)


def exactly_full_where_refused(history: History, limit: Limit) -> int:
    """Check at each refusal of the store that the window was exactly full. Return the number of
    buckets in which that was checked.
    """
    width, span = limit.bucket_ms, limit.span
    passed: Counter[int] = Counter()
    refused = set()
    for call in history.calls:
        if call["ok"]:
            passed[call["now"] // width] += call["cost"]
        elif call["by"] == "store":
            refused.add(call["now"] // width)
    for number in {*range(min(passed), max(passed) + 1), *refused}:
        held = sum(passed[n] for n in range(number - span + 1, number + 1))
        assert held <= limit.amount
        assert held == limit.amount or number not in refused
    return len(refused)


def check_buckets(at_least: int, url: str, limit: Limit, seconds: float) -> None:
    """Hammer until so many buckets were checked: a machine that stalls leaves few in one run."""
    checked = 0
    for _ in range(10):
        history = hammer(url, limit, fresh_key(), seconds, [1])
        if limit.bound == "strict":
            check_any_window(history.admitted("w"), limit.amount, limit.interval_ms)
        checked += exactly_full_where_refused(history, limit)
        if checked > at_least:
            return
    pytest.fail(f"only {checked} buckets were full in ten runs")


def test_leap_admits_exactly_the_limit_in_every_saturated_window(redis_url: str) -> None:
    check_buckets(20, redis_url, Limit("30/100ms 10 buckets"), 0.6)


def test_strict_never_admits_more_than_the_limit_in_any_window(redis_url: str) -> None:
    check_buckets(20, redis_url, Limit("30/100ms strict 10 buckets"), 0.6)


def check_conserved(url: str, costs: list[int], **options: Any) -> None:
    """Check that the ring has counted as much as the clients were admitted, in a window that does
    not end; hammer for longer if a busy machine has not exhausted it.
    """
    limit = Limit(600, per=3650 * 86400, buckets=1)
    stats = None
    for seconds in (0.7, 3.0, 10.0, 30.0):
        key = fresh_key()
        calls = hammer(url, limit, key, seconds, costs).calls
        with Limiter(url, limit, timeout=30, **options) as limiter:
            stats = limiter.stats(key)
        assert stats.passed == sum(call["cost"] for call in calls if call["ok"])
        assert stats.blocked == sum(call["cost"] for call in calls if not call["ok"])
        if stats.blocked:
            break
    assert stats is not None
    assert limit.amount - stats.passed < max(costs)
    assert stats.blocked > 0


def test_no_permit_is_lost(redis_url: str) -> None:
    check_conserved(redis_url, [1, 2, 3])


@pytest.mark.slow
@pytest.mark.parametrize(("where", "bound"), [("cluster", "strict"), ("sentinel", "leap")])
def test_other_topologies(request: pytest.FixtureRequest, where: str, bound: str) -> None:
    url = request.getfixturevalue(f"{where}_url")
    check_buckets(15, url, Limit(f"97/500ms {bound} 10 buckets"), 1.5)
    check_conserved(url, [1, 5])
