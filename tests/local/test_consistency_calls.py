"""Calls that this process decides, combined with commands to the store: several keys, resets,
flushes, closes, loops of calls that never wait, and a key that is given as text and as bytes.
"""

from __future__ import annotations

import asyncio
import logging
import re
import threading
import time
from typing import Any

import pytest

from distwindow import AsyncLimiter, Limiter, StoreError
from distwindow.runtime import timers
from tests.harness import Harness, LimiterAdapter, admin, used
from tests.servers import Delay, Proxy, Refuse, until
from tests.servers.wait import free_port

NEVER = 3600.0


def test_a_call_over_several_keys_includes_what_this_process_has_passed(
    harness: Harness, redis_url: str, prefix: str
) -> None:
    limiter = harness.limiter(
        redis_url, "100/hour", prefix=prefix, consistency="eventual", sync_interval=NEVER
    )
    assert all(limiter.each(["k"] * 60))
    assert not limiter.try_acquire_all([("k", "100/hour", 41)])
    assert limiter.try_acquire_all([("k", "100/hour", 40), ("other", "5/hour", 1)])


def test_several_keys_are_not_refused_for_want_of_a_lease(
    harness: Harness, redis_url: str, prefix: str
) -> None:
    limiter = harness.limiter(
        redis_url, "2000/hour", prefix=prefix, consistency="leased", flush_interval=NEVER
    )
    assert all(limiter.each(["k"] * 300))
    with admin(redis_url) as server:
        assert used(server, prefix) > 300
    assert limiter.try_acquire_all([("k", "2000/hour", 1700)])


def test_a_reset_that_fails_keeps_the_key_state(harness: Harness, prefix: str) -> None:
    limiter = harness.limiter(
        f"redis://127.0.0.1:{free_port()}", "20/hour",
        prefix=prefix, consistency="eventual", sync_interval=NEVER,
    )  # fmt: skip
    assert all(limiter.each(["k"] * 15))
    with pytest.raises(StoreError):
        limiter.reset("k")
    assert [bool(decision) for decision in limiter.each(["k"] * 6)] == [True] * 5 + [False]


def test_after_an_own_refund_a_call_is_admitted_at_once(
    harness: Harness, redis_url: str, prefix: str
) -> None:
    limiter = harness.limiter(
        redis_url, "3/hour", prefix=prefix, consistency="eventual", sync_interval=NEVER
    )
    decision, *_ = limiter.each(["k"] * 4)
    assert limiter.refund(decision) == 1
    assert limiter.try_acquire("k")


def test_a_flush_that_fails_raises_and_keeps_its_counts(
    harness: Harness, proxy: Proxy, redis_url: str, prefix: str
) -> None:
    limiter = harness.limiter(
        proxy.url, "100/hour", prefix=prefix, consistency="eventual", sync_interval=NEVER
    )
    limiter.try_acquire("k")
    limiter.flush()
    assert all(limiter.each(["k"] * 7))
    with proxy.inject(Refuse()), pytest.raises(StoreError):
        limiter.flush()
    until(lambda: _flushed(limiter))
    with admin(redis_url) as server:
        assert used(server, prefix) == 8


def _flushed(limiter: LimiterAdapter) -> bool:
    try:
        limiter.flush()
    except StoreError:
        return False
    return True


def test_flushes_that_begin_to_fail_are_logged_once_and_so_is_their_recovery(
    harness: Harness,
    proxy: Proxy,
    prefix: str,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(timers, "SETTLED_S", 0.2)
    caplog.set_level(logging.WARNING, "distwindow")
    limiter = harness.limiter(
        proxy.url, "1000/hour", prefix=prefix, consistency="eventual", sync_interval=0.01
    )

    def of_flushes() -> list[str]:
        return [line for line in caplog.messages if "flush" in line]

    limiter.try_acquire("k")
    limiter.flush()
    with proxy.inject(Refuse()):
        limiter.try_acquire("k")
        until(lambda: of_flushes())
        time.sleep(0.1)  # several more flushes fail, which must not be logged
    until(lambda: len(of_flushes()) > 1)
    began, ended = of_flushes()
    name = f"limiter '{prefix}' at {proxy.url}"
    assert began.startswith(f"flushing the counts of {name} failed: ")
    # The flush that fails first may have been one before the count, or that of earlier ones.
    kept = r"; \d+ counts? kept here; the next flush tries again$"
    assert re.search(kept, began) or "kept" not in began
    assert ended == f"the counts of {name} can be flushed again"


@pytest.mark.slow
def test_a_second_close_waits_until_everything_is_flushed(
    proxy: Proxy, redis_url: str, prefix: str
) -> None:
    for turn in range(10):
        own = f"{prefix}-{turn}"
        limiter = Limiter(
            proxy.url, "1000/hour", prefix=own, consistency="eventual", sync_interval=NEVER
        )
        for _ in range(20):
            limiter.try_acquire("k")
        with proxy.inject(Delay(replies=0.005)):
            threads = [threading.Thread(target=limiter.close) for _ in range(3)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join(30)
        with admin(redis_url) as server:
            assert used(server, own) == 20


@pytest.mark.parametrize("mode", ["direct", "leased", "eventual"])
async def test_a_loop_of_calls_that_never_wait_lets_other_tasks_run(
    redis_url: str, prefix: str, mode: str
) -> None:
    # `mode` is a str here, and one of the three literals there.
    async with AsyncLimiter(redis_url, "5/hour", prefix=prefix, consistency=mode) as limiter:  # type: ignore[arg-type]
        turns = 0

        async def other() -> None:
            nonlocal turns
            while True:
                turns += 1
                await asyncio.sleep(0)

        task = asyncio.create_task(other())
        for _ in range(20):
            await limiter.try_acquire("k")
        turns = 0
        for _ in range(1000):
            await limiter.try_acquire("k")
        assert turns > 10
        task.cancel()


@pytest.mark.parametrize("mode", ["direct", "leased", "eventual"])
def test_bytes_and_text_are_one_key(redis_url: str, prefix: str, mode: Any) -> None:
    with Limiter(
        redis_url, "3/day", prefix=prefix, consistency=mode, flush_interval=600, sync_interval=600
    ) as limiter:
        limiter.try_acquire("user")
        limiter.flush()
        answers = [limiter.try_acquire(key) for key in ("user", b"user", "user", b"user", b"user")]
        assert [answer.allowed for answer in answers] == [True, True, False, False, False]
        assert {answer.key for answer in answers} == {"user"}
        strategy: Any = limiter.decider.strategy
        assert len(strategy._key_states) == 1
        assert limiter.stats(b"user").blocked == 3
        assert not limiter.peek(b"user")
        limiter.reset(b"user")
        assert limiter.try_acquire("user")


@pytest.mark.parametrize("length", [1, 256, 257, 3000])
@pytest.mark.parametrize("mode", ["direct", "leased", "eventual"])
def test_methods_of_a_key_find_its_state_however_long_it_is(
    harness: Harness, redis_url: str, prefix: str, mode: str, length: int
) -> None:
    """`eventual` keeps the state of a long key under another name."""
    limiter = harness.limiter(redis_url, "5/hour", prefix=prefix, consistency=mode)
    key = "k" * length
    assert [bool(decision) for decision in limiter.each([key] * 6)] == [True] * 5 + [False]
    assert limiter.stats(key).passed == 5
    assert not limiter.try_acquire_all([(key, "5/hour", 1)])
    limiter.reset(key)
    assert limiter.try_acquire(key)
