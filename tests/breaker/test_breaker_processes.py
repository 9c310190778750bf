"""A circuit breaker over a real Redis: a cluster, lost replies, forks, both worlds. (Processes that
open and close together are those of `tests/attack/breakers.py`.)
"""

from __future__ import annotations

import asyncio
import os
import threading
import time
from contextlib import suppress
from typing import Any

import pytest
import redis

from distwindow import (
    AsyncCircuitBreaker,
    BreakerChange,
    BreakerOpen,
    CircuitBreaker,
    ErrorCount,
    Key,
    StoreError,
)
from distwindow.breaker.call import BreakerCall
from distwindow.breaker.commands import breaker_name
from distwindow.testing import ManualClock
from tests.breaker.driven import fail
from tests.lifecycle.worker_options import forks
from tests.servers.faults import DropReply
from tests.servers.proxy import Proxy
from tests.servers.wait import until


def test_counts_of_both_worlds_open_one_breaker(redis_url: str, prefix: str) -> None:
    rule = ErrorCount(6, open_for=60)
    with CircuitBreaker(redis_url, rule, prefix=prefix) as breaker:
        fail(breaker, 3)
        breaker.flush()
        assert breaker.state("k") == "closed"

        async def others() -> str:
            async with AsyncCircuitBreaker(redis_url, rule, prefix=prefix) as awaited:
                for _ in range(3):
                    with pytest.raises(OSError):  # noqa: PT011 - it is passed on
                        async with awaited.call("k"):
                            raise OSError
                await awaited.flush()
                with pytest.raises(BreakerOpen):
                    async with awaited.call("k"):
                        pass
                return await awaited.state("k")

        assert asyncio.run(others()) == "open"
        assert breaker.state("k") == "open"


@pytest.mark.parametrize("key", ["plain", Key("resource", tag="tag"), b"\xff\x00{}"])
def test_a_cluster_has_breakers_too(cluster_url: str, prefix: str, key: Any) -> None:
    with CircuitBreaker(cluster_url, ErrorCount(1), prefix=prefix) as breaker:
        fail(breaker, key=key)
        breaker.flush()
        assert breaker.state(key) == "open"


def test_the_worker_flushes_and_refreshes(redis_url: str, prefix: str) -> None:
    rule = ErrorCount(1, open_for=60)
    with (
        CircuitBreaker(redis_url, rule, prefix=prefix, sync_interval=0.05) as one,
        CircuitBreaker(redis_url, rule, prefix=prefix, sync_interval=0.05) as other,
    ):
        heard: list[str] = []
        other.on_change(lambda change: heard.append(change.state))
        with other.call("k"):
            pass
        fail(one)

        def has_heard() -> bool:
            with suppress(BreakerOpen), other.call("k"):
                pass
            return heard == ["open"]

        until(has_heard)


def is_flushed(breaker: CircuitBreaker) -> bool:
    """Flush, and return whether the store has answered."""
    with suppress(StoreError):
        breaker.flush()
        return True
    return False


def test_counts_arrive_once_though_replies_are_lost(
    redis_url: str, proxy: Proxy, prefix: str
) -> None:
    rule = ErrorCount(1000, window=600)
    options: dict[str, Any] = {"prefix": prefix, "timeout": 0.1, "flush_interval": 60}
    with CircuitBreaker(proxy.url, rule, **options) as breaker:
        fail(breaker, 5)
        with proxy.inject(DropReply(only=b"EVALSHA")):
            for _ in range(3):
                with pytest.raises(StoreError):
                    breaker.flush()
        until(lambda: is_flushed(breaker), what="a flush within the timeout")
    assert counted(redis_url, breaker_name(prefix, "k", rule)) == 5


def test_a_probe_whose_task_was_cancelled_is_free_again(redis_url: str, prefix: str) -> None:
    """At whatever await it was cancelled: otherwise nobody would get it for a minute."""
    rule = ErrorCount(1, open_for=0.04, probe_timeout=60)

    async def enter(breaker: AsyncCircuitBreaker, key: str) -> None:
        async with breaker.call(key):
            await asyncio.sleep(60)

    async def cancel_after(breaker: AsyncCircuitBreaker, key: str, ticks: int) -> None:
        with suppress(OSError):
            async with breaker.call(key):
                raise OSError
        await breaker.flush()
        await asyncio.sleep(0.05)  # the server's time, which the test cannot move
        task = asyncio.create_task(enter(breaker, key))
        for _ in range(ticks):
            await asyncio.sleep(0)
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task
        deadline = time.monotonic() + 20
        while True:
            with suppress(BreakerOpen):
                async with breaker.call(key):
                    break
            assert time.monotonic() < deadline, f"cancelled after {ticks} ticks"
            await asyncio.sleep(0.01)
        assert await breaker.state(key) == "closed"

    async def main() -> None:
        options: dict[str, Any] = {"sync_interval": 0.02, "flush_interval": 0.02, "timeout": 10.0}
        async with AsyncCircuitBreaker(redis_url, rule, prefix=prefix, **options) as breaker:
            for ticks in range(12):
                await cancel_after(breaker, f"k{ticks}", ticks)

    asyncio.run(main())


@forks
def test_a_forked_child_counts_its_own_calls(redis_url: str, prefix: str) -> None:
    rule = ErrorCount(1000, window=600)
    with CircuitBreaker(redis_url, rule, prefix=prefix, flush_interval=60) as breaker:
        fail(breaker, 3)
        call = breaker.call("k").__enter__()
        child = os.fork()
        if not child:
            try:
                call.__exit__(None, None, None)  # it is the parent's
                fail(breaker, 2)
                breaker.flush()
            finally:
                os._exit(0)
        os.waitpid(child, 0)
        call.__exit__(None, None, None)
    assert counted(redis_url, breaker_name(prefix, "k", rule)) == 6


def leave_in_child(call: Any, failure: BaseException | None) -> int:
    """Fork, leave the block of `call` in the child, and return its exit status."""
    child = os.fork()
    if child:
        return os.waitpid(child, 0)[1]
    try:
        how: Any = (type(failure), failure, None)
        if isinstance(call, BreakerCall):
            call.__exit__(*how)
        else:
            with suppress(StopIteration):  # a child of a task has no loop, and waits for nothing
                call.__aexit__(*how).send(None)
        os._exit(0)
    finally:
        os._exit(1)


@forks
@pytest.mark.parametrize("failure", [None, OSError(), SystemExit()])
def test_a_forked_child_that_leaves_the_block_of_a_probe_decides_nothing(
    redis_url: str, prefix: str, failure: BaseException | None
) -> None:
    clock = ManualClock()
    options: dict[str, Any] = {"prefix": prefix, "clock": "client", "time": clock, "timeout": 5.0}

    async def main() -> None:
        async with AsyncCircuitBreaker(redis_url, ErrorCount(1), **options) as awaited:
            async with awaited.call("k") as probe:
                assert leave_in_child(probe, failure) == 0, "the child's exit has raised"
                assert breaker.state("k") == "half_open"
            assert breaker.state("k") == "closed"

    with CircuitBreaker(redis_url, ErrorCount(1), **options) as breaker:
        fail(breaker)
        breaker.flush()
        clock.advance(5)
        with suppress(OSError), breaker.call("k") as probe:
            assert leave_in_child(probe, failure) == 0, "the child's exit has raised"
            assert breaker.state("k") == "half_open"
            raise OSError
        assert breaker.state("k") == "open"
        clock.advance(5)
        asyncio.run(main())


def test_two_threads_ask_for_one_probe(redis_url: str, prefix: str) -> None:
    rule = ErrorCount(1, open_for=0.05, probe_timeout=60)
    with CircuitBreaker(redis_url, rule, prefix=prefix, sync_interval=0.02) as breaker:
        fail(breaker)
        breaker.flush()
        until(lambda: breaker._states.get_or_create("k").retry_at < breaker._states.monotonic())
        inside, done = threading.Semaphore(0), threading.Event()
        admitted: list[int] = []

        def call(number: int) -> None:
            with suppress(BreakerOpen), breaker.call("k"):
                admitted.append(number)
                inside.release()
                done.wait(10)

        threads = [threading.Thread(target=call, args=(number,)) for number in range(8)]
        for thread in threads:
            thread.start()
        assert inside.acquire(timeout=10)
        for _ in range(20):
            with pytest.raises(BreakerOpen):
                breaker.call("k").__enter__()
        # The others are refused: one that asks still when the probe ends would find it closed.
        until(lambda: sum(thread.is_alive() for thread in threads) == 1)
        done.set()
        for thread in threads:
            thread.join()
        assert len(admitted) == 1


def counted(url: str, name: bytes) -> int:
    """Return the calls in all buckets of a breaker."""
    with redis.Redis.from_url(url) as client:
        values = [value for field, value in client.hgetall(name).items() if field.isdigit()]
    return sum(int(value.split()[1]) for value in values)


# -- interruptions, and what a process learns first -----------------------------------------------


def test_an_interrupted_exchange_does_not_mean_that_the_store_is_away(
    redis_url: str, prefix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    class SoftTimeLimit(Exception):
        pass

    def interrupted(*_: object) -> None:
        raise SoftTimeLimit

    with CircuitBreaker(redis_url, ErrorCount(1), prefix=prefix, on_store_error="deny") as breaker:
        with monkeypatch.context() as patch:
            patch.setattr(breaker._store, "execute_many", interrupted)
            with pytest.raises(SoftTimeLimit), breaker.call("k"):
                pass
        states = breaker._states
        assert not states.store_is_down(states.get_or_create("k"), states.monotonic())
        with breaker.call("k"):
            pass


def test_a_new_process_hears_of_no_change_from_before_its_first_call(
    redis_url: str, prefix: str
) -> None:
    rule = ErrorCount(1, open_for=100.0)
    heard: list[BreakerChange] = []
    with CircuitBreaker(redis_url, rule, prefix=prefix) as first:
        fail(first)
        first.flush()
        with CircuitBreaker(redis_url, rule, prefix=prefix) as second:
            second.on_change(heard.append)
            with pytest.raises(BreakerOpen), second.call("k"):
                pass
    assert heard == []
