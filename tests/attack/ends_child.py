"""The child of scenario `ends`: it calls for a moment and ends in the way it is told."""

from __future__ import annotations

import asyncio
import os
import random
import sys
import threading
import time
from pathlib import Path
from typing import Any

from distwindow import AsyncLimiter, DistwindowError, Limiter
from tests.attack.children import alive_for, plan, watched
from tests.attack.shared_counts import SharedCounts

told = plan()
counts = SharedCounts(Path(told["counts"]), 2 * told["threads"], told["keys"])
names = [f"k{number}" for number in range(told["keys"])]
settings: dict[str, Any] = {
    "prefix": told["prefix"],
    "consistency": told["mode"],
    "timeout": 1.0,
    "flush_interval": 3600.0,
    "sync_interval": 3600.0,
}
way: str = told["way"]


def made() -> Limiter:
    return Limiter(told["url"], told["limit"], **settings)


def calls(limiter: Limiter, row: int, seconds: float) -> None:
    """Calls on all keys, and on a few of them often, until the limiter is closed."""
    mine, rng, until = (
        counts.row(row),
        random.Random(told["seed"] + row),
        time.monotonic() + seconds,
    )
    hot = rng.sample(range(len(names)), 10)
    rare = 0 if "close amid" in way else 0.5  # hot keys alone have large leases
    acquire = limiter.try_acquire
    while time.monotonic() < until:
        for _ in range(200):
            index = rng.choice(hot) if rng.random() >= rare else rng.randrange(len(names))
            try:
                acquire(names[index])
            except DistwindowError:  # closed, or cut off by the close
                return
            mine[index] = mine[index] + 1


def threaded(limiter: Limiter, seconds: float, first: int = 0) -> list[threading.Thread]:
    threads = [
        threading.Thread(target=calls, args=(limiter, first + row, seconds), daemon=True)
        for row in range(told["threads"])
    ]
    for thread in threads:
        thread.start()
    return threads


def blocking() -> None:
    limiter = made()
    if way == "close amid calls":
        for _ in range(told["closes"]):
            limiter = made()
            threads = threaded(limiter, 20)
            time.sleep(told["seconds"])
            limiter.close()
            for thread in threads:
                thread.join(10)
    elif way == "sigterm":
        calls(limiter, 0, 60)
    elif way == "sigterm amid threads":
        threaded(limiter, 60, first=1)
        calls(limiter, 0, 60)
    elif way == "fork":
        calls(limiter, 0, told["seconds"])
        forked(limiter)
        calls(limiter, 0, told["seconds"] / 3)
    elif way == "thread exits":
        for thread in threaded(limiter, told["seconds"]):
            thread.join()
        ending = threading.Thread(target=sys.exit, args=(3,))
        ending.start()
        ending.join()
    else:
        for thread in threaded(limiter, told["seconds"]):
            thread.join()
    if way == "exception":
        raise ZeroDivisionError("of the program")


def forked(limiter: Limiter) -> None:
    """Children of a process that calls; each flushes what it has counted and ends at once."""
    children = []
    for row in (1, 2):
        child = os.fork()
        if child == 0:
            code = 1
            try:
                calls(limiter, row, told["seconds"])
                # The children of multiprocessing and of Celery end by _exit, too. A lease is given
                # back by close only.
                limiter.flush() if row == 1 and told["mode"] != "leased" else limiter.close()
                code = 0
            finally:
                os._exit(code)
        children.append(child)
    for child in children:
        _, status = os.waitpid(child, 0)
        if status != 0:
            raise SystemExit(f"a forked child has ended with status {status}")


async def acalls(limiter: AsyncLimiter, row: int, seconds: float) -> None:
    mine, rng, until = (
        counts.row(row),
        random.Random(told["seed"] + row),
        time.monotonic() + seconds,
    )
    while time.monotonic() < until:
        for _ in range(50):
            index = rng.randrange(5 if "close amid" in way else len(names))
            await limiter.try_acquire(names[index])
            mine[index] = mine[index] + 1
        await asyncio.sleep(0)


kept: list[BaseException] = []


async def keeping(limiter: AsyncLimiter, row: int) -> None:
    """A task that is cancelled in a call, and whose exception somebody keeps."""
    try:
        await acalls(limiter, row, 60)
    except BaseException as exc:
        kept.append(exc)
        raise


async def flushing(limiter: AsyncLimiter) -> None:
    try:
        while True:
            await limiter.flush()
            await asyncio.sleep(0.01)
    except BaseException as exc:
        kept.append(exc)
        raise


async def awaiting() -> None:
    limiter = AsyncLimiter(told["url"], told["limit"], **settings)
    threads = told["threads"]
    if way == "async normal":
        await asyncio.gather(*(acalls(limiter, row, told["seconds"]) for row in range(threads)))
    elif way == "async sigterm":
        await asyncio.gather(*(acalls(limiter, row, 60) for row in range(threads)))
    elif way == "aclose amid calls":
        for _ in range(told["closes"]):
            limiter = AsyncLimiter(told["url"], told["limit"], **settings)
            tasks = [asyncio.create_task(acalls(limiter, row, 60)) for row in range(threads)]
            await asyncio.sleep(told["seconds"])
            await limiter.aclose()
            for ended in await asyncio.gather(*tasks, return_exceptions=True):
                if ended is not None and not isinstance(ended, DistwindowError):
                    raise ended
    elif way == "async without aclose":
        tasks = [asyncio.create_task(acalls(limiter, row, 60)) for row in range(threads)]
        await asyncio.sleep(told["seconds"])
    else:
        tasks = [asyncio.create_task(keeping(limiter, row)) for row in range(threads)]
        tasks.append(asyncio.create_task(flushing(limiter)))
        await asyncio.sleep(told["seconds"] / 2)
        tasks[0].cancel()
        tasks[-1].cancel()
        await asyncio.sleep(told["seconds"] / 2)


if __name__ == "__main__":
    watched()
    alive_for(60)
    if "async" in way or "aclose" in way:
        asyncio.run(awaiting())
    else:
        blocking()
