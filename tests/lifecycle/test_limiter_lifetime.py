"""Limiters after a fork, after they were closed, beside others, and on several event loops."""

from __future__ import annotations

import asyncio
import os
import threading
import traceback
import warnings
from collections.abc import Callable
from typing import Any

import pytest

from distwindow import AsyncLimiter, ConfigurationError, Limiter
from tests.clock_and_stores import fresh_key


def in_child(work: Callable[[], Any]) -> str:
    """Return as text what `work` returns or raises in a forked child."""
    reading, writing = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # from 3.12 on a fork of a process with threads warns
        pid = os.fork()
    if pid == 0:
        try:
            output = repr(work())
        except BaseException:  # the child must not return into pytest, whatever is raised
            output = traceback.format_exc()
        os.write(writing, output.encode()[:60_000])
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading) as pipe:
        output = pipe.read()
    os.waitpid(pid, 0)
    return output


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
@pytest.mark.parametrize("server", ["redis", "cluster", "tls", "unix"])
def test_a_used_limiter_survives_a_fork(request: pytest.FixtureRequest, server: str) -> None:
    url = request.getfixturevalue(f"{server}_url")
    with Limiter(url, "100/hour 1 buckets", timeout=10) as limiter:
        key = fresh_key()
        assert limiter.try_acquire(key).remaining == 99
        for lap in range(3):
            left = 98 - 2 * lap
            assert in_child(lambda: limiter.try_acquire(key).remaining) == str(left)
            assert limiter.try_acquire(key).remaining == left - 1
        assert limiter.stats(key).passed == 7


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
def test_a_fork_in_the_middle_of_other_threads_calls(redis_url: str) -> None:
    with Limiter(redis_url, "1000000/hour 1 buckets", timeout=10) as limiter:
        key, stop, made = fresh_key(), threading.Event(), []

        def busy() -> None:
            while not stop.is_set():
                made.append(limiter.try_acquire(key))

        threads = [threading.Thread(target=busy) for _ in range(4)]
        for thread in threads:
            thread.start()
        output = [
            in_child(lambda: [limiter.try_acquire(key).allowed for _ in range(5)]) for _ in "abc"
        ]
        stop.set()
        for thread in threads:
            thread.join(20)
        assert output == ["[True, True, True, True, True]"] * 3
        assert limiter.stats(key).passed == len(made) + 15


@pytest.mark.event_loops
@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
def test_an_asyncio_limiter_survives_a_fork(redis_url: str) -> None:
    limiter = AsyncLimiter(redis_url, "100/hour 1 buckets", timeout=10)
    key = fresh_key()

    async def once() -> int:
        return (await limiter.try_acquire(key)).remaining

    loop = asyncio.new_event_loop()
    assert loop.run_until_complete(once()) == 99
    assert in_child(lambda: asyncio.run(once())) == "98"
    assert loop.run_until_complete(once()) == 97
    loop.run_until_complete(limiter.aclose())
    loop.close()


def test_after_close_a_call_in_memory_raises() -> None:
    limiter = Limiter("memory://", "5/minute")
    limiter.close()
    with pytest.raises(ConfigurationError, match="closed; make a new one"):
        limiter.try_acquire("key")


def test_limiters_in_memory_share_nothing() -> None:
    one, other = Limiter("memory://", "1/day"), Limiter("memory://", "1/day")
    assert one.try_acquire("key")
    assert other.try_acquire("key")
    assert not one.try_acquire("key")


def test_limiters_of_one_prefix_share_and_others_do_not(redis_url: str) -> None:
    key = fresh_key()
    with (
        Limiter(redis_url, "2/day", prefix="shared-a") as one,
        Limiter(redis_url, "2/day", prefix="shared-a") as same,
        Limiter(redis_url, "2/day", prefix="shared-b") as other,
    ):
        assert one.try_acquire(key).remaining == 1
        assert same.try_acquire(key.encode()).remaining == 0
        assert other.try_acquire(key).remaining == 1
        one.reset(key)
        other.reset(key)
