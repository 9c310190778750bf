"""`open(key)` and `close(key)`: what holds for the fleet after a breaker was changed by hand."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from distwindow import (
    AsyncCircuitBreaker,
    CircuitBreaker,
    ConfigurationError,
    ErrorCount,
    StoreError,
)
from distwindow.stores.memory import MemoryStore
from tests.breaker.driven import IN_BOTH_WORLDS, ON_ALL_STORES, driven
from tests.clock_and_stores import ManualClock

RULE = ErrorCount(2, open_for=5)
pytestmark = [IN_BOTH_WORLDS, ON_ALL_STORES]


@pytest.mark.parametrize("before", ["unknown", "closed", "open", "half_open"])
def test_it_is_open_for_every_process_for_the_whole_time(
    before: str, is_async: bool, store: str, redis_url: str, prefix: str
) -> None:
    with driven(2, is_async, store, RULE, redis_url, prefix) as (clock, (one, other)):
        if before != "unknown":
            assert one.call()
            assert other.call()
        if before in ("open", "half_open"):
            one.call(failed=True)
            one.call(failed=True)
            one.flush()
        probe = None
        if before == "half_open":
            clock.advance(5)
            probe = one.begin()
        clock.advance(1)
        assert one.state() == before.replace("unknown", "closed")
        one.open()
        assert not one.call()
        clock.advance(0.5)  # a flush and a sync
        other.flush()
        assert not other.call()
        if probe is not None:
            one.end(probe)  # it decides nothing any more
        clock.advance(4.499)
        assert [one.call(), other.call()] == [False, False]
        clock.advance(0.001)
        assert one.call(), "the next probe decides"
        assert other.state() == "closed"


@pytest.mark.parametrize("before", ["unknown", "closed", "open", "half_open"])
def test_it_is_closed_for_every_process_and_counts_afresh(
    before: str, is_async: bool, store: str, redis_url: str, prefix: str
) -> None:
    with driven(2, is_async, store, RULE, redis_url, prefix) as (clock, (one, other)):
        if before != "unknown":
            assert one.call(failed=True)
        late = other.begin()
        if before in ("open", "half_open"):
            one.call(failed=True)
        one.flush()
        probe = None
        if before == "half_open":
            clock.advance(5)
            probe = one.begin()
        clock.advance(1)
        assert one.state() == before.replace("unknown", "closed")
        one.close()
        other.end(late, failed=True)  # it was let through before
        if probe is not None:
            one.end(probe, failed=True)
        clock.advance(0.5)
        other.flush()
        assert one.call(failed=True)
        one.flush()
        assert [one.state(), other.state()] == ["closed", "closed"], "one failure since"
        assert other.call(failed=True)
        other.flush()
        assert one.state() == "open"


def test_the_change_is_heard_once_by_each_process(
    is_async: bool, store: str, redis_url: str, prefix: str
) -> None:
    with driven(2, is_async, store, RULE, redis_url, prefix) as (clock, (one, other)):
        assert one.call()
        assert other.call()
        for change in (one.open, one.open, one.close, one.close):
            change()
            clock.advance(0.6)
            one.call()
            other.call()
        assert one.heard == other.heard == ["open", "closed"]


def test_it_is_known_whether_it_was_done(is_async: bool, store: str) -> None:
    kind: Any = AsyncCircuitBreaker if is_async else CircuitBreaker

    def run(found: Any) -> None:
        asyncio.run(found) if is_async else None

    if store == "redis":
        away = kind("redis://127.0.0.1:1/0", RULE, timeout=0.1)
        for change in (away.open, away.close):
            with pytest.raises(StoreError):
                run(change("k"))
        run(away.aclose()) if is_async else away.close()
        return
    breaker = kind(MemoryStore(ManualClock()), RULE)
    for bad in (None, 7, ["k"]):
        for change in (breaker.open, breaker.close):
            with pytest.raises(TypeError):
                run(change(bad))
    run(breaker.aclose()) if is_async else breaker.close()
    for change in (breaker.open, breaker.close):
        with pytest.raises(ConfigurationError, match="closed; make a new one"):
            run(change("k"))
