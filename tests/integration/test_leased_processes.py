"""Leases on a real server: all processes together never spend more than the limit, and few calls
reach the store.

The times in the decisions are estimates, so windows are taken from the machine's clock, which the
server uses, too. A call is counted in a window only if it began and ended inside: so no call is
counted that may have been outside, and every excess that is found is real.
"""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import threading
import time
from bisect import bisect_left
from collections import Counter
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from distwindow import Limit, Limiter, StoreError
from tests.integration.harness import PLENTY, Harness, admin, count_outcomes, used
from tests.servers import (
    Blackhole,
    Delay,
    DropReply,
    Proxy,
    Refuse,
    ResetAfterSend,
    Standalone,
    until,
)

pytestmark = pytest.mark.slow  # the quick tier stays under a minute

ROOT = Path(__file__).parents[2]
PROCESSES = 4

Span = tuple[float, float]
"""When an admitted call began and ended, ms since 1970."""


class CallerProcess:
    """A process that calls one key without a break, from two threads."""

    def __init__(self, url: str, key: str, options: dict[str, Any], pause: float) -> None:
        args = [url, key, json.dumps(options), f"{pause:g}"]
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.integration.test_leased_processes", *args],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def await_ready(self) -> None:
        assert self._process.stdout is not None
        assert self._process.stdout.readline() == "ready\n"

    def go(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write("\n")
        self._process.stdin.flush()

    def kill(self) -> None:
        self._process.kill()

    def result(self, *, stop: bool = True) -> tuple[list[Span], Counter[str]]:
        """Return the admitted calls, and the number of decisions by source."""
        output, _ = self._process.communicate("\n" if stop else None, timeout=30)
        spans: list[Span] = []
        sources: Counter[str] = Counter()
        for line in output.splitlines(keepends=True):
            if line.endswith("\n"):  # a killed process may have written half a line
                reports, counts = json.loads(line)
                spans += [(began, ended) for began, ended in reports]
                sources.update(counts)
        return spans, sources


def spend(url: str, key: str, options: dict[str, Any], pause: float) -> None:
    print("ready", flush=True)
    sys.stdin.readline()
    stop = threading.Event()
    limiter = Limiter(url, **options)
    reports: list[list[Any]] = []

    def work() -> None:
        spans: list[Span] = []
        sources: Counter[str] = Counter()
        since = time.monotonic()
        while not stop.is_set():
            began = time.time()
            decision = limiter.try_acquire(key)
            ended = time.time()
            sources[f"{decision.source} {decision.allowed}"] += 1
            if decision.allowed:
                spans.append((began * 1000, ended * 1000))
            if time.monotonic() - since > 0.05:
                since = time.monotonic()
                reports.append([spans, dict(sources)])
                spans, sources = [], Counter()
            time.sleep(pause)
        reports.append([spans, dict(sources)])

    def print_reports() -> None:
        while reports:
            print(json.dumps(reports.pop(0)), flush=True)

    threads = [threading.Thread(target=work) for _ in range(2)]
    for thread in threads:
        thread.start()

    def wait_for_stop() -> None:
        sys.stdin.readline()
        stop.set()

    threading.Thread(target=wait_for_stop).start()
    while not stop.wait(0.02):
        print_reports()
    for thread in threads:
        thread.join()
    limiter.close()
    print_reports()


def call_in_processes(
    url: str,
    key: str,
    options: dict[str, Any],
    seconds: float,
    kill: int = 0,
    pause: float = 0.0003,
) -> tuple[list[Span], Counter[str]]:
    """Return what four processes are admitted in so many seconds; `kill` of them are killed
    meanwhile.
    """
    processes = [CallerProcess(url, key, options, pause) for _ in range(PROCESSES)]
    for process in processes:
        process.await_ready()
    for process in processes:
        process.go()
    time.sleep(seconds / 2)  # the processes call
    for process in processes[:kill]:
        process.kill()
    time.sleep(seconds / 2)  # the others go on
    spans: list[Span] = []
    sources: Counter[str] = Counter()
    for number, process in enumerate(processes):
        some, counts = process.result(stop=number >= kill)
        spans += some
        sources.update(counts)
    return spans, sources


def most_aligned(spans: list[Span], limit: Limit) -> int:
    """Return the most calls that were certainly admitted in one window of whole buckets."""
    width = limit.bucket_ms
    passed: Counter[int] = Counter()
    for began, ended in spans:
        if began // width == (ended + 1) // width:  # the server's clock shows whole ms
            passed[int(began // width)] += 1
    first, last = min(passed), max(passed)
    window = [sum(passed[n - i] for i in range(limit.buckets)) for n in range(first, last + 1)]
    return max(window)


def most_anywhere(spans: list[Span], limit: Limit) -> int:
    """Return the most calls that were certainly admitted within one interval, wherever it
    begins.
    """
    starts = sorted(began for began, _ in spans)
    ends = sorted(ended for _, ended in spans)
    return max(
        bisect_left(ends, began + limit.interval_ms - 1) - bisect_left(starts, began)
        for began in starts
    )


def leased(limit: Any, prefix: str, **options: Any) -> dict[str, Any]:
    given = {"limits": str(limit), "prefix": prefix, "consistency": "leased", "timeout": 5}
    return {**given, **options}


@pytest.mark.slow
@pytest.mark.parametrize(("bound", "amount"), [("leap", 1500), ("strict", 1500), ("strict", 40)])
def test_never_more_than_the_limit(redis_url: str, prefix: str, bound: str, amount: int) -> None:
    limit = Limit(f"{amount}/500ms {bound} 5 buckets")
    spans, sources = call_in_processes(redis_url, "k", leased(limit, prefix), 1.8, kill=1)
    assert sources["lease True"] > 0 or amount == 40
    assert most_aligned(spans, limit) <= amount
    if bound == "strict":
        assert most_anywhere(spans, limit) <= amount
    # Leases withhold little from the other processes: more than half of the limit is spent.
    assert len(spans) > 0.5 * amount * 1.8 / 0.6


@pytest.mark.slow
def test_a_killed_process_loses_no_more_than_its_lease(redis_url: str, prefix: str) -> None:
    """No more than one lease is lost, as the other processes refund what they have not spent."""
    spans, _ = call_in_processes(redis_url, "k", leased(PLENTY, prefix), 1, kill=1)
    with admin(redis_url) as server:
        total = used(server, prefix)
    assert len(spans) <= total
    # A lease lasts a quarter of a second, at a quarter of the rate of all. The calls of the last 50
    # ms before the kill may not have been reported.
    assert total - len(spans) < 0.4 * len(spans) / 1


@pytest.mark.slow
def test_everything_is_spent_once_the_limit_is_reached(redis_url: str, prefix: str) -> None:
    spans, sources = call_in_processes(redis_url, "k", leased("2000/day", prefix), 0.8)
    assert sources["deny_cache False"] > 0
    with admin(redis_url) as server:
        assert used(server, prefix) == len(spans) <= 2000
    with Limiter(redis_url, "2000/day", prefix=prefix) as other:
        stats = other.stats("k")
    assert stats.blocked == sources["deny_cache False"] + sources["store False"]


@pytest.mark.slow
def test_leases_are_prefetched(redis_url: str, prefix: str) -> None:
    """Under a steady load callers rarely wait for the store."""
    spans, sources = call_in_processes(
        redis_url, "k", leased("1000000/10s 10 buckets", prefix), 1.5, pause=0.001
    )
    calls = sum(sources.values())
    assert len(spans) == calls > 1500
    # The first calls are decided by the store, and so are some as a bucket ends each second.
    assert sources["store True"] < 0.04 * calls


# -- one process ----------------------------------------------------------------------------------


def test_few_calls_reach_the_store(
    harness: Harness, proxy: Proxy, redis_url: str, prefix: str
) -> None:
    limiter = harness.limiter(proxy.url, PLENTY, prefix=prefix, consistency="leased", timeout=5)
    decisions = limiter.each(["k"] * 3000)
    assert all(decisions)
    assert proxy.requests < 200
    left = [(999_999 - n, d.remaining) for n, d in enumerate(decisions) if d.source == "lease"]
    assert len(left) > 2800
    assert all(there_is == reported for there_is, reported in left)
    limiter.close()
    with admin(redis_url) as server:
        assert used(server, prefix) == 3000


def test_exactly_the_limit_where_one_process_calls(
    harness: Harness, redis_url: str, prefix: str
) -> None:
    limiter = harness.limiter(redis_url, "777/day", prefix=prefix, consistency="leased", timeout=5)
    calls = limiter.burst(["k"] * 1000, at_once=8)
    assert count_outcomes(calls) == {"ok": 777, "refused": 223}
    # If the worker is flushing at this moment, the last refusals are in its next flush.
    until(lambda: limiter.stats("k").blocked == 223, timeout=2)
    assert limiter.stats("k").passed == 777


def test_unspent_permits_are_refunded_soon_after_the_calls_end(
    harness: Harness, redis_url: str, prefix: str
) -> None:
    """Unspent permits are refunded soon after the calls end, without a close, so that others can
    spend them.
    """
    options: dict[str, Any] = {"prefix": prefix, "consistency": "leased", "timeout": 5}
    limiter = harness.limiter(redis_url, PLENTY, flush_interval=0.05, **options)
    with admin(redis_url) as server:
        # A refund may come between the calls and any look at the server: so no look comes first.
        assert "lease" in {decision.source for decision in limiter.each(["k"] * 1000)}
        until(lambda: used(server, prefix) == 1000, timeout=5)
        assert limiter.limiter._strategy._get("k").permits_left == 0
        assert all(limiter.each(["k"] * 500))
        until(lambda: used(server, prefix) == 1500, timeout=5)


def test_own_refund_and_reset(harness: Harness, redis_url: str, prefix: str) -> None:
    options: dict[str, Any] = {"prefix": prefix, "consistency": "leased", "timeout": 5}
    limiter = harness.limiter(redis_url, PLENTY, **options)
    decisions = limiter.each(["k"] * 400)
    by_lease = [d for d in decisions if d.source == "lease"]
    assert len(by_lease) > 300
    assert [limiter.refund(d) for d in by_lease[:10]] == [1] * 10
    limiter.reset("k")
    assert limiter.stats("k").passed == 0
    assert all(limiter.each(["k"] * 50))
    limiter.close()
    with admin(redis_url) as server:
        assert used(server, prefix) == 50


def test_several_limits_are_leased_together(harness: Harness, redis_url: str, prefix: str) -> None:
    limits = ["5000/hour", "300/day"]
    limiter = harness.limiter(redis_url, limits, prefix=prefix, consistency="leased", timeout=5)
    decisions = limiter.each(["k"] * 400)
    assert sum(map(bool, decisions)) == 300
    assert "lease" in {d.source for d in decisions}
    assert str(decisions[-1].limit) == "300/day"
    limiter.close()
    with admin(redis_url) as server:
        assert used(server, prefix) == 600


@pytest.mark.parametrize(
    "fault",
    [
        DropReply(),
        *(
            pytest.param(fault, marks=pytest.mark.slow)
            for fault in (Refuse(), ResetAfterSend(), Blackhole(), Delay(replies=0.08))
        ),
    ],
    ids=lambda fault: type(fault).__name__,
)
def test_never_more_whatever_is_lost_on_the_way(
    harness: Harness, proxy: Proxy, redis_url: str, prefix: str, fault: Any
) -> None:
    options: dict[str, Any] = {"prefix": prefix, "consistency": "leased", "flush_interval": 0.02}
    limiters = [harness.limiter(url, "3000/day", **options, timeout=0.1) for url in [proxy.url] * 2]
    admitted = 0

    def some(calls: int) -> None:
        nonlocal admitted
        for limiter in limiters:
            for _ in range(calls):
                with suppress(StoreError):
                    admitted += bool(limiter.try_acquire("k"))

    some(300)
    with proxy.inject(fault):
        ends = time.monotonic() + 0.2
        while time.monotonic() < ends:
            some(1)
    some(2000)
    with admin(redis_url) as server:
        assert admitted <= 3000
        for limiter in limiters:
            limiter.close()
        assert admitted <= used(server, prefix) <= 3000


def test_a_server_that_stands_still_ends_the_lease_in_time(harness: Harness, prefix: str) -> None:
    """Leased permits may be spent until the bucket ends; after that, calls raise."""
    with Standalone() as own:
        options: dict[str, Any] = {"prefix": prefix, "consistency": "leased", "timeout": 0.1}
        limiter = harness.limiter(own.url, "1000000/2s 10 buckets", **options)
        limiter.each(["k"] * 500)
        own.pause()
        try:
            began, failed = time.monotonic(), False
            while not failed:
                try:
                    assert limiter.try_acquire("k")
                except StoreError:
                    failed = True
            assert time.monotonic() - began < 0.2 + 0.1 + 0.5  # 0.5 s for stalls of the machine
        finally:
            own.resume()


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_IGN)

    url, key, options, pause = sys.argv[1:]
    spend(url, key, json.loads(options), float(pause))
