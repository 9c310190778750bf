"""The child of scenario `process_exits`: it calls for a moment, and ends in the way of its plan."""

from __future__ import annotations

import asyncio
import os
import random
import sys
import threading
import time
from pathlib import Path
from typing import Any

from distwindow import AsyncLimiter, DistwindowError, Limiter, exit_on_sigterm
from tests.attack.children import dump_stacks_on_sigquit, read_plan, restart_watchdog
from tests.attack.shared_counts import SharedCounts

plan = read_plan()
counts = SharedCounts(Path(plan["counts"]), 2 * plan["threads"], plan["keys"])
names = [f"k{number}" for number in range(plan["keys"])]
settings: dict[str, Any] = {
    "prefix": plan["prefix"],
    "consistency": plan["mode"],
    "timeout": 1.0,
    "flush_interval": 3600.0,
    "sync_interval": 3600.0,
}
way: str = plan["way"]


def make_limiter() -> Limiter:
    return Limiter(plan["url"], plan["limit"], **settings)


def calls(limiter: Limiter, row: int, seconds: float) -> None:
    """Call all keys, and a few of them often, until the limiter is closed."""
    row_counts, rng = counts.row(row), random.Random(plan["seed"] + row)
    until = time.monotonic() + seconds
    hot = rng.sample(range(len(names)), 10)
    rare = 0 if "close amid" in way else 0.5  # hot keys alone have large leases
    acquire = limiter.try_acquire
    while time.monotonic() < until:
        for _ in range(200):
            index = rng.choice(hot) if rng.random() >= rare else rng.randrange(len(names))
            try:
                acquire(names[index])
            except DistwindowError:  # closed, or interrupted by the close
                return
            row_counts[index] = row_counts[index] + 1


def start_threads(limiter: Limiter, seconds: float, first: int = 0) -> list[threading.Thread]:
    threads = [
        threading.Thread(target=calls, args=(limiter, first + row, seconds), daemon=True)
        for row in range(plan["threads"])
    ]
    for thread in threads:
        thread.start()
    return threads


def run_threads() -> None:
    limiter = make_limiter()
    if way == "close amid calls":
        for _ in range(plan["closes"]):
            limiter = make_limiter()
            threads = start_threads(limiter, 20)
            time.sleep(plan["seconds"])
            limiter.close()
            for thread in threads:
                thread.join(10)
    elif way == "sigterm":
        calls(limiter, 0, 60)
    elif way == "sigterm amid threads":
        start_threads(limiter, 60, first=1)
        calls(limiter, 0, 60)
    elif way == "fork":
        calls(limiter, 0, plan["seconds"])
        fork_children(limiter)
        calls(limiter, 0, plan["seconds"] / 3)
    else:
        for thread in start_threads(limiter, plan["seconds"]):
            thread.join()
    if way == "thread exits":
        ending = threading.Thread(target=sys.exit, args=(3,))
        ending.start()
        ending.join()
    if way == "exception":
        raise ZeroDivisionError("an error of the program")


def fork_children(limiter: Limiter) -> None:
    """Fork children of a process that calls; each sends its counts and ends at once."""
    children = []
    for row in (1, 2):
        child = os.fork()
        if child == 0:
            code = 1
            try:
                calls(limiter, row, plan["seconds"])
                # The children of multiprocessing and of Celery end by _exit, too. Only close
                # refunds a lease.
                limiter.flush() if row == 1 and plan["mode"] != "leased" else limiter.close()
                code = 0
            finally:
                os._exit(code)
        children.append(child)
    for child in children:
        _, status = os.waitpid(child, 0)
        if status != 0:
            raise SystemExit(f"a forked child has ended with status {status}")


async def call_async(limiter: AsyncLimiter, row: int, seconds: float) -> None:
    row_counts, rng = counts.row(row), random.Random(plan["seed"] + row)
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        for _ in range(50):
            index = rng.randrange(5 if "close amid" in way else len(names))
            await limiter.try_acquire(names[index])
            row_counts[index] = row_counts[index] + 1
        await asyncio.sleep(0)


kept_errors: list[BaseException] = []


async def call_and_keep_error(limiter: AsyncLimiter, row: int) -> None:
    """Call until the task is cancelled, and keep a reference to its exception."""
    try:
        await call_async(limiter, row, 60)
    except BaseException as exc:  # it is a CancelledError
        kept_errors.append(exc)
        raise


async def flush_and_keep_error(limiter: AsyncLimiter) -> None:
    try:
        while True:
            await limiter.flush()
            await asyncio.sleep(0.01)
    except BaseException as exc:  # it is a CancelledError
        kept_errors.append(exc)
        raise


async def run_tasks() -> None:
    limiter = AsyncLimiter(plan["url"], plan["limit"], **settings)
    threads = plan["threads"]
    if way == "async normal":
        await asyncio.gather(*(call_async(limiter, row, plan["seconds"]) for row in range(threads)))
    elif way == "async sigterm":
        await asyncio.gather(*(call_async(limiter, row, 60) for row in range(threads)))
    elif way == "aclose amid calls":
        for _ in range(plan["closes"]):
            limiter = AsyncLimiter(plan["url"], plan["limit"], **settings)
            tasks = [asyncio.create_task(call_async(limiter, row, 60)) for row in range(threads)]
            await asyncio.sleep(plan["seconds"])
            await limiter.aclose()
            for ended in await asyncio.gather(*tasks, return_exceptions=True):
                if ended is not None and not isinstance(ended, DistwindowError):
                    raise ended
    elif way == "async without aclose":
        tasks = [asyncio.create_task(call_async(limiter, row, 60)) for row in range(threads)]
        await asyncio.sleep(plan["seconds"])
    else:
        tasks = [asyncio.create_task(call_and_keep_error(limiter, row)) for row in range(threads)]
        tasks.append(asyncio.create_task(flush_and_keep_error(limiter)))
        await asyncio.sleep(plan["seconds"] / 2)
        tasks[0].cancel()
        tasks[-1].cancel()
        await asyncio.sleep(plan["seconds"] / 2)


if __name__ == "__main__":
    dump_stacks_on_sigquit()
    restart_watchdog(60)
    if "sigterm" in way:
        exit_on_sigterm()
    if "async" in way or "aclose" in way:
        asyncio.run(run_tasks())
    else:
        run_threads()
