"""One worker for all limiters of a process: when it starts and ends, and that everything due is
sent in one exchange. Also closing, forks, and the number of keys that are kept.
"""

from __future__ import annotations

import asyncio
import gc
import multiprocessing
import threading
import time
import warnings
from contextlib import AsyncExitStack
from typing import Any

import pytest

from distwindow import AsyncLimiter, ConfigurationError, Limiter
from distwindow.consistency.key_state import KeyState
from tests.integration.harness import PLENTY, Harness, admin, count_outcomes, used
from tests.integration.test_transport_fork import Child
from tests.servers import Cluster, DropReply, Proxy, Standalone, until

pytestmark = pytest.mark.slow  # the quick tier stays under a minute

MODES: Any = ["direct", "leased", "eventual"]
NEVER: Any = {"flush_interval": 3600.0, "sync_interval": 3600.0}
SOON: Any = {"flush_interval": 0.05, "sync_interval": 0.05}
forks = pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")


def workers() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "distwindow"]


def worker_tasks() -> list[asyncio.Task[Any]]:
    return [task for task in asyncio.all_tasks() if task.get_name() == "distwindow"]


# -- one worker -----------------------------------------------------------------------------------


@forks
def test_one_thread_started_by_the_first_that_needs_it(redis_url: str, prefix: str) -> None:
    """Run in a child process, because this process has a worker already."""

    def work(child: Child) -> list[int]:
        seen = [len(workers())]
        limiters = [
            Limiter(redis_url, "2/hour", prefix=f"{prefix}-{n}", consistency=MODES[n % 3], **SOON)
            for n in range(9)
        ]
        seen.append(len(workers()))
        limiters[0].try_acquire("k")  # nothing to flush
        seen.append(len(workers()))
        for limiter in limiters:
            for _ in range(5):
                limiter.try_acquire("k")
        seen.append(len(workers()))
        for limiter in limiters:
            limiter.close()
        return seen

    assert Child(work).result() == [0, 0, 0, 1]


@pytest.mark.parametrize("mode", ["direct", "leased", "eventual"])
async def test_one_task_a_loop_that_ends_when_there_is_nothing(
    redis_url: str, prefix: str, mode: Any
) -> None:
    # A key is polled for the length of its window.
    limits = "2/50ms 1 bucket" if mode == "eventual" else "2/hour"
    async with AsyncExitStack() as stack:
        limiters = [
            AsyncLimiter(redis_url, limits, prefix=f"{prefix}-{n}", consistency=mode, **SOON)
            for n in range(5)
        ]
        for limiter in limiters:
            await stack.enter_async_context(limiter)
        assert worker_tasks() == []
        tasks = len(asyncio.all_tasks())
        for limiter in limiters:
            for _ in range(5):
                await limiter.try_acquire("k")
        assert len(worker_tasks()) == 1
        assert len(asyncio.all_tasks()) - tasks <= 1 + len(
            limiters
        )  # one reader for each connection
        await asyncio.wait(worker_tasks(), timeout=0.5)
        assert worker_tasks() == []
        for _ in range(3):
            await limiters[0].try_acquire("k")
        assert len(worker_tasks()) == 1


@pytest.mark.event_loops
def test_each_loop_has_its_own(redis_url: str, prefix: str) -> None:
    """Counts that a closed loop has not sent are sent by the next loop."""
    limiter = AsyncLimiter(redis_url, "2/hour", prefix=prefix, timeout=5, flush_interval=0.3)

    async def refused() -> None:
        for _ in range(4):
            await limiter.try_acquire("k")
        assert len(worker_tasks()) == 1

    async def last() -> None:
        await limiter.try_acquire("k")
        assert (await limiter.stats("k")).blocked == 2 + 4 * 2 + 1
        await limiter.aclose()

    with warnings.catch_warnings():
        # asyncio warns of connections that are still open when their loop is closed, which is
        # correct.
        warnings.simplefilter("ignore", ResourceWarning)
        for _ in range(3):
            asyncio.run(refused())
        asyncio.run(last())
        gc.collect()


@pytest.mark.parametrize("mode", MODES)
def test_many_keys_are_one_exchange(
    harness: Harness, proxy: Proxy, redis_url: str, prefix: str, mode: str
) -> None:
    limiter = harness.limiter(
        proxy.url, "3/hour", prefix=prefix, consistency=mode, timeout=5, **NEVER
    )
    keys = [f"k{n}" for n in range(100)]
    for _ in range(5):
        limiter.each(keys)
    before = proxy.requests
    limiter.flush()
    # About 25 KB are written at once, and the proxy may read them in several chunks.
    assert 0 < proxy.requests - before <= 8
    if mode == "eventual":
        limiter.flush()  # the first flush has fetched the server's time
    else:
        before = proxy.requests
        limiter.flush()
        assert proxy.requests == before
    with admin(redis_url) as server:
        assert used(server, prefix) == 300
    assert all(limiter.stats(key).blocked == 2 for key in keys[::50])


@pytest.mark.slow
def test_many_keys_of_a_cluster_are_flushed(
    harness: Harness, cluster: Cluster, cluster_url: str, prefix: str
) -> None:
    for mode in MODES:
        options: dict[str, Any] = {"prefix": f"{prefix}-{mode}", "consistency": mode, "timeout": 5}
        limiter = harness.limiter(cluster_url, "3/hour", **options, **NEVER)
        keys = [f"k{n}" for n in range(30)]
        for _ in range(5):
            limiter.each(keys)
        for _ in range(3):
            limiter.flush()
        other = harness.limiter(cluster_url, "3/hour", **options)
        assert {(s.passed, s.blocked) for s in map(other.stats, keys)} == {(3, 2)}


def test_a_flush_reloads_scripts_that_the_server_lost(
    harness: Harness, redis_url: str, prefix: str
) -> None:
    with Standalone() as own, own.client() as server:
        limiter = harness.limiter(own.url, "1/hour", prefix=prefix, timeout=5, **NEVER)
        keys = [f"k{n}" for n in range(100)]
        for _ in range(3):
            limiter.each(keys)
        server.script_flush()
        limiter.flush()
        assert {limiter.stats(key).blocked for key in keys} == {2}


@pytest.mark.slow
def test_a_stalled_server_delays_other_limiters_by_one_timeout(redis_url: str, prefix: str) -> None:
    """There is one worker, so the other limiters are flushed later by one timeout."""
    with Standalone() as own:
        stalled = Limiter(own.url, "1/hour", prefix=prefix, timeout=0.2, **SOON)
        reachable = Limiter(redis_url, "1/hour", prefix=prefix, **SOON)
        for limiter in (stalled, reachable):
            assert limiter.try_acquire("k")
        own.pause()
        try:
            for limiter in (stalled, reachable):
                for _ in range(10):
                    try:
                        limiter.try_acquire("k")
                    except Exception:
                        assert limiter is stalled
            with Limiter(redis_url, "1/hour", prefix=prefix) as other:
                until(lambda: other.stats("k").blocked == 10, timeout=2)
        finally:
            own.resume()
        reachable.close()
        stalled.close()


def test_flushes_from_many_threads(harness: Harness, redis_url: str, prefix: str) -> None:
    """The flushes run beside the worker and each other: nothing is counted twice, and no call is
    delayed.
    """
    limiter = harness.limiter(redis_url, "1/hour", prefix=prefix, timeout=5, flush_interval=0.001)
    keys = [f"k{n}" for n in range(20)]
    limiter.each(keys)
    failed: list[BaseException] = []

    def work() -> None:
        try:
            for _ in range(10):
                limiter.each(keys)
                limiter.flush()
        except BaseException as exc:  # whatever a thread raises has to fail the test
            failed.append(exc)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert failed == []
    limiter.flush()
    assert {limiter.stats(key).blocked for key in keys} == {40}


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


@forks
@pytest.mark.parametrize("mode", MODES)
def test_parent_and_child_spend_no_lease_twice(redis_url: str, prefix: str, mode: Any) -> None:
    """gunicorn forks its workers so, after it has loaded an application that has made calls."""
    limiter = Limiter(redis_url, "2000/hour", prefix=prefix, consistency=mode, timeout=5, **SOON)
    before = sum(bool(limiter.try_acquire("k")) for _ in range(100))
    strategy: Any = limiter._strategy
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


@forks
def test_a_fork_while_the_worker_flushes(proxy: Proxy, prefix: str) -> None:
    """The child does not wait for the flush of its parent's worker."""
    limiter = Limiter(proxy.url, "1/hour", prefix=prefix, timeout=0.5, flush_interval=0.01)
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
    assert took < 0.4
    limiter.close()


# -- the number of keys that are kept ------------------------------------------------------------


@pytest.mark.parametrize("mode", MODES)
def test_keys_that_were_called_once_are_dropped(
    harness: Harness, redis_url: str, prefix: str, mode: str
) -> None:
    limiter = harness.limiter(
        redis_url, "1/hour", prefix=prefix, consistency=mode, max_local_keys=50, timeout=5
    )
    keys = [f"k{n}" for n in range(200)]
    limiter.each([key for key in keys for _ in range(2)])
    strategy = limiter.limiter._strategy
    assert len(strategy._key_states) <= 50
    until(lambda: limiter.flush() or strategy._key_states.count_evicted_unacknowledged() == 0)
    with admin(redis_url) as server:
        assert used(server, prefix) == 200
    other = harness.limiter(redis_url, "1/hour", prefix=prefix)
    assert {other.stats(key).blocked for key in keys[::25]} == {1}


def test_the_least_used_goes_first(harness: Harness, proxy: Proxy, prefix: str) -> None:
    limiter = harness.limiter(proxy.url, "1/hour", prefix=prefix, max_local_keys=3, **NEVER)
    for key in "abc":
        limiter.each([key] * 2)
    limiter.try_acquire("a")
    limiter.each(["d"] * 2)  # evicts b
    before = proxy.requests
    assert {d.source for d in limiter.each(["a", "c", "d"])} == {"deny_cache"}
    assert proxy.requests == before
    assert limiter.try_acquire("b").source == "store"
    limiter.flush()
    assert [limiter.stats(key).blocked for key in "abcd"] == [3, 2, 2, 2]


def test_eviction_gives_leases_back(harness: Harness, redis_url: str, prefix: str) -> None:
    options: dict[str, Any] = {"prefix": prefix, "consistency": "leased", "timeout": 5}
    limiter = harness.limiter(redis_url, PLENTY, max_local_keys=2, **options, flush_interval=0.05)
    strategy = limiter.limiter._strategy
    limiter.each(["hot"] * 300)
    assert strategy._get("hot").permits_left > 0
    limiter.each(["x"] * 20 + ["y"] * 20 + ["z"] * 20)  # fewer calls get no key state
    assert strategy._get("hot") is None
    with admin(redis_url) as server:
        until(lambda: used(server, prefix, "hot") == 300)


@pytest.mark.slow
@pytest.mark.parametrize("mode", MODES)
def test_a_flood_of_one_time_keys_leaves_nothing_behind(
    harness: Harness, redis_url: str, prefix: str, mode: str
) -> None:
    limiter = harness.limiter(
        redis_url, "2/hour", prefix=prefix, consistency=mode, max_local_keys=100, timeout=5, **SOON
    )
    strategy = limiter.limiter._strategy
    for first in range(0, 2000, 100):
        limiter.each([f"{n}" for n in range(first, first + 100) for _ in range(3)])
    until(lambda: limiter.flush() or strategy._key_states.count_evicted_unacknowledged() == 0)

    def ours() -> int:
        gc.collect()
        states = [thing for thing in gc.get_objects() if isinstance(thing, KeyState)]
        return sum(state.charges[0].ring.startswith(prefix.encode()) for state in states)

    until(lambda: ours() <= 100, what="leases that were to be reviewed are dropped")
