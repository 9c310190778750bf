"""A program with a child process that ends while a thread which is no daemon uses its limiter.

The thread begins to call, or is admitted, only after the finalizers of multiprocessing have run.
"""

from __future__ import annotations

import asyncio
import importlib
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from typing import cast

import redis

from distwindow import AsyncLimiter, Limiter, RateLimitExceeded
from distwindow.runtime.options import Consistency

LIMIT = "20/hour"
CALLS = 27


def work(url: str, prefix: str, package: str, mode: Consistency, way: str) -> None:
    """Start the thread, and return, which ends the child."""
    finalized = threading.Event()
    importlib.import_module(f"{package}.util").Finalize(None, finalized.set, exitpriority=0)
    limiter = Limiter(
        url, LIMIT, prefix=prefix, consistency=mode, timeout=1,
        flush_interval=3600, sync_interval=3600,
    )  # fmt: skip
    limiter.try_acquire("k")  # installs the hooks

    def calls() -> None:
        assert finalized.wait(20)
        for _ in range(CALLS - 1):
            limiter.try_acquire("k")

    def waits_in_acquire() -> None:
        slow = Limiter(url, "1/second", prefix=f"{prefix}-slow", consistency=mode)
        slow.acquire("k")
        slow.acquire("k")  # waits for a second
        calls()

    async def awaited_calls() -> None:
        async with AsyncLimiter(
            url, LIMIT, prefix=prefix, consistency=mode, timeout=1,
            flush_interval=3600, sync_interval=3600,
        ) as other:  # fmt: skip
            while not finalized.is_set():  # noqa: ASYNC110 - executors are shut down meanwhile
                await asyncio.sleep(0.01)
            for _ in range(CALLS - 1):
                await other.try_acquire("k")

    def calls_and_ends_the_server() -> None:
        calls()
        with redis.Redis.from_url(url) as server:
            server.shutdown(nosave=True)

    def enters() -> None:
        assert finalized.wait(20)
        for _ in range(CALLS - 1):
            try:
                with limiter.entry("k"):
                    pass
            except RateLimitExceeded:
                pass

    targets: dict[str, Callable[[], None]] = {
        "calls": calls,
        "lost": calls_and_ends_the_server,
        "acquire": waits_in_acquire,
        "entries": enters,
        "tasks": lambda: asyncio.run(awaited_calls()),
    }
    if way == "executor":
        ThreadPoolExecutor(1).submit(calls)
    else:
        threading.Thread(target=targets[way]).start()


def main() -> None:
    """Run `work` in a child, and exit with its exit code."""
    url, prefix, package, method, chosen, way = sys.argv[1:]
    mode = cast(Consistency, chosen)
    context = importlib.import_module(package).get_context(method)
    if way == "pool":
        with ProcessPoolExecutor(1, mp_context=context) as pool:
            pool.submit(work, url, prefix, package, mode, "calls").result(20)
        return
    child = context.Process(target=work, args=(url, prefix, package, mode, way))
    child.start()
    child.join(20)
    code = child.exitcode
    if code is None:
        child.kill() if hasattr(child, "kill") else child.terminate()
    sys.exit("the child hangs" if code is None else code)


if __name__ == "__main__":
    main()
