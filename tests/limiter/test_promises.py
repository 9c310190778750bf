"""Promises of the limiters that an earlier version broke."""

from __future__ import annotations

import sqlite3
import threading
from contextlib import closing
from typing import Any

import pytest

from distwindow import AsyncLimiter, ConfigurationError, Limiter, RateLimitExceeded
from tests.clock_and_stores import ManualClock


def test_a_waiter_is_refused_in_its_own_name() -> None:
    limiter = Limiter("memory://", "5/minute")
    for _ in range(5):
        limiter.try_acquire("k")
    ahead = threading.Thread(target=limiter.acquire, args=("k", 5), daemon=True)
    ahead.start()
    while not any(line.refusal for line in limiter.decider.queues.by_name.copy().values()):
        pass  # until the caller ahead has been refused, and sleeps
    with pytest.raises(RateLimitExceeded) as refused:
        limiter.acquire("k", cost=2, timeout=0.05)
    assert (refused.value.decision.key, refused.value.decision.cost) == ("k", 2)


def test_a_refund_goes_to_the_bucket_that_was_charged_where_the_clock_was_behind() -> None:
    clock = ManualClock()
    limiter = Limiter("memory://", "10/second strict 10 buckets", time=clock)
    for _ in range(5):
        limiter.try_acquire("k")
    clock.move(100)
    limiter.try_acquire("k")
    clock.move(-50)
    behind = limiter.try_acquire("k")  # counted in the newest bucket: time never goes back
    assert limiter.refund(behind) == 1
    assert [bucket.passed for bucket in limiter.stats("k").buckets] == [5, 1]


def test_the_end_of_an_entry_never_replaces_the_result_of_its_block() -> None:
    limiter = Limiter("memory://", "10/second")
    with limiter.entry("k"):
        limiter.close()
    limiter = Limiter("memory://", "10/second")
    entry = limiter.entry("k")
    entry.__enter__()
    limiter.close()
    entry.__exit__(KeyError, KeyError(), None)  # raises nothing, so the KeyError goes on


@pytest.mark.parametrize("limiter_class", [Limiter, AsyncLimiter])
def test_an_object_with_only_execute_and_close_is_no_store(limiter_class: Any) -> None:
    with closing(sqlite3.connect(":memory:")) as database:
        with pytest.raises(ConfigurationError, match="Connection is no store"):
            limiter_class(database, "5/minute")


def test_a_key_of_a_megabyte_fills_no_log() -> None:
    limiter, huge = Limiter("memory://", "1/minute"), "x" * 1_000_000
    decision = limiter.try_acquire(huge)
    assert decision.key == huge
    assert len(repr(decision)) < 1000
    with pytest.raises(RateLimitExceeded) as refused:
        limiter.acquire(huge, timeout=0)
    assert len(str(refused.value)) < 1000
    with pytest.raises(ValueError, match="named twice") as twice:
        limiter.try_acquire_all([(huge, "1/minute"), (huge, "1/minute")])
    assert len(str(twice.value)) < 1000
