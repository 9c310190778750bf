"""Three processes with threads and tasks call one key with and without priority, in real time on a
real server.

A call is written into the bucket in which it proceeds: that of the store's time and its `wait`. No
window may hold more than the limit, nor more borrowed permits than its share. The store refuses a
plain call of cost 1 only if a window is full that contains the bucket of now: so for each such
refusal one of these windows must hold *exactly* the limit. One more would be an excess, one less a
permit that was charged and lost.
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

PROCESSES, THREADS, TASKS = 3, 4, 6
ROOT = Path(__file__).parents[2]
OPTIONS: Any = {"timeout": 30, "max_wait": 0.06, "borrow_share": 0.5}
PAUSE_S = 0.001

Calls = list[tuple[int, bool, int, str, int]]
"""Time (ms, of the store), whether with priority, cost, outcome, and ms of the wait. The outcome is
`ok`, `borrowed`, `refused`, or `repeated` for a refusal that was cached in the process.
"""


def hammer(url: str, limit: Limit, key: str, seconds: float) -> Calls:
    """Return the calls of all processes."""
    command = [sys.executable, "-m", "tests.borrow.test_priority_hammer"]
    command += [url, str(limit), key, str(seconds)]
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


def work(url: str, limit: str, key: str, seconds: float) -> Calls:
    """Run one process, which begins when it reads a line from stdin."""
    calls: Calls = []
    print("ready", flush=True)
    sys.stdin.readline()
    end = time.monotonic() + seconds

    def record(decision: Decision, priority: bool) -> None:
        refused = "refused" if decision.source == "store" else "repeated"
        outcome = decision.reason if decision.allowed else refused
        wait_ms = round(decision.wait * 1000)
        calls.append((decision.now_ms, priority, decision.cost, outcome, wait_ms))

    def thread(number: int) -> None:
        while time.monotonic() < end:
            priority = number % 2 == 0
            record(blocking.try_acquire(key, priority=priority), priority)
            time.sleep(PAUSE_S)

    async def task(limiter: AsyncLimiter, number: int) -> None:
        while time.monotonic() < end:
            priority = number % 3 == 0
            record(await limiter.try_acquire(key, priority=priority), priority)
            await asyncio.sleep(PAUSE_S)

    async def tasks() -> None:
        async with AsyncLimiter(url, limit, **OPTIONS) as limiter:
            await asyncio.gather(*(task(limiter, number) for number in range(TASKS)))

    with Limiter(url, limit, **OPTIONS) as blocking:
        threads = [threading.Thread(target=thread, args=[number]) for number in range(THREADS)]
        for one in threads:
            one.start()
        asyncio.run(tasks())
        for one in threads:
            one.join()
    return calls


def check(calls: Calls, limit: Limit) -> Counter[str]:
    """Check every window. Return how many calls had which outcome, and how many buckets with a
    refusal were checked (`full`).
    """
    width, span = limit.bucket_ms, limit.span
    passed: Counter[int] = Counter()
    borrowed: Counter[int] = Counter()
    refused: set[int] = set()
    for at, priority, cost, outcome, wait_ms in calls:
        number = (at + wait_ms) // width
        if outcome in ("ok", "borrowed"):
            passed[number] += cost
        if outcome == "borrowed":
            assert priority
            assert (at + wait_ms) % width == 0
            assert 0 < wait_ms <= OPTIONS["max_wait"] * 1000
            borrowed[number] += cost
        if outcome == "refused" and not priority:
            refused.add(number)

    def held(permits: Counter[int], end: int) -> int:
        return sum(permits[number] for number in range(end - span + 1, end + 1))

    for number in range(min(passed), max(passed) + 1):
        assert held(passed, number) <= limit.amount
        assert held(borrowed, number) <= limit.amount * OPTIONS["borrow_share"]
    for number in refused:
        assert max(held(passed, number + i) for i in range(span)) == limit.amount
    return Counter(outcome for *_, outcome, _ in calls) + Counter(full=len(refused))


@pytest.mark.parametrize("bound", ["leap", "strict"])
def test_no_window_holds_more_than_the_limit_and_full_ones_hold_it_exactly(
    redis_url: str, bound: str
) -> None:
    limit = Limit(f"30/100ms {bound} 10 buckets")
    counted: Counter[str] = Counter()
    for _ in range(10):  # a machine that stalls leaves few windows to check in one run
        counted += check(hammer(redis_url, limit, fresh_key(), 1.5), limit)
        if counted["borrowed"] > 50 and counted["ok"] > 100 and counted["full"] > 20:
            return
    pytest.fail(f"only {counted} in ten runs")


def test_every_borrowed_permit_is_in_the_ring(redis_url: str) -> None:
    """In a window that outlasts the test: what was lent is in coming buckets, all of it once."""
    limit, key = Limit(400, per=3600, buckets=60), fresh_key()
    with Limiter(redis_url, limit, timeout=30, max_wait=3600) as limiter:
        calls = hammer(redis_url, limit, key, 0.7)
        lent = [limiter.try_acquire(key, priority=True) for _ in range(250)]
        stats = limiter.stats(key)
    admitted = sum(cost for _, _, cost, outcome, _ in calls if outcome == "ok")
    assert stats.passed == admitted + sum(d.reason == "ok" for d in lent)
    assert stats.borrowed == sum(d.reason == "borrowed" for d in lent) == limit.amount // 2


if __name__ == "__main__":
    url, limit, key, seconds = sys.argv[1:]
    print(json.dumps(work(url, limit, key, float(seconds))))
