"""Flow rules with the strategies "relate" and "chain" on a server: other owners' calls count.

The clocks are the test's own (`clock="client"`), so that no window ends while the test runs.
"""

from __future__ import annotations

from typing import Any

import pytest

from distwindow import FlowRule, Guard, Limiter, RateLimitExceeded, call_context
from distwindow.testing import ManualClock
from tests.guard.guard_worlds import WORLDS, World, entered

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
@pytest.mark.parametrize("kind", WORLDS)
async def test_calls_of_the_related_resource_count_wherever_they_are_made(
    kind: Any, redis_url: str, prefix: str, consistency: str
) -> None:
    settings = settings_of(prefix, consistency)
    one, other = [World(kind, RULES, redis_url, **settings) for _ in range(2)]
    async with entered(one.guard), entered(other.guard):
        for _ in range(2):
            await one.call("write")
        await one.flush()
        await other.call("read")
        await one.call("write")
        await one.flush()
        for world in (one, other):
            assert await world.outcome("read") == "RateLimitExceeded"
        settings["time"].advance(1.0)
        await other.call("read")


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
