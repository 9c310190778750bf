"""A client of scenario `fleet`: threads or tasks that call, and log each call when it has returned.

Its main thread takes orders from stdin: on `fork` it forks a child that calls for a moment with the
same limiters, on `end` it flushes all counts and ends.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import sys
import threading
import time
from typing import Any

from distwindow import AsyncLimiter, ConfigurationError, Limiter, StoreError
from distwindow.ring.decision import Decision
from tests.attack.children import dump_stacks_on_sigquit, monotonic_ms, read_plan

plan = read_plan()
PAUSE_S = 0.004
PAUSE_CHECK_S = 0.02


class Log:
    """A file of JSON lines. Each is written by one system call, so the file of a killed process
    holds all calls that it has finished.
    """

    def __init__(self, name: str) -> None:
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND
        # Plain `os` calls, as the log is written by `os.write`.
        self._file = os.open(os.path.join(plan["folder"], name), flags)  # noqa: PTH118
        self.name = name
        self.rng = random.Random(f"{plan['seed']} {name}")
        own = [f"{name}-{number}" for number in range(3)]
        self.short = plan["short_keys"]
        self.long = [*plan["long_keys"], *own]

    def write(self, **facts: Any) -> None:
        os.write(self._file, json.dumps(facts).encode() + b"\n")

    def call(self, window: str, key: str, cost: int, began: int, outcome: Any) -> None:
        took = monotonic_ms() - began
        facts: dict[str, Any] = {"window": window, "key": key, "cost": cost, "at": began}
        if isinstance(outcome, Decision):
            facts |= {"ok": outcome.allowed, "now": outcome.now_ms, "by": outcome.source}
        elif isinstance(outcome, StoreError):
            facts |= {"ok": None if outcome.charged is None else False, "by": "error"}
        else:
            facts |= {"ok": None, "wrong": repr(outcome)[:300]}
        self.write(**facts, took=took)

    def draw(self) -> tuple[str, str, int]:
        """Return the window, the key and the cost of the next call."""
        rng = self.rng
        if rng.random() < 0.6:
            return "short", rng.choice(self.short), rng.choice([1, 1, 1, 2])
        return "long", rng.choice(self.long), rng.choice([1, 1, 3])


def settings(window: str) -> dict[str, Any]:
    return {
        "limits": plan[window],
        "prefix": f"{plan['prefix']}-{window}",
        "consistency": plan["mode"],
        "timeout": plan["timeout"],
    }


def work(limiters: dict[str, Limiter], log: Log, stop: threading.Event) -> None:
    while not stop.is_set():
        window, key, cost = log.draw()
        began = monotonic_ms()
        outcome: Any
        try:
            outcome = limiters[window].try_acquire(key, cost)
        except Exception as exc:
            outcome = exc
        log.call(window, key, cost, began, outcome)
        time.sleep(log.rng.random() * PAUSE_S)


def log_pauses(log: Log, stop: threading.Event) -> None:
    """Log when this process could not run, because it was stopped or the machine was busy."""
    while not stop.is_set():
        before = monotonic_ms()
        time.sleep(PAUSE_CHECK_S)
        lost = monotonic_ms() - before - int(PAUSE_CHECK_S * 1000)
        if lost > 20:
            log.write(pause=before, lost=lost)


def flush_and_close(limiters: dict[str, Limiter], log: Log) -> None:
    """Flush, in several attempts: the faults have ended."""
    for limiter in limiters.values():
        for _ in range(20):
            try:
                limiter.flush()
                break
            except (StoreError, ConfigurationError) as exc:
                log.write(flush=repr(exc))
                time.sleep(0.2)  # before the next attempt
        limiter.close()
    log.write(ended=True, unknown=sum(limiter.unknown_total for limiter in limiters.values()))


def fork_child(limiters: dict[str, Limiter], name: str) -> None:
    """Fork a child that calls. The parent has logged its name before, so that a child that ends at
    once is noticed.
    """
    if os.fork() != 0:
        return
    try:
        log = Log(name)
        stop = threading.Event()
        threading.Timer(0.7, stop.set).start()
        threading.Thread(target=log_pauses, args=(log, stop), daemon=True).start()
        work(limiters, log, stop)
        flush_and_close(limiters, log)
    finally:
        os._exit(0)


def run_threads() -> None:
    log, stop = Log(plan["name"]), threading.Event()
    limiters = {window: Limiter(plan["url"], **settings(window)) for window in ("short", "long")}
    threads = [
        threading.Thread(target=work, args=(limiters, log, stop), daemon=True)
        for _ in range(plan["threads"])
    ]
    threads.append(threading.Thread(target=log_pauses, args=(log, stop), daemon=True))
    for thread in threads:
        thread.start()
    forks = 0
    for order in sys.stdin:
        if order == "fork\n":
            forks += 1
            name = f"{plan['name']}f{forks}"
            log.write(fork=name)
            fork_child(limiters, name)
        else:
            break
    stop.set()
    for thread in threads:
        thread.join(10)
    flush_and_close(limiters, log)


async def work_async(limiters: dict[str, AsyncLimiter], log: Log, stop: threading.Event) -> None:
    while not stop.is_set():
        window, key, cost = log.draw()
        began = monotonic_ms()
        outcome: Any
        try:
            outcome = await limiters[window].try_acquire(key, cost)
        except Exception as exc:
            outcome = exc
        log.call(window, key, cost, began, outcome)
        await asyncio.sleep(log.rng.random() * PAUSE_S)


async def run_tasks() -> None:
    log, stop = Log(plan["name"]), threading.Event()
    limiters = {
        window: AsyncLimiter(plan["url"], **settings(window)) for window in ("short", "long")
    }
    threading.Thread(target=log_pauses, args=(log, stop), daemon=True).start()
    tasks = [asyncio.create_task(work_async(limiters, log, stop)) for _ in range(plan["threads"])]
    order = "fork\n"
    while order == "fork\n":
        order = await asyncio.to_thread(sys.stdin.readline)
    stop.set()
    await asyncio.gather(*tasks)
    unknown = 0
    for limiter in limiters.values():
        for _ in range(20):
            try:
                await limiter.flush()
                break
            except (StoreError, ConfigurationError) as exc:
                log.write(flush=repr(exc))
                await asyncio.sleep(0.2)  # before the next attempt
        unknown += limiter.unknown_total
        await limiter.aclose()
    log.write(ended=True, unknown=unknown)


if __name__ == "__main__":
    dump_stacks_on_sigquit()
    if plan["kind"] == "async":
        asyncio.run(run_tasks())
    else:
        run_threads()
