"""Flow rules with the strategies "relate" and "chain" on a server: other owners' calls count.

The clocks are the test's own (`clock="client"`), so that no window ends while the test runs.
"""

from __future__ import annotations

from typing import Any

import pytest

from distwindow import AsyncGuard, FlowRule, Guard, Limiter, RateLimitExceeded, call_context
from distwindow.testing import ManualClock

RULES = [
    FlowRule("read", 3, strategy="relate", ref_resource="write"),
    FlowRule("page", 2, strategy="chain", ref_resource="web"),
]


def settings_of(prefix: str, consistency: str) -> Any:
    return {
        "prefix": prefix,
        "timeout": 5.0,
        "clock": "client",
        "time": ManualClock(),
        "consistency": consistency,
    }


@pytest.mark.parametrize("consistency", ["direct", "eventual"])
def test_calls_of_the_related_resource_count_wherever_they_are_made(
    redis_url: str, prefix: str, consistency: str
) -> None:
    settings = settings_of(prefix, consistency)
    with Guard(redis_url, RULES, **settings) as one, Guard(redis_url, RULES, **settings) as other:
        for _ in range(2):
            with one.entry("write"):
                pass
        one.flush()
        with other.entry("read"):
            pass
        with one.entry("write"):
            pass
        one.flush()
        for guard in (one, other):
            with pytest.raises(RateLimitExceeded):
                guard.entry("read").__enter__()
        settings["time"].advance(1.0)
        with other.entry("read"):
            pass


def test_leased_guards_count_what_was_spent_and_not_what_was_leased(
    redis_url: str, prefix: str
) -> None:
    rule = FlowRule("read", 1 / 300, strategy="relate", ref_resource="write")
    settings: Any = {"prefix": prefix, "timeout": 5.0, "consistency": "leased"}
    with Guard(redis_url, [rule], **settings) as one, Guard(redis_url, [rule], **settings) as other:
        with other.entry("read"):
            pass
        for _ in range(200):
            with one.entry("write"):
                pass
        one.flush()
        with pytest.raises(RateLimitExceeded):
            other.entry("read").__enter__()
        limiter = Limiter(redis_url, "1000/5 minutes", prefix=prefix, timeout=5.0)
        with limiter:
            assert limiter.stats("write").passed == 200


async def test_calls_of_the_related_resource_count_for_tasks(redis_url: str, prefix: str) -> None:
    settings = settings_of(prefix, "direct")
    async with AsyncGuard(redis_url, RULES, **settings) as one:
        async with AsyncGuard(redis_url, RULES, **settings) as other:
            for _ in range(3):
                async with one.entry("write"):
                    pass
            with pytest.raises(RateLimitExceeded):
                await other.entry("read").__aenter__()


def test_calls_from_one_entrance_count_together(redis_url: str, prefix: str) -> None:
    settings = settings_of(prefix, "direct")
    with Guard(redis_url, RULES, **settings) as one, Guard(redis_url, RULES, **settings) as other:
        for guard in (one, other):
            with call_context("web"), guard.entry("page"):
                pass
            with guard.entry("page"):
                pass
        with call_context("web"), pytest.raises(RateLimitExceeded):
            one.entry("page").__enter__()
