"""Two processes with sixteen threads and thirty tasks each call one key, in real time on a real
server.

All times are the store's, from `Decision.now_ms`. The store refuses a call of cost 1 only when the
window is full, so at each such refusal the window must hold *exactly* the limit: one more would be
an excess, one less a permit that was charged and lost. A cached refusal has only an estimate of the
store's time, and is counted apart. A caller that gets one pauses, because it would otherwise keep
the other callers of its process from running.
"""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from distwindow import AsyncLimiter, Decision, Limit, Limiter
from tests.clock_and_stores import fresh_key

pytestmark = pytest.mark.slow  # the quick tier stays under a minute

PROCESSES, THREADS, TASKS = 2, 16, 30
ROOT = Path(__file__).parents[2]

Calls = list[tuple[int, bool, int, bool]]
"""Time (ms, of the store), whether admitted, cost, and whether the store decided."""

PAUSE = 0.001


def hammer(url: str, limit: str, key: str, seconds: float, costs: list[int]) -> Calls:
    """Return the calls of all processes."""
    command = [sys.executable, "-m", "tests.limiter.test_hammer", url, limit, key]
    command += [str(seconds), json.dumps(costs)]
    pipes: Any = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    workers = [subprocess.Popen(command, cwd=ROOT, **pipes) for _ in range(PROCESSES)]
    for worker in workers:
        assert worker.stdout is not None
        assert worker.stdout.readline() == "ready\n"
    calls: Calls = []
    for worker in workers:
        assert worker.stdin is not None
        worker.stdin.write("go\n")
        worker.stdin.flush()
    for worker in workers:
        output, _ = worker.communicate(timeout=60 + seconds)
        assert worker.returncode == 0
        calls += map(tuple, json.loads(output))
    return sorted(calls)


def work(url: str, limit: str, key: str, seconds: float, costs: list[int]) -> Calls:
    """Run one process, which begins when it reads a line from stdin."""
    calls: Calls = []
    print("ready", flush=True)
    sys.stdin.readline()
    end = time.monotonic() + seconds

    def record(decision: Decision) -> bool:
        asked = decision.source == "store"
        calls.append((decision.now_ms, decision.allowed, decision.cost, asked))
        return asked

    def thread(number: int) -> None:
        cost = costs[number % len(costs)]
        while time.monotonic() < end:
            if not record(blocking.try_acquire(key, cost)):
                time.sleep(PAUSE)

    async def task(limiter: AsyncLimiter, number: int) -> None:
        cost = costs[number % len(costs)]
        while time.monotonic() < end:
            if not record(await limiter.try_acquire(key, cost)):
                await asyncio.sleep(PAUSE)

    async def tasks() -> None:
        async with AsyncLimiter(url, limit, timeout=30) as limiter:
            await asyncio.gather(*(task(limiter, number) for number in range(TASKS)))

    with Limiter(url, limit, timeout=30) as blocking:
        threads = [threading.Thread(target=thread, args=[number]) for number in range(THREADS)]
        for one in threads:
            one.start()
        asyncio.run(tasks())
        for one in threads:
            one.join()
    return calls


def exactly_full_where_refused(calls: Calls, limit: Limit) -> int:
    """Check at each refusal of the store that the window was exactly full. Return the number of
    buckets in which that was checked.
    """
    width, span = limit.bucket_ms, limit.span
    passed: Counter[int] = Counter()
    refused = set()
    for at, allowed, cost, asked in calls:
        if allowed:
            passed[at // width] += cost
        elif asked:
            refused.add(at // width)
    first = min(at for at, *_ in calls) // width
    last = max(at for at, *_ in calls) // width
    for number in range(first, last + 1):
        held = sum(passed[n] for n in range(number - span + 1, number + 1))
        assert held <= limit.amount
        if number in refused:
            assert held == limit.amount
    return len(refused)


def check_buckets(at_least: int, url: str, limit: Limit, seconds: float) -> None:
    """Hammer until so many buckets were checked: a machine that stalls leaves few in one run."""
    checked = 0
    for _ in range(10):
        calls = hammer(url, str(limit), fresh_key(), seconds, [1])
        if limit.bound == "strict":
            never_above_in_any_window(calls, limit)
        checked += exactly_full_where_refused(calls, limit)
        if checked > at_least:
            return
    pytest.fail(f"only {checked} buckets were full in ten runs")


def never_above_in_any_window(calls: Calls, limit: Limit) -> None:
    admitted = [(at, cost) for at, allowed, cost, _ in calls if allowed]
    held, oldest = 0, 0
    for at, cost in admitted:
        held += cost
        while admitted[oldest][0] <= at - limit.interval_ms:
            held -= admitted[oldest][1]
            oldest += 1
        assert held <= limit.amount


def test_leap_admits_exactly_the_limit_in_every_saturated_window(redis_url: str) -> None:
    check_buckets(20, redis_url, Limit("30/100ms 10 buckets"), 0.6)


def test_strict_never_admits_more_than_the_limit_in_any_window(redis_url: str) -> None:
    check_buckets(20, redis_url, Limit("30/100ms strict 10 buckets"), 0.6)


def check_conserved(url: str, costs: list[int], **options: Any) -> None:
    """Check that the ring has counted as much as the clients were admitted, in a window that does
    not end; hammer for longer if a busy machine has not exhausted it.
    """
    limit = Limit(600, per=3650 * 86400, buckets=1)
    stats = None
    for seconds in (0.7, 3.0, 10.0, 30.0):
        key = fresh_key()
        calls = hammer(url, str(limit), key, seconds, costs)
        with Limiter(url, limit, timeout=30, **options) as limiter:
            stats = limiter.stats(key)
        assert stats.passed == sum(cost for _, allowed, cost, _ in calls if allowed)
        assert stats.blocked == sum(cost for _, allowed, cost, _ in calls if not allowed)
        if stats.blocked:
            break
    assert stats is not None
    assert limit.amount - stats.passed < max(costs)
    assert stats.blocked > 0


def test_no_permit_is_lost(redis_url: str) -> None:
    check_conserved(redis_url, [1, 2, 3])


@pytest.mark.slow
@pytest.mark.parametrize(("where", "bound"), [("cluster", "strict"), ("sentinel", "leap")])
def test_other_topologies(request: pytest.FixtureRequest, where: str, bound: str) -> None:
    url = request.getfixturevalue(f"{where}_url")
    check_buckets(15, url, Limit(f"97/500ms {bound} 10 buckets"), 1.5)
    check_conserved(url, [1, 5])


if __name__ == "__main__":
    url, limit, key, seconds, costs = sys.argv[1:]
    print(json.dumps(work(url, limit, key, float(seconds), json.loads(costs))))
