"""`eventual` with a real server: callers never wait, every call is counted once, and the fleet
exceeds the limit by no more than is promised.
"""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest

from distwindow import Limit, Limiter, StoreError
from distwindow.runtime.command_cache import CommandCache
from tests.clock_and_stores import ManualClock
from tests.harness import PLENTY, Call, Harness, admin, count_outcomes, in_time, used
from tests.local.caller_processes import (
    PROCESSES,
    call_in_processes,
    most_aligned,
    most_anywhere,
)
from tests.servers import (
    Blackhole,
    Delay,
    DropReply,
    Proxy,
    Refuse,
    ResetAfterSend,
    ResetBeforeSend,
    Standalone,
    free_port,
    until,
)


def eventual(prefix: str, **options: Any) -> dict[str, Any]:
    return {"prefix": prefix, "consistency": "eventual", "timeout": 5, **options}


def admitted(calls: list[Call]) -> int:
    return sum(call.admitted for call in calls)


# -- a fleet --------------------------------------------------------------------------------------


@pytest.mark.slow
def test_no_more_beyond_the_limit_than_promised(redis_url: str, prefix: str) -> None:
    """The excess is what all processes pass within two sync intervals and two round trips, which
    take longer on a busy machine.
    """
    limit, sync, way = Limit("400/second 5 buckets"), 0.05, 0.1
    options = eventual(prefix, limits=str(limit), sync_interval=sync)
    spans, sources = call_in_processes(redis_url, options, 2.5, pause_s=0.01)
    assert set(sources) == {"local True", "local False"}
    beyond = most_anywhere(spans, Limit(1, per=2 * sync + 2 * way, buckets=1))
    most = most_aligned(spans, limit)
    assert most <= 400 + min((PROCESSES - 1) * 400, beyond)
    assert len(spans) > 400  # so many calls were made that the limit was tested


@pytest.mark.slow
@pytest.mark.parametrize(("share", "most"), [(None, PROCESSES), (0.25, 1)])
def test_each_process_passes_no_more_than_its_own_share(
    redis_url: str, prefix: str, share: float | None, most: int
) -> None:
    """This holds even where no process receives the counts of the others."""
    limit = Limit("400/second 5 buckets")
    options = eventual(prefix, limits=str(limit), sync_interval=3600, share=share)
    spans, _ = call_in_processes(redis_url, options, 1.6, pause_s=0.002)
    # Without a poll each process has its own estimate of when a bucket ends, which differs by
    # little.
    assert 400 * most * 0.7 < most_aligned(spans, limit) <= 400 * most * 1.02


@pytest.mark.slow
def test_every_call_of_every_process_is_counted_once(redis_url: str, prefix: str) -> None:
    options = eventual(prefix, limits="1000000/50s 500 buckets", sync_interval=0.02)
    spans, _ = call_in_processes(redis_url, options, 1, pause_s=0.0005)
    with admin(redis_url) as server:
        assert used(server, prefix) == len(spans) > 500


# -- one process, or two --------------------------------------------------------------------------


def test_calls_of_others_are_seen_after_a_poll(
    harness: Harness, redis_url: str, prefix: str
) -> None:
    options = eventual(prefix, sync_interval=0.03)
    one, other = (harness.limiter(redis_url, "10/hour", **options) for _ in range(2))
    assert all(one.each(["k"] * 9))
    with admin(redis_url) as server:
        until(lambda: used(server, prefix) == 9, timeout=10)
    assert other.try_acquire("k")
    until(lambda: other.peek("k").remaining == 0, timeout=10)
    refused = other.try_acquire("k")
    assert (refused.allowed, refused.source) == (False, "local")
    with admin(redis_url) as server:
        assert used(server, prefix) == 10


def test_it_is_exact_where_one_process_calls(harness: Harness, redis_url: str, prefix: str) -> None:
    limiter = harness.limiter(redis_url, ["500/hour", "300/day"], **eventual(prefix))
    calls = limiter.burst(["k"] * 500, at_once=8)
    assert count_outcomes(calls) == {"ok": 300, "refused": 200}
    stats = limiter.stats("k")
    assert [(w.passed, w.blocked) for w in stats.windows] == [(300, 200)] * 2


@pytest.mark.slow
@pytest.mark.parametrize("what", ["stalled", "dead", "refusing"])
def test_callers_never_wait(harness: Harness, proxy: Proxy, prefix: str, what: str) -> None:
    with Standalone() as own, Proxy(own.port) as link:
        url = f"redis://127.0.0.1:{free_port()}" if what == "dead" else link.url
        limiter = harness.limiter(url, PLENTY, **eventual(prefix, sync_interval=0.02, timeout=0.3))
        limiter.each(["k"] * 10)
        if what == "stalled":
            limiter.flush()
            own.pause()
        elif what != "dead":
            limiter.flush()
            link.fault = Refuse()
        try:
            calls: list[Call] = []
            ends = time.monotonic() + 0.3
            while time.monotonic() < ends:
                calls += limiter.burst(["k", "new"] * 20, at_once=1)
        finally:
            own.resume()
        assert set(count_outcomes(calls)) == {"ok"}
        in_time(calls, 0.0)
        # Every outcome is a decision, because all of them are "ok".
        assert {call.outcome.source for call in calls} == {"local"}  # type: ignore[union-attr]
        if what != "dead":
            link.fault = Delay()
            until(lambda: _arrived(own, prefix) == 10 + len(calls))


def _arrived(server: Standalone, prefix: str) -> int:
    with server.client(decode_responses=True) as client:
        return used(client, prefix)


FAULTS = [
    DropReply(only=b"EVAL"),
    DropReply(only=b"EVAL", close=True),
    ResetAfterSend(only=b"EVAL"),
    ResetBeforeSend(only=b"EVAL"),
    Blackhole(only=b"EVAL"),
    Delay(replies=0.08),
    Delay(requests=0.08),
    Refuse(),
]


@pytest.mark.slow
def test_counts_are_neither_lost_nor_doubled(
    harness: Harness, proxy: Proxy, redis_url: str, prefix: str
) -> None:
    options = eventual(prefix, timeout=0.05, sync_interval=0.01)
    limiter = harness.limiter(proxy.url, "10000000/50s 500 buckets", **options)
    load = limiter.load([f"k{n}" for n in range(20)], threading.Event(), at_once=2)
    for turn in range(16):
        with proxy.inject(FAULTS[turn % len(FAULTS)]):
            time.sleep(0.06)  # several flushes meet the fault
        time.sleep(0.02)  # and some do not
    count = admitted(load.result())
    with admin(redis_url) as server:
        until(lambda: used(server, prefix) >= count)
        limiter.close()
        assert used(server, prefix) == count


def test_after_a_long_partition_counts_that_have_expired_are_not_stored(
    harness: Harness, proxy: Proxy, redis_url: str, prefix: str
) -> None:
    clock = ManualClock()
    options = eventual(prefix, clock="client", time=clock)
    limiter = harness.limiter(proxy.url, "100/10s 10 buckets", **options)
    for _ in range(3):
        limiter.try_acquire("k")
        limiter.flush()
    limiter.flush()
    with proxy.inject(Refuse()):
        for _ in range(30):
            assert limiter.try_acquire("k")
            with pytest.raises(StoreError):
                limiter.flush()
            clock.move(1000)
        assert all(limiter.each(["k"] * 7))
        with pytest.raises(StoreError):
            limiter.flush()
    clock.move(300)
    health: Any = limiter.limiter.health
    until(lambda: health().up)
    for _ in range(3):
        limiter.flush()
    # There was one call a second during the partition; nine of them are still in the window.
    assert limiter.stats("k").passed == 9 + 7
    with admin(redis_url) as server:
        assert used(server, prefix) == 9 + 7
    other = harness.limiter(
        redis_url, "100/10s 10 buckets", prefix=prefix, clock="client", time=clock
    )
    assert other.peek("k").remaining == 100 - 16


def test_a_wrong_clock_of_the_process_does_not_matter(
    harness: Harness, redis_url: str, prefix: str
) -> None:
    """Buckets follow the server's clock from the first flush on."""

    class Wrong:
        """A clock that is an hour ahead. The worker does not flush by itself unless the clock is
        the system's.
        """

        sleep = staticmethod(time.sleep)
        monotonic = staticmethod(time.monotonic)

        def now_ms(self) -> int:
            return time.time_ns() // 1_000_000 + 3_600_000

    limiter = harness.limiter(redis_url, "100/10s 10 buckets", **eventual(prefix, time=Wrong()))
    assert all(limiter.each(["k"] * 20))
    for _ in range(3):
        limiter.flush()
    other = harness.limiter(redis_url, "100/10s 10 buckets", prefix=prefix)
    assert other.stats("k").passed == 20
    assert all(limiter.each(["k"] * 20))
    limiter.flush()
    assert other.stats("k").passed == 40


def test_a_key_that_the_server_refuses_keeps_no_other_from_being_flushed(
    redis_url: str, prefix: str
) -> None:
    """Not even if it is the first one, with which the store's time is asked for."""
    (charge,) = CommandCache(prefix, "1000/hour").acquire_command("refused").charges
    with (
        admin(redis_url) as client,
        Limiter(redis_url, "1000/hour", **eventual(prefix, sync_interval=0.01)) as limiter,
    ):
        client.set(charge.ring, "another type")
        for key in ("refused", "k"):
            assert limiter.try_acquire(key, cost=7)
        until(lambda: used(client, prefix, "k") == 7, what="the other key is flushed")
        client.delete(charge.ring)
        until(lambda: used(client, prefix, "refused") == 7, what="nothing was lost")
