"""Guards of several owners on one server share what they limit."""

from __future__ import annotations

from contextlib import ExitStack, suppress
from typing import Any

import pytest

from distwindow import (
    AsyncGuard,
    BreakerOpen,
    ConcurrencyExceeded,
    DegradeRule,
    FlowRule,
    Guard,
    Limiter,
    RateLimitExceeded,
)
from distwindow.runtime.worker import THREAD_WORKER
from tests.guard.guard_worlds import WORLDS, entered

RULES = [
    FlowRule("r", 1 / 12),  # one in 12 s, so that its window outlasts the test
    FlowRule("busy", 1, grade="thread"),
    DegradeRule(
        "down",
        0,
        grade="error_count",
        time_window_s=60,
        min_request_amount=1,
        stat_interval_ms=60_000,
    ),
]


@pytest.mark.parametrize("kind", WORLDS)
async def test_two_guards_share_their_rules(kind: Any, redis_url: str, prefix: str) -> None:
    one, other = [kind(redis_url, RULES, prefix=prefix, timeout=5.0) for _ in range(2)]
    async with entered(one), entered(other):
        async with entered(one.entry("r")):
            pass
        with pytest.raises(RateLimitExceeded) as limited:
            await entered(other.entry("r")).__aenter__()
        assert limited.value.rule is RULES[0]

        async with entered(one.entry("busy")):
            with pytest.raises(ConcurrencyExceeded):
                await entered(other.entry("busy")).__aenter__()
        async with entered(other.entry("busy")):
            pass

        with pytest.raises(OSError, match="down"):
            async with entered(one.entry("down")):
                raise OSError("down")
        flushed = one.flush()
        await flushed if kind is AsyncGuard else flushed
        with pytest.raises(BreakerOpen):
            await entered(other.entry("down")).__aenter__()


@pytest.mark.parametrize("share", [None, 0.5])
def test_with_a_share_eventual_guards_admit_the_limit_between_two_syncs(
    redis_url: str, prefix: str, share: float | None
) -> None:
    """Without one each admits the limit, which is what `share` is for."""
    rules = [FlowRule("r", 19 / 60)]  # 19 in a minute
    settings: Any = {
        "prefix": prefix, "timeout": 5.0, "consistency": "eventual", "sync_interval": 3600.0,
        "share": share,
    }  # fmt: skip
    admitted = 0
    with ExitStack() as stack:
        for _ in range(2):
            guard = stack.enter_context(Guard(redis_url, rules, **settings))
            for _ in range(30):
                with suppress(RateLimitExceeded), guard.entry("r"):
                    admitted += 1
    assert (admitted <= 19) is (share is not None)
    assert admitted >= 18


def test_a_refusal_by_a_later_slot_refunds_on_the_server(redis_url: str, prefix: str) -> None:
    rules = [FlowRule("r", 1 / 12), FlowRule("r", 1, grade="thread")]
    with Guard(redis_url, rules, prefix=prefix, timeout=5.0) as guard:
        with Guard(redis_url, rules[1:], prefix=prefix, timeout=5.0) as other, other.entry("r"):
            with pytest.raises(ConcurrencyExceeded):
                guard.entry("r").__enter__()
        with guard.entry("r"):
            pass
    with Limiter(redis_url, "1/12 seconds", prefix=prefix, timeout=5.0) as limiter:
        stats = limiter.stats("r")
        assert (stats.passed, stats.success) == (1, 1)


def test_a_closed_guard_does_nothing_more_in_the_background(
    redis_url: str, prefix: str, caplog: pytest.LogCaptureFixture
) -> None:
    guard = Guard(redis_url, RULES, prefix=prefix, timeout=5.0)
    for resource in ("r", "busy", "down"):
        with guard.entry(resource):
            pass
    parts = list(guard._parts.values())
    guard.close()
    assert all(part._flush_job.detached for part in parts)
    assert not any(part._flush_job.has_unsent for part in parts)
    for part in parts:
        THREAD_WORKER.wait_for(part._flush_job)
    assert caplog.messages == []
