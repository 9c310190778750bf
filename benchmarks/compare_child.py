"""The calls of one checkout, for `benchmarks/compare.py`.

A case and a number of calls are read from stdin, and seconds for each call are written to stdout.
Imports nothing but `distwindow`, so that any version can be measured.
"""

from __future__ import annotations

import asyncio
import gc
import itertools
import json
import os
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

from distwindow import AsyncLimiter, Limiter

Case = Callable[[int], None]


def cases_of(url: str, name: str) -> dict[str, Case]:
    def limiter(limits: str, mode: Any = "direct", store: str = url) -> Limiter:
        prefix = f"{name}-{mode}-{limits.partition('/')[0]}"
        return Limiter(store, limits, prefix=prefix, consistency=mode, timeout=2)

    def calls(target: Limiter, keys: int = 1) -> Case:
        names = [f"user:{number}" for number in range(keys)]

        def run(count: int) -> None:
            acquire = target.try_acquire
            for number in range(count):
                acquire(names[number % keys])

        for _ in range(50):
            run(keys)
        return run

    def threads(target: Limiter, size: int) -> Case:
        """Have `size` threads make the calls on one key."""

        def run(count: int) -> None:
            def work() -> None:
                for _ in range(count // size):
                    target.try_acquire("user:0")

            workers = [threading.Thread(target=work) for _ in range(size)]
            for worker in workers:
                worker.start()
            for worker in workers:
                worker.join()

        return run

    tasks = AsyncLimiter(url, "1000000000/hour", prefix=f"{name}-async", timeout=2)
    loop = asyncio.new_event_loop()

    async def gathered(count: int) -> None:
        for _ in range(0, count, 50):
            await asyncio.gather(*(tasks.try_acquire(f"user:{n % 10}") for n in range(50)))

    def new_keys(mode: Any) -> Case:
        """200 tasks that share calls on new keys, each key called three times."""
        target = AsyncLimiter(
            url, "1000000000/hour", prefix=f"{name}-new-{mode}", consistency=mode, timeout=2
        )
        numbers = itertools.count()

        async def work(keys: list[str]) -> None:
            for _ in range(3):
                for key in keys:
                    await target.try_acquire(key)

        async def calls(count: int) -> None:
            keys = [f"user:{next(numbers)}" for _ in range(max(1, count // 3))]
            await asyncio.gather(*(work(keys[n::200]) for n in range(200)))

        return lambda count: loop.run_until_complete(calls(count))

    def first_calls(mode: Any) -> Case:
        acquire, numbers = limiter("1000000000/hour", mode).try_acquire, itertools.count()

        def run(count: int) -> None:
            for _ in range(count):
                acquire(f"new:{next(numbers)}")

        return run

    full = limiter("1/hour")
    full.try_acquire("user:0")
    return {
        "direct, Redis": calls(limiter("1000000000/hour")),
        "direct, Redis, 100 keys": calls(limiter("100000000/hour"), 100),
        "direct, 4 threads": threads(limiter("100000000/day"), 4),
        "direct, 8 threads": threads(limiter("200000000/day"), 8),
        "direct, 16 threads": threads(limiter("300000000/day"), 16),
        "leased hit": calls(limiter("1000000000/hour", "leased")),
        "cached refusal": calls(full),
        "eventual hit": calls(limiter("1000000000/hour", "eventual")),
        "memory://": calls(limiter("1000000000/hour", store="memory://")),
        "asyncio, 50 tasks": lambda count: loop.run_until_complete(gathered(count)),
        "direct, first calls": first_calls("direct"),
        "leased, first calls": first_calls("leased"),
        "asyncio, direct, new keys": new_keys("direct"),
        "asyncio, leased, new keys": new_keys("leased"),
    }


def main(url: str, name: str) -> None:
    cases = cases_of(url, name)
    gc.freeze()
    print(json.dumps(list(cases)), flush=True)
    for line in sys.stdin:
        case, count = json.loads(line)
        began = time.perf_counter()
        cases[case](count)
        print(json.dumps((time.perf_counter() - began) / count), flush=True)
    os._exit(0)  # without the flush at exit, for which the server may be gone already


if __name__ == "__main__":
    main(*sys.argv[1:])
