"""Load: `python -m benchmarks.load`. Prints a line for each sample, and verdicts.

- *keys*: a million keys are called once each, with each `consistency`: the memory of the server and
  of the process, beside the formula of docs/operations.md.
- *rate*: two processes, one with threads and one with an event loop, call as fast as they can for
  some minutes: memory, descriptors, threads and connections have to stay as they are.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import itertools
import logging
import multiprocessing
import os
import random
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import distwindow
from benchmarks import server
from benchmarks.measure import in_threads
from benchmarks.resp import Socket

MODES: dict[str, dict[str, Any]] = {
    "direct": {},
    "direct, local": {"on_store_error": "local", "share": 0.5},
    "leased": {"consistency": "leased"},
    "eventual": {"consistency": "eventual"},
}
RING_B = 214
"""A ring with permits in one bucket, by the formula of docs/operations.md."""
SENDERS_B = {"eventual": 195}
"""The records of the processes that flush to a ring: here of one."""
PROCESS_B = {"direct": 0, "direct, local": 650, "leased": 400, "eventual": 1_500}
"""For each of `max_local_keys` keys, the key included: the formula of docs/operations.md."""
ALL_MAY_WAIT = ("eventual",)
"""Modes that keep a key until its count is sent: calls of new keys may outrun the flushes."""
COMMAND_B, COMMANDS = 700, 32_768
"""A cached command, and how many a limiter keeps."""
MAX_LOCAL_KEYS = 100_000
TASKS = 200


def rss(pid: int) -> int:
    """Return the bytes that a process has in memory."""
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


# --------------------------------------------------------------------------------------------------
#
# A million keys.


def call_keys(url: str, mode: str, count: int, results: Any) -> None:
    """Call `count` keys once each, in a process of its own."""
    asyncio.run(_call_keys(url, mode, count, results))


async def _call_keys(url: str, mode: str, count: int, results: Any) -> None:
    async with distwindow.AsyncLimiter(
        url, "100/hour", timeout=5, max_local_keys=MAX_LOCAL_KEYS, **MODES[mode]
    ) as limiter:
        await limiter.try_acquire("warm")
        gc.collect()
        before, began = rss(os.getpid()), time.monotonic()
        keys = iter(range(count))

        async def call() -> None:
            for number in keys:
                await limiter.try_acquire(f"user:{number:07}")
                if mode == "eventual":
                    await asyncio.sleep(0)

        await asyncio.gather(*(call() for _ in range(TASKS)))
        seconds = time.monotonic() - began
        await limiter.flush()
        gc.collect()
        results.send((rss(os.getpid()) - before, seconds))


def keys_run(mode: str, count: int) -> bool:
    """Print what the server and the process take for so many keys. True if as the formula says."""
    context = multiprocessing.get_context("spawn")
    with server.running() as redis, Socket(redis.port) as connection:
        before = int(connection.info("memory")["used_memory"])
        receive, send = context.Pipe(duplex=False)
        process = context.Process(target=call_keys, args=(redis.url, mode, count, send))
        process.start()
        ours, seconds = receive.recv()
        process.join()
        theirs = int(connection.info("memory")["used_memory"]) - before
    expected = count * (RING_B + SENDERS_B.get(mode, 0))
    states = count if mode in ALL_MAY_WAIT else min(count, MAX_LOCAL_KEYS)
    kept = states * PROCESS_B[mode] + min(count, COMMANDS) * COMMAND_B
    ok = theirs <= 1.1 * expected and ours <= 1.25 * kept
    print(
        f"{mode:<14} {count:>9,} keys at {count / seconds:>7,.0f}/s   "
        f"server {theirs / 1e6:6.1f} MB, formula {expected / 1e6:6.1f} MB "
        f"({theirs / count:.0f} B a key)   "
        f"process {ours / 1e6:6.1f} MB, formula {kept / 1e6:6.1f} MB   "
        f"{'ok' if ok else 'MORE'}",
        flush=True,
    )
    return ok


# --------------------------------------------------------------------------------------------------
#
# Minutes at full rate.


def _limiters(kind: Callable[..., Any], url: str) -> list[Any]:
    return [
        kind(url, "100/second", timeout=5, prefix=mode.replace(", ", "-"), **options)
        for mode, options in MODES.items()
    ]


def _keys(number: int) -> Any:
    chance = random.Random(number)
    return (
        f"hot:{chance.randrange(100)}" if chance.random() < 0.5 else f"k:{chance.randrange(2_000)}"
        for _ in itertools.count()
    )


def call_in_threads(url: str, calls: Any, stop: Any) -> None:
    """Call from four threads until `stop` is set."""
    logging.disable(logging.CRITICAL)
    limiters = _limiters(distwindow.Limiter, url)

    def run(number: int) -> None:
        for key, limiter in zip(_keys(number), itertools.cycle(limiters), strict=False):
            limiter.try_acquire(key)
            calls[number] += 1
            if stop.value:
                return

    in_threads(partial(run, number) for number in range(4))
    for limiter in limiters:
        limiter.close()


def call_in_tasks(url: str, calls: Any, stop: Any) -> None:
    """Call from 100 tasks until `stop` is set."""
    logging.disable(logging.CRITICAL)
    asyncio.run(_call_in_tasks(url, calls, stop))


async def _call_in_tasks(url: str, calls: Any, stop: Any) -> None:
    limiters = _limiters(distwindow.AsyncLimiter, url)

    async def run(number: int) -> None:
        for key, limiter in zip(_keys(number), itertools.cycle(limiters), strict=False):
            await limiter.try_acquire(key)
            calls[4] += 1
            if calls[4] % 100 == 0:
                await asyncio.sleep(0)
            if stop.value:
                return

    await asyncio.gather(*(run(number) for number in range(100)))
    for limiter in limiters:
        await limiter.aclose()


class Sample(NamedTuple):
    """What two processes and the server take."""

    threads_mb: float
    tasks_mb: float
    server_mb: float
    fds: int
    threads: int
    connections: int


def _sample(pids: list[int], connection: Socket) -> Sample:
    status = [Path(f"/proc/{pid}/status").read_text() for pid in pids]
    return Sample(
        rss(pids[0]) / 1e6,
        rss(pids[1]) / 1e6,
        int(connection.info("memory")["used_memory"]) / 1e6,
        sum(len(list(Path(f"/proc/{pid}/fd").iterdir())) for pid in pids),
        sum(int(text.split("Threads:")[1].split()[0]) for text in status),
        int(connection.info("clients")["connected_clients"]),
    )


def rate_run(minutes: float, every_s: float = 10.0) -> bool:
    """Print a sample each ten seconds. True if nothing has grown in the second half."""
    context = multiprocessing.get_context("spawn")
    calls = context.Array("q", 5, lock=False)
    stop = context.Value("b", 0)
    samples: list[Sample] = []
    with server.running() as redis, Socket(redis.port) as connection:
        processes = [
            context.Process(target=target, args=(redis.url, calls, stop))
            for target in (call_in_threads, call_in_tasks)
        ]
        for process in processes:
            process.start()
        began, before = time.monotonic(), 0
        while time.monotonic() < began + minutes * 60:
            time.sleep(every_s)
            samples.append(_sample([process.pid or 0 for process in processes], connection))
            total = sum(calls)
            now = samples[-1]
            print(
                f"{time.monotonic() - began:5.0f} s  {(total - before) / every_s:>8,.0f} calls/s   "
                f"RSS {now.threads_mb:6.1f} MB (threads) {now.tasks_mb:6.1f} MB (tasks)   "
                f"server {now.server_mb:6.1f} MB   {now.fds} descriptors, {now.threads} threads, "
                f"{now.connections} connections",
                flush=True,
            )
            before = total
        stop.value = 1
        for process in processes:
            process.join(30)
    half = samples[len(samples) // 4 : len(samples) // 2], samples[len(samples) * 3 // 4 :]
    ok = all(process.exitcode == 0 for process in processes)
    for name in Sample._fields:
        earlier, later = (max(getattr(one, name) for one in part) for part in half)
        # An allocator's arenas: memory is flat within 5 %.
        flat = later <= earlier * (1.05 if name.endswith("mb") else 1)
        ok = ok and flat
        print(f"{name:<12} {earlier:>8,.1f} -> {later:>8,.1f}  {'flat' if flat else 'GROWS'}")
    return ok


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.load", description=__doc__)
    parser.add_argument("--keys", type=int, default=1_000_000)
    parser.add_argument("--minutes", type=float, default=5.0)
    parser.add_argument("--mode", action="append", choices=MODES)
    parser.add_argument("--only", choices=("keys", "rate"))
    options = parser.parse_args()
    print(f"load average {os.getloadavg()[0]:.2f}, {server.version()}")
    verdicts = []
    if options.only != "rate":
        verdicts += [keys_run(mode, options.keys) for mode in options.mode or MODES]
    if options.only != "keys":
        verdicts.append(rate_run(options.minutes))
    print("ok" if all(verdicts) else "NOT ok")
    return 0 if all(verdicts) else 1


if __name__ == "__main__":
    raise SystemExit(main())
