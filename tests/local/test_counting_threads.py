"""Threads that call one key lose no count, with and without the lock of `LocalStrategy`: CPython
with its GIL counts without it.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from distwindow import ConfigurationError, Decision, Limiter
from distwindow.ring.commands import Read
from distwindow.stores.memory import MemoryStore
from distwindow.support.locks import SWITCHES_ONLY_AT_CALLS

THREADS, CALLS, AMOUNT = 4, 10_000, 30_000


class Remote(MemoryStore):
    """A store in memory that is used like a remote one."""

    decided_by = "store"


@pytest.fixture(autouse=True)
def switch_often() -> Iterator[None]:
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


@pytest.fixture(params=["with a lock", "without a lock"], autouse=True)
def locked(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    has_lock = bool(request.param == "with a lock")
    if not has_lock and not SWITCHES_ONLY_AT_CALLS:
        pytest.skip("this interpreter needs the lock")
    monkeypatch.setattr("distwindow.local.base.SWITCHES_ONLY_AT_CALLS", not has_lock)
    return has_lock


def call_in_threads(limiter: Limiter, flushes: int) -> list[Decision]:
    """Call from all threads, and flush meanwhile."""
    decisions: list[Decision] = []

    def work() -> None:
        own = [limiter.try_acquire("k") for _ in range(CALLS)]
        decisions.extend(own)

    threads = [threading.Thread(target=work) for _ in range(THREADS)]
    for thread in threads:
        thread.start()
    for _ in range(flushes):
        limiter.flush()
    for thread in threads:
        thread.join()
    return decisions


@pytest.mark.parametrize("mode", ["direct", "leased", "eventual"])
def test_each_call_is_counted_once(mode: Any, locked: bool) -> None:
    store = Remote()
    limiter = Limiter(store, f"{AMOUNT}/hour", consistency=mode, sync_interval=0.01)
    strategy: Any = limiter.decider.strategy
    assert strategy._needs_lock is locked
    charges = limiter.decider.commands.acquire_command("k").charges
    decisions = call_in_threads(limiter, flushes=20)
    limiter.close()
    assert len(decisions) == THREADS * CALLS
    assert sum(decision.allowed for decision in decisions) == AMOUNT
    assert {decision.source for decision in decisions} & {"lease", "deny_cache", "local"}
    states, *_ = store.execute(Read(charges))
    ring = states[0]
    assert ring is not None
    assert sum(bucket.passed for bucket in ring.buckets) == AMOUNT
    assert sum(bucket.blocked for bucket in ring.buckets) == len(decisions) - AMOUNT


@pytest.mark.parametrize("mode", ["direct", "leased", "eventual"])
def test_a_call_that_is_being_decided_as_the_limiter_closes_counts_nothing(mode: Any) -> None:
    """Another thread closes it after the call has found its key."""
    store = Remote()
    limiter = Limiter(store, "50/hour", consistency=mode)
    local = {"direct": "deny_cache", "leased": "lease", "eventual": "local"}[mode]
    while limiter.try_acquire("k").source != local:
        pass
    strategy: Any = limiter.decider.strategy
    monotonic = strategy._monotonic

    def close_and_read() -> float:
        strategy._monotonic = monotonic
        strategy.close()
        now: float = monotonic()
        return now

    strategy._monotonic = close_and_read
    with pytest.raises(ConfigurationError, match="closed"):
        strategy.decide_locally("k", 1)
