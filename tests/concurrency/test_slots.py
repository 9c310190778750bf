"""Concurrency limits on Redis: lost replies, holders that die, and processes that end leave no slot
held, and no slot is granted twice.
"""

from __future__ import annotations

import asyncio
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from distwindow import (
    AsyncConcurrency,
    Concurrency,
    ConcurrencyExceeded,
    ConfigurationError,
    Key,
    StoreError,
    StoreTimeout,
)
from tests.harness import admin
from tests.interruptions import restore_sigint
from tests.servers import Proxy, Standalone
from tests.servers.faults import Blackhole, DropReply, Pass, Refuse, ResetAfterSend
from tests.servers.wait import until

ROOT = Path(__file__).parents[2]
SCRIPT = b"EVALSHA"
TTL = 30.0


def number_held(slots: Concurrency, key: Any = "k") -> int:
    return slots.stats(key).held


def all_freed(slots: Concurrency, faulty: Concurrency | None = None, key: str = "k") -> None:
    """Check that no slot is held any more, long before the deadline of any. `faulty` has a link of
    its own, which may be disturbed.

    A block whose `__exit__` a signal handler has kept from its first line is freed when its slot
    would be renewed, a third of the time to live after it was granted (see `concurrency/slot.py`).
    """
    until(lambda: not (faulty or slots)._held._claims, TTL / 2, what="nothing is left to free")
    assert number_held(slots, key) == 0


@pytest.fixture
def slots(redis_url: str, prefix: str) -> Iterator[Concurrency]:
    with Concurrency(redis_url, 2, prefix=prefix, ttl=TTL, timeout=4) as made:
        yield made


# -- every store ----------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("store", ["redis_url", "unix_url", "cluster_url", "sentinel_url",
                                   "tls_url", "fake_url"])  # fmt: skip
def test_a_slot_on_every_store(request: pytest.FixtureRequest, prefix: str, store: str) -> None:
    url = request.getfixturevalue(store)
    with Concurrency(url, 1, prefix=prefix, timeout=4) as slots:
        for key in ("a", "b", Key("c", tag="t")):
            with slots.hold(key):
                assert not slots.try_hold(key)
            assert slots.try_hold(key)


@pytest.mark.event_loops
@pytest.mark.parametrize("store", ["redis_url", "cluster_url", "sentinel_url", "fake_url"])
def test_a_slot_on_every_store_awaited(
    request: pytest.FixtureRequest, prefix: str, store: str
) -> None:
    url = request.getfixturevalue(store)

    async def main() -> None:
        async with AsyncConcurrency(url, 1, prefix=prefix, timeout=4) as slots:
            for key in ("a", "b"):
                async with slots.hold(key):
                    assert not await slots.try_hold(key)
                assert (await slots.stats(key)).held == 0
                slot = await slots.try_hold(key)
                assert slot

    asyncio.run(main())


def test_a_client_of_the_caller(redis_url: str, prefix: str) -> None:
    client = admin(redis_url)
    with Concurrency(client, 1, prefix=prefix, timeout=4) as slots, slots.hold("k"):
        assert number_held(slots) == 1
    assert client.ping()
    client.close()


def test_without_the_time_of_the_server(redis_url: str, prefix: str) -> None:
    with Concurrency(redis_url, 1, prefix=prefix, timeout=4, clock="client") as slots:
        with slots.hold("k") as slot:
            assert slot
            assert not slots.try_hold("k")
            slots.flush()
        assert number_held(slots) == 0


def test_two_processes_see_each_other(slots: Concurrency, redis_url: str, prefix: str) -> None:
    with Concurrency(redis_url, 2, prefix=prefix, name="other") as other:
        with slots.hold("k"), other.hold("k"):
            names = {holder.name for holder in slots.stats("k").holders}
            assert names == {"other", slots._owner()}
            with pytest.raises(ConcurrencyExceeded):
                slots.hold("k", timeout=0.3).__enter__()
        assert number_held(slots) == 0


def test_a_key_that_another_program_uses(slots: Concurrency, redis_url: str, prefix: str) -> None:
    server = admin(redis_url)
    server.set(f"{prefix}:{{k}}:slots", "text")
    with pytest.raises(ConfigurationError, match="another type"):
        slots.hold("k").__enter__()
    assert not slots._held._claims
    server.close()


# -- lost replies ---------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("fault", [DropReply(only=SCRIPT, times=1),
                                   ResetAfterSend(only=SCRIPT, times=1)])  # fmt: skip
@pytest.mark.parametrize("at", ["hold", "try_hold", "free"])
def test_a_lost_reply_is_asked_for_again(
    proxy: Proxy, slots: Concurrency, prefix: str, fault: Any, at: str
) -> None:
    for turn in range(3):
        key = f"k{turn}"
        try:
            with Concurrency(proxy.url, 2, prefix=prefix, ttl=TTL, timeout=1) as faulty:
                warm(faulty)
                before = proxy.affected
                if at != "free":
                    proxy.fault = fault
                with faulty.try_hold(key) if at == "try_hold" else faulty.hold(key) as slot:
                    assert slot
                    assert number_held(slots, key) == 1
                    if at == "free":
                        proxy.fault = fault
                assert proxy.affected == before + 1
                all_freed(slots, faulty, key)
                return
        except StoreTimeout:  # the machine has stalled for longer than a call waits
            proxy.fault = Pass()
    pytest.fail("three times a call had no reply in time")


def warm(slots: Concurrency) -> None:
    """Open the connections, so that a fault affects what the test is about."""
    with slots.hold("warm"):
        slots.flush()


@pytest.mark.slow
def test_while_every_reply_is_lost_nobody_holds_and_nothing_leaks(
    proxy: Proxy, slots: Concurrency, prefix: str
) -> None:
    with Concurrency(proxy.url, 2, prefix=prefix, ttl=TTL, timeout=0.4) as faulty:
        warm(faulty)
        with proxy.inject(DropReply(only=SCRIPT)):
            for _ in range(3):
                with pytest.raises(StoreTimeout):
                    faulty.try_hold("k")
            with pytest.raises(StoreTimeout):
                faulty.hold("k", timeout=1.0).__enter__()
        all_freed(slots, faulty)


@pytest.mark.slow
@pytest.mark.parametrize("fault", [DropReply(only=SCRIPT, times=4), Blackhole(times=4)])
def test_a_wait_outlasts_a_silent_store(
    proxy: Proxy, slots: Concurrency, prefix: str, fault: Any
) -> None:
    """A caller with time left asks until it knows, also where a new connection is not answered."""
    with Concurrency(proxy.url, 2, prefix=prefix, ttl=TTL, timeout=0.4) as faulty:
        warm(faulty)
        proxy.fault = fault
        with faulty.hold("k", timeout=20) as slot:
            assert slot
            assert number_held(slots) == 1
        all_freed(slots, faulty)


def test_a_block_ends_without_an_error_while_the_store_is_away(
    proxy: Proxy, slots: Concurrency, prefix: str
) -> None:
    with Concurrency(proxy.url, 2, prefix=prefix, ttl=TTL, timeout=0.4) as faulty:
        with faulty.hold("k"):
            proxy.fault = Refuse()
        assert number_held(slots) == 1
        proxy.fault = Pass()
        all_freed(slots, faulty)


def test_a_store_that_is_away_is_an_error_and_nothing_is_left(
    proxy: Proxy, prefix: str, caplog: pytest.LogCaptureFixture
) -> None:
    with Concurrency(proxy.url, 2, prefix=prefix, ttl=TTL, timeout=0.4) as faulty:
        proxy.fault = Refuse()
        with pytest.raises(StoreError):
            faulty.hold("k", timeout=5).__enter__()
        with pytest.raises(StoreError):
            faulty.try_hold("k")
        assert not faulty._held._claims
        faulty.flush()  # has nothing to say to a store that has met nobody, and so does not fail
        proxy.fault = Pass()
    assert not [line for line in caplog.messages if "is away" not in line]


# -- renewal --------------------------------------------------------------------------------------


def holds_on(slots: Concurrency, seconds: float, stall: float) -> bool:
    """Hold a slot for so long, and check that nobody else gets it. False if something took as long
    as `stall` (s) meanwhile: then the slot may be lost.
    """
    slowest = 0.0
    try:
        with slots.hold("k") as slot:
            begun = last = time.monotonic()
            while last < begun + seconds:
                seen = slot.held, not slots.try_hold("k")
                time.sleep(0.05)
                now = time.monotonic()
                slowest, last = max(slowest, now - last), now
                if slowest >= stall:
                    return False
                assert seen == (True, True)
    except StoreTimeout:
        return False
    return True


@pytest.mark.slow
def test_a_slot_is_kept_for_longer_than_its_time_to_live(redis_url: str, prefix: str) -> None:
    for turn in range(10):  # a machine that stalls for the time to live ends the slot
        own = f"{prefix}-{turn}"
        with Concurrency(redis_url, 1, prefix=own, ttl=0.6, timeout=0.3) as slots:
            if holds_on(slots, 3 * 0.6, 0.2):
                assert number_held(slots) == 0
                return
    pytest.fail("the machine stalled ten times")


def test_all_slots_of_a_process_are_renewed_in_one_exchange(
    proxy: Proxy, slots: Concurrency, prefix: str
) -> None:
    with Concurrency(proxy.url, 100, prefix=prefix, ttl=TTL, timeout=4) as many:
        mine = [many.try_hold(key) for key in "abc" for _ in range(40)]
        requests = []
        for _ in range(2):
            for claim in many._held._claims.values():
                claim.next_due_at = 0.0  # as after a third of the time to live
            before = proxy.requests
            assert many._flush_now(False) is None
            requests.append(proxy.requests - before)
        # With the first, the server may have to be sent the script.
        assert requests[1] == 1
        assert {slots.stats(key).held for key in "abc"} == {40}
        assert all(holder.expires_in > TTL - 5 for holder in slots.stats("a").holders)
        del mine


@pytest.mark.slow
def test_a_holder_that_cannot_renew_is_told_before_another_gets_its_slot(
    proxy: Proxy, redis_url: str, prefix: str, caplog: pytest.LogCaptureFixture
) -> None:
    options: Any = {"prefix": prefix, "ttl": 1.0, "timeout": 0.2}
    with Concurrency(redis_url, 1, **options) as others:
        with Concurrency(proxy.url, 1, **options) as slots, slots.hold("k") as slot:
            proxy.fault = Blackhole()
            while slot.held:
                # Asked first: the answer comes before the slot is seen to be held.
                other = others.try_hold("k")
                if other:
                    assert slot.lost
                    other.release()
                time.sleep(0.005)
            assert slot.lost
            with others.hold("k", timeout=5):
                assert not slot.held
            proxy.fault = Pass()
        assert "a slot of 'k' was lost" in caplog.text
        assert "renewing or freeing the slots" in caplog.text
        all_freed(others)


@pytest.mark.slow
def test_waiting_processes_ask_at_a_bounded_rate(prefix: str) -> None:
    with Standalone() as server:
        with Concurrency(server.url, 1, prefix=prefix) as slots, slots.hold("k"):
            threads = [threading.Thread(target=wait, args=[slots]) for _ in range(8)]
            client = admin(server.url)
            calls = client.info("commandstats").get("cmdstat_evalsha", {"calls": 0})["calls"]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            asked = client.info("commandstats")["cmdstat_evalsha"]["calls"] - calls
            client.close()
        # Eight threads wait for 2 s, and each asks once. The head then asks after 5 ms or a quarter
        # of the time since the slot was granted, or half of that: 8 times in 20 ms, then each time
        # after it has waited for at least an eighth longer, up to every 0.1 to 0.2 s.
        assert 8 <= asked <= 8 + 8 + 32 + 2 / 0.1 + 8


@pytest.mark.slow
def test_who_has_just_freed_a_slot_does_not_overtake_those_who_wait(
    redis_url: str, prefix: str
) -> None:
    """Six callers, each as in a process of its own, hold the only slot again and again. Those that
    come at about the same time may be served in another order, so a caller may be overtaken by
    some, but it does not wait while the others have one slot after another.
    """
    waits: list[tuple[float, float]] = []

    def work() -> None:
        with Concurrency(redis_url, 1, prefix=prefix, timeout=4) as slots:
            for _ in range(20):
                came = time.monotonic()
                with slots.hold("k"):
                    waits.append((came, time.monotonic()))
                    time.sleep(0.005)

    threads = [threading.Thread(target=work) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    overtaken = [
        sum(came < other and served_other < served for other, served_other in waits)
        for came, served in waits
    ]
    assert max(overtaken) <= 10, overtaken


def wait(slots: Concurrency) -> None:
    with suppress(ConcurrencyExceeded):
        slots.hold("k", timeout=2).__enter__()


# -- cancellations and interruptions --------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.event_loops
def test_tasks_that_are_cancelled_at_any_time_leave_no_slot(redis_url: str, prefix: str) -> None:
    chance = random.Random(7)

    async def use(slots: AsyncConcurrency, seen: list[int]) -> None:
        async with slots.hold("k", timeout=5):
            seen.append(1)
            assert len(seen) <= 3, "more than the limit"
            try:
                await asyncio.sleep(chance.random() / 300)
            finally:
                seen.pop()

    async def main() -> None:
        async with AsyncConcurrency(redis_url, 3, prefix=prefix, ttl=TTL, timeout=4) as slots:
            seen: list[int] = []
            for _ in range(30):
                tasks = [asyncio.create_task(use(slots, seen)) for _ in range(8)]
                for task in tasks:
                    await asyncio.sleep(chance.random() / 500)
                    task.cancel()
                results = await asyncio.gather(*tasks, return_exceptions=True)
                assert {type(one) for one in results} <= {type(None), asyncio.CancelledError}
            ends = time.monotonic() + TTL / 3
            while (await slots.stats("k")).held:
                assert time.monotonic() < ends, "a slot leaks"
                await asyncio.sleep(0.01)

    asyncio.run(main())


@pytest.mark.slow
@pytest.mark.event_loops
def test_a_task_that_is_cancelled_while_its_reply_is_lost(
    proxy: Proxy, slots: Concurrency, prefix: str
) -> None:
    async def main() -> None:
        options: Any = {"prefix": prefix, "ttl": TTL, "timeout": 1}
        async with AsyncConcurrency(proxy.url, 2, **options) as faulty:
            async with faulty.hold("warm"):
                await faulty.flush()
            proxy.fault = DropReply(only=SCRIPT, times=1)
            task = asyncio.create_task(faulty.hold("k").__aenter__())
            while not proxy.affected:  # noqa: ASYNC110 - another thread counts
                await asyncio.sleep(0.005)
            task.cancel()
            with suppress(asyncio.CancelledError):
                await task
            proxy.fault = Pass()
            ends = time.monotonic() + TTL / 3
            while faulty._held._claims:
                assert time.monotonic() < ends, "a slot leaks"
                await asyncio.sleep(0.01)

    asyncio.run(main())
    assert number_held(slots) == 0


# -- ends of processes ----------------------------------------------------------------------------

PROGRAM = """
import asyncio, os, signal, sys, time
from distwindow import AsyncConcurrency, Concurrency, exit_on_sigterm

url, prefix, kind, way = sys.argv[1:]
if way == "sigterm":
    exit_on_sigterm()
options = dict(prefix=prefix, ttl=30, timeout=4)

def leave():
    print("holds", flush=True)
    if way == "sigterm" or way == "kill":
        time.sleep(60)
    if way == "exception":
        raise ZeroDivisionError

async def tasks():
    slots = AsyncConcurrency(url, 3, **options)
    async with slots.hold("k"):
        kept = await slots.try_hold("k")
        leave()

if kind == "async":
    asyncio.run(tasks())
else:
    slots = Concurrency(url, 3, **options)
    with slots.hold("k"):
        kept = slots.try_hold("k")
        leave()
"""


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["sync", "async"])
@pytest.mark.parametrize("way", ["end", "exception", "sigterm"])
def test_the_slots_of_a_process_that_ends_are_freed(
    slots: Concurrency, redis_url: str, prefix: str, kind: str, way: str
) -> None:
    process = start(redis_url, prefix, kind, way)
    assert process.stdout is not None
    assert process.stdout.readline() == "holds\n"
    if way == "sigterm":
        assert number_held(slots) == 2
        process.terminate()
    _, errors = process.communicate(timeout=20)
    assert process.returncode == {"end": 0, "exception": 1, "sigterm": 128 + signal.SIGTERM}[way]
    assert number_held(slots) == 0, errors
    assert ("ZeroDivisionError" in errors) == (way == "exception")
    assert "lost" not in errors


def start(url: str, prefix: str, kind: str, way: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-W", "error", "-c", PROGRAM, url, prefix, kind, way],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=restore_sigint,
    )


@pytest.mark.slow
def test_the_slots_of_a_process_that_is_killed_end_with_their_deadline(
    redis_url: str, prefix: str
) -> None:
    with Concurrency(redis_url, 3, prefix=prefix, ttl=30, timeout=4) as slots:
        process = start(redis_url, prefix, "sync", "kill")
        assert process.stdout is not None
        assert process.stdout.readline() == "holds\n"
        process.kill()
        process.communicate(timeout=20)
        stats = slots.stats("k")
        assert stats.held == 2
        assert all(0 < holder.expires_in <= 30 for holder in stats.holders)
        # The deadlines are brought near, in place of a wait of 30 s.
        client = admin(redis_url)
        name = f"{prefix}:{{k}}:slots"
        for member, _ in client.zrange(name, 0, -1, withscores=True):
            client.zincrby(name, -29_500, member)
        client.close()
        with slots.hold("k"), slots.hold("k", timeout=5), slots.hold("k", timeout=5):
            assert number_held(slots) == 3
