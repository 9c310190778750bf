"""Plain callers of several processes beside a flood of priority calls, in real time on a real
server: for each plain call there are twenty with priority.

The store refuses a plain call of cost 1 only if a window is full that contains the bucket of now.
So once the reserve is as large as the part that is kept for plain callers, each window that ends
with a bucket in which the store has refused one holds that much of them (docs/guarantees.md), on a
machine of any speed. Under `leased`, permits that are leased and not spent are among them.
"""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from distwindow import AsyncLimiter, Decision, Limit
from tests.unit.clock_and_stores import fresh_key

pytestmark = pytest.mark.slow  # the quick tier stays under a minute

PROCESSES, FLOOD = 3, 20
ROOT = Path(__file__).parents[2]
SHARE = 0.5
SECONDS = 3.0

Calls = list[tuple[int, bool, str]]
"""Time at which the call proceeds (ms, of the store), whether with priority, and the outcome: `ok`,
`borrowed`, `refused` by the store, or `repeated` for a refusal that was cached in the process.
"""


def flood(url: str, limit: Limit, consistency: str) -> Calls:
    """Return the calls of all processes, in the order of their times."""
    key = fresh_key()
    command = [sys.executable, "-m", "tests.integration.test_priority_flood"]
    command += [url, str(limit), consistency, key]
    workers = [
        subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
        for _ in range(PROCESSES)
    ]
    calls: Calls = []
    for worker in workers:
        output, _ = worker.communicate(timeout=60)
        assert worker.returncode == 0
        calls += map(tuple, json.loads(output))
    return sorted(calls)


async def work(url: str, limit: str, consistency: Any, key: str) -> Calls:
    """Run one process: in each round, one plain call and twenty with priority, at once."""
    calls: Calls = []

    def record(decision: Decision, priority: bool) -> None:
        refused = "refused" if decision.source == "store" else "repeated"
        outcome = decision.reason if decision.allowed else refused
        calls.append((decision.now_ms + round(decision.wait * 1000), priority, outcome))

    async def call(priority: bool) -> None:
        record(await limiter.try_acquire(key, priority=priority), priority)

    limiter = AsyncLimiter(
        url, limit, consistency=consistency, timeout=30, max_wait=0.1, borrow_share=SHARE
    )
    async with limiter:
        end = time.monotonic() + SECONDS
        while time.monotonic() < end:
            await asyncio.gather(*[call(True) for _ in range(FLOOD)], call(False))
    return calls


def held(permits: Counter[int], end: int, span: int) -> int:
    return sum(permits[end - i] for i in range(span))


@pytest.mark.parametrize("consistency", ["direct", "leased"])
@pytest.mark.parametrize(
    "text", ["60/300ms 6 buckets", "60/300ms strict 6 buckets", "30/100ms 1 buckets"]
)
def test_plain_callers_have_their_share_beside_a_flood(
    redis_url: str, text: str, consistency: str
) -> None:
    limit = Limit(text)
    width, span = limit.bucket_ms, limit.span
    calls = flood(redis_url, limit, consistency)
    passed: Counter[bool] = Counter()
    every: Counter[int] = Counter()
    plain: Counter[int] = Counter()
    refused: Counter[int] = Counter()
    asked: dict[bool, Counter[int]] = {True: Counter(), False: Counter()}
    for at, priority, outcome in calls:
        asked[priority][at // width] += 1
        if outcome in ("ok", "borrowed"):
            every[at // width] += 1
            plain[at // width] += not priority
            passed[priority] += 1
        elif outcome == "refused" and not priority:
            refused[at // width] += 1
    first, last = min(every), max(every)
    for number in range(first, last + 1):
        assert held(every, number, span) <= limit.amount
    seconds = (last - first) * width / 1000
    print(
        f"{text}, {consistency}: {len(calls) / seconds:.0f} calls/s; admitted per second: "
        f"{passed[False] / seconds:.1f} plain, {passed[True] / seconds:.1f} with priority"
    )
    # A ratio, because a busy machine may make few calls; without the reserve it was 1 to 50.
    assert passed[False] > passed[True] / 3
    if consistency == "direct":
        for number in refused:
            # The reserve begins anew where a busy machine has made no calls of a kind meanwhile.
            windows = range(number - 5 * span, number + 1)
            if all(held(kind, at, span) for kind in asked.values() for at in windows):
                assert held(plain, number, span) >= limit.amount * (1 - SHARE)


if __name__ == "__main__":
    print(json.dumps(asyncio.run(work(*sys.argv[1:]))))
