"""Minute views on a real Redis: several processes, both worlds, lost replies, a cluster."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import redis

from distwindow import AsyncLimiter, ConfigurationError, Key, Limiter, RateLimitExceeded, StoreError
from distwindow.minute.commands import views_name
from distwindow.runtime.options import OTHER_ORIGINS
from distwindow.stores.memory import MemoryStore
from tests.clock_and_stores import ManualClock, fresh_key
from tests.servers import until
from tests.servers.faults import DropReply
from tests.servers.proxy import Proxy

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
def test_processes_count_each_entry_once_under_their_origins(redis_url: str, prefix: str) -> None:
    origins = ("checkout", "search")
    processes = [
        subprocess.Popen(
            [sys.executable, "-m", "tests.minute.entry_process", redis_url, prefix, origin,
             "120"],
            cwd=ROOT, stdout=subprocess.PIPE, text=True,
        )
        for origin in origins
    ]  # fmt: skip
    done = {}
    for origin, process in zip(origins, processes, strict=True):
        output, _ = process.communicate(timeout=60)
        assert process.returncode == 0
        done[origin] = [int(word) for word in output.split()]
    with Limiter(redis_url, "150/hour", prefix=prefix, timeout=5.0) as limiter:
        found = limiter.origins("k")
        total, stats = limiter.minute("k"), limiter.stats("k")
    for origin, (passed, blocked, errors) in done.items():
        one = found[origin]
        assert (one.passed, one.blocked, one.error) == (passed, blocked, errors)
        assert one.success == passed - errors
    assert (total.passed, total.blocked) == (150, 90) == (stats.passed, stats.blocked)
    assert (total.success, total.error) == (stats.success, stats.error)


async def test_both_worlds_share_the_views(redis_url: str, prefix: str) -> None:
    key = fresh_key()
    options: Any = {"prefix": prefix, "timeout": 5.0}
    with Limiter(redis_url, "2/hour", **options) as one:
        async with AsyncLimiter(redis_url, "2/hour", **options) as other:
            with one.entry(key, origin="a"):
                pass
            async with other.entry(key, origin="b"):
                pass
            for _ in range(2):  # the second is refused in this process
                with pytest.raises(RateLimitExceeded):
                    async with other.entry(key, origin="b"):
                        pytest.fail("refused, and entered all the same")
            one.flush()
            await other.flush()
            found = one.origins(key)
            assert [(o, s.passed, s.blocked) for o, s in found.items()] == [
                ("b", 1, 2),
                ("a", 1, 0),
            ]
            assert {o: s.seconds for o, s in (await other.origins(key)).items()} == {
                o: s.seconds for o, s in found.items()
            }
            assert (await other.minute(key)).seconds == one.minute(key).seconds


@pytest.mark.parametrize("consistency", ["direct", "leased", "eventual"])
def test_views_are_the_same_with_every_consistency(
    redis_url: str, prefix: str, consistency: Any
) -> None:
    key = fresh_key()
    options: Any = {"prefix": prefix, "consistency": consistency, "timeout": 5.0}
    with Limiter(redis_url, "5/hour", max_origins=1, **options) as limiter:
        refused = 0
        for number in range(8):
            try:
                with limiter.entry(key, origin=f"app-{number % 2}"):
                    pass
            except RateLimitExceeded:
                refused += 1
        found = limiter.origins(key)
        assert list(found) == ["app-0", OTHER_ORIGINS]
        assert refused >= 3
        assert sum(one.passed for one in found.values()) == 8 - refused
        assert sum(one.blocked for one in found.values()) == refused
        assert sum(one.success for one in found.values()) == 8 - refused


@pytest.mark.slow
def test_a_lost_reply_counts_once(proxy: Proxy, redis_url: str, prefix: str) -> None:
    key = fresh_key()
    with (
        Limiter(proxy.url, "100/hour", prefix=prefix, timeout=0.3, flush_interval=60) as limiter,
        Limiter(redis_url, "100/hour", prefix=prefix, timeout=5.0) as reader,
    ):
        for _ in range(3):
            with limiter.entry(key, origin="app"):
                pass
            with proxy.inject(DropReply(only=b"EVALSHA")), pytest.raises(StoreError):
                limiter.flush()
        for _ in range(2):  # the batch whose reply was lost, and then what was counted since
            limiter.flush()
        (one,) = reader.origins(key).values()
        assert (one.passed, one.success) == (3, 3)


def test_the_views_of_a_key_are_on_the_node_of_its_windows(cluster_url: str, prefix: str) -> None:
    with Limiter(cluster_url, "5/hour", prefix=prefix, timeout=5.0) as limiter:
        keys: list[str | Key] = [*map(str, range(8)), Key("orders", tag="acme")]
        for key in keys:
            with limiter.entry(key, origin="app"):
                pass
            assert limiter.origins(key)["app"].success == limiter.stats(key).success == 1


def test_a_limiter_whose_clock_is_its_own_counts_in_its_seconds(
    redis_url: str, prefix: str
) -> None:
    clock = ManualClock()
    with Limiter(redis_url, "5/hour", prefix=prefix, clock="client", time=clock) as limiter:
        key = fresh_key()
        for _ in range(2):
            with limiter.entry(key):
                clock.move(999)
        starts = [second.start for second in limiter.minute(key).seconds]
        assert starts[0] % 1000 == 0
        assert starts[-1] == clock.now_ms() // 1000 * 1000


def test_another_limiter_on_a_store_in_this_process_sees_entries_after_a_flush() -> None:
    clock = ManualClock()
    store = MemoryStore(clock)
    one, other = Limiter(store, "5/hour", time=clock), Limiter(store, "5/hour", time=clock)
    with one.entry("k"):
        pass
    assert one.minute("k").success == 1
    with one.entry("k"):
        pass
    assert other.minute("k").success == 1, "nobody flushes by a clock that may stand still"
    one.flush()
    assert other.minute("k").success == 2


def test_the_worker_flushes_entries_on_a_store_in_this_process() -> None:
    store = MemoryStore()
    one, other = (Limiter(store, "5/hour", flush_interval=0.01) for _ in range(2))
    with one.entry("k"):
        pass
    until(lambda: other.minute("k").success == 1, what="the worker flushes")


def test_a_plain_acquire_writes_no_view(redis_url: str, prefix: str) -> None:
    with (
        Limiter(redis_url, "1/hour", prefix=prefix, timeout=5.0) as limiter,
        redis.Redis.from_url(redis_url) as client,
    ):
        with limiter.entry("entered", origin="app"):
            pass
        for _ in range(3):
            limiter.try_acquire("plain")
        limiter.flush()
        assert limiter.minute("plain").seconds == ()
        names = {name.decode().removeprefix(f"{prefix}:") for name in client.keys(f"{prefix}:*")}
    of_plain = {"{plain}:360000:10", "{plain}:360000:10:senders"}
    assert {name for name in names if name.startswith("{plain}")} == of_plain
    assert {"{entered}:minute", "{entered}:minute:senders"} <= names


def test_views_alone_keep_a_process_from_ending_before_they_are_sent(
    redis_url: str, prefix: str
) -> None:
    """With `direct`, a pass of an entry that has not ended is counted in its view alone."""
    limiter = Limiter(redis_url, "5/hour", prefix=prefix, flush_interval=3600, timeout=5.0)
    key = fresh_key()
    with limiter.entry(key):
        assert limiter.decider.strategy.unacknowledged_counts() == 1
        limiter.flush()
        assert limiter.decider.strategy.unacknowledged_counts() == 0
    limiter.close()


@pytest.mark.parametrize(
    ("field", "value"), [(b"", "word;"), (b"origin", "1 2 3;"), (b"\xff", "1 2 3 4 5 6 7;")]
)
def test_a_hash_of_another_program_is_named(
    redis_url: str, prefix: str, field: bytes, value: str
) -> None:
    name = views_name(prefix, "k")
    with redis.Redis.from_url(redis_url) as server:
        server.hset(name, field, value)
    with Limiter(redis_url, "2/hour", prefix=prefix, timeout=5.0) as limiter:
        for read in (limiter.minute, limiter.origins):
            with pytest.raises(ConfigurationError, match=r":minute' holds no minute views"):
                read("k")
