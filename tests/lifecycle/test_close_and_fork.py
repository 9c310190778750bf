"""Limiters with leases and unsent counts that are closed or forked: no count is lost, and no lease
is spent twice.
"""

from __future__ import annotations

import multiprocessing
import threading
import time
from typing import Any

import pytest

from distwindow import ConfigurationError, Limiter
from tests.harness import PLENTY, Harness, admin, count_outcomes, used
from tests.lifecycle.worker_options import MODES, NEVER, SOON, forks
from tests.servers import DropReply, Proxy, until
from tests.stores.test_transport_fork import Child

# -- closing --------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", MODES)
def test_closing_twice_and_calls_after(
    harness: Harness, redis_url: str, prefix: str, mode: str
) -> None:
    limiter = harness.limiter(redis_url, "3/hour", prefix=prefix, consistency=mode, **NEVER)
    decisions = limiter.each(["k"] * 5)
    close = limiter.close
    close()
    close()
    with admin(redis_url) as server:
        assert used(server, prefix) == 3
    for call in (
        lambda: limiter.try_acquire("k"),
        lambda: limiter.try_acquire("new"),
        lambda: limiter.acquire("k", timeout=1),
        lambda: limiter.peek("k"),
        lambda: limiter.stats("k"),
        lambda: limiter.reset("k"),
        lambda: limiter.refund(decisions[0]),
        lambda: limiter.try_acquire_all([("k", "5/hour")]),
    ):
        with pytest.raises(ConfigurationError, match="closed; make a new one"):
            call()
    close()
    other = harness.limiter(redis_url, "3/hour", prefix=prefix)
    stats = other.stats("k")
    assert (stats.passed, stats.blocked) == (3, 2)


@pytest.mark.slow
@pytest.mark.parametrize("mode", MODES)
def test_closing_amid_calls_loses_nothing(
    harness: Harness, redis_url: str, prefix: str, mode: str
) -> None:
    limits = ["1000000/hour", "1/day 1 bucket"] if mode == "direct" else PLENTY
    for turn in range(4):
        options: dict[str, Any] = {"prefix": f"{prefix}-{turn}", "timeout": 5}
        limiter = harness.limiter(redis_url, limits, consistency=mode, **options)
        load = limiter.load(["a", "b", "c"], threading.Event(), at_once=2)
        calls = load.calls
        # mypy cannot infer a lambda whose parameter has a default.
        until(lambda calls=calls: len(calls) > 30, every=0.001)  # type: ignore[misc]
        limiter.close()
        calls = load.result()
        outcomes = count_outcomes(calls)
        assert set(outcomes) <= {"ok", "refused", "ConfigurationError", "StoreUnavailable"}
        other = harness.limiter(redis_url, limits, **options)
        seen = [other.stats(key) for key in "abc"]
        passed = sum(s.windows[0].passed for s in seen)
        if mode == "eventual":
            assert passed == outcomes["ok"]
        else:  # a call in flight may have been executed, and may have fetched a lease
            assert outcomes["ok"] <= passed
            assert passed <= outcomes["ok"] + outcomes["StoreUnavailable"] or mode == "leased"
        assert sum(s.windows[-1].blocked for s in seen) >= outcomes["refused"]


# -- forks ----------------------------------------------------------------------------------------


@pytest.mark.slow
@forks
@pytest.mark.parametrize("mode", MODES)
def test_parent_and_child_spend_no_lease_twice(redis_url: str, prefix: str, mode: Any) -> None:
    """gunicorn forks its workers so, after it has loaded an application that has made calls."""
    limiter = Limiter(redis_url, "2000/hour", prefix=prefix, consistency=mode, timeout=5, **SOON)
    before = sum(bool(limiter.try_acquire("k")) for _ in range(100))
    strategy: Any = limiter.decider.strategy
    lease = 0
    while mode == "leased" and before < 500 and not (lease := strategy._get("k").permits_left):
        before += bool(limiter.try_acquire("k"))  # the last permit has just been spent, or refunded
    senders = {strategy._counts._sender}

    def work(child: Child) -> list[Any]:
        child.ready()
        admitted = sum(bool(limiter.try_acquire("k")) for _ in range(1500))
        limiter.close()
        return [admitted, strategy._counts._sender]

    children = [Child(work) for _ in range(3)]
    for child in children:
        child.await_ready()
    for child in children:
        child.go_on()
    admitted = before + sum(bool(limiter.try_acquire("k")) for _ in range(1500))
    for child in children:
        count, sender = child.result()
        admitted += count
        senders.add(sender)
    limiter.close()
    assert len(senders) == 4
    assert mode != "leased" or lease > 0
    with admin(redis_url) as server:
        assert used(server, prefix) == admitted
    assert admitted == 2000 if mode == "direct" else admitted >= 1500
    assert admitted <= 2000 or mode == "eventual"


@pytest.mark.slow
@forks
@pytest.mark.parametrize("mode", MODES)
def test_children_of_multiprocessing_flush_their_counts(
    redis_url: str, prefix: str, mode: Any
) -> None:
    limiter = Limiter(redis_url, PLENTY, prefix=prefix, consistency=mode, timeout=5, **NEVER)
    for _ in range(10):
        with limiter.entry("k"):
            pass

    def work() -> None:
        for _ in range(10):
            with limiter.entry("k"):
                pass

    children = [multiprocessing.get_context("fork").Process(target=work) for _ in range(3)]
    for child in children:
        child.start()
    for child in children:
        child.join(20)
        assert child.exitcode == 0
    stats = limiter.stats("k")
    limiter.close()
    assert stats.success == 40
    with admin(redis_url) as server:
        assert used(server, prefix) == 40


@pytest.mark.slow
@forks
def test_a_fork_while_the_worker_flushes(proxy: Proxy, prefix: str) -> None:
    """The child does not wait for the flush of its parent's worker."""
    limiter = Limiter(proxy.url, "1/hour", prefix=prefix, timeout=8, flush_interval=0.01)
    limiter.try_acquire("k")
    limiter.try_acquire("k")

    def work(child: Child) -> float:
        began = time.monotonic()
        limiter.close()
        return time.monotonic() - began

    with proxy.inject(DropReply()):
        limiter.try_acquire("k")  # a cached refusal, which is flushed soon
        until(lambda: proxy.dropped_bytes > 0)
        took = Child(work).result()
    assert took < 5  # a flush whose reply is lost takes 8 s
    limiter.close()
