"""A process that calls: threads or tasks, each of which logs each call when it has returned.

Its main thread takes orders from stdin: on `fork` it forks a child that calls for a moment with the
same limiters, on `end` it flushes all counts and ends.

Its plan: `url`, `folder` of the logs, `name`, `kind` ("sync" or "async"), `threads`, `seed`,
`windows` (the arguments of a limiter by the name of the window) and `calls`: a list of `window`,
`weight`, `keys` (`{name}` becomes the name of the process) and `costs`, of which each call is
drawn.
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

import psutil

from distwindow import AsyncLimiter, ConfigurationError, Limiter, StoreError
from distwindow.ring.decision import Decision
from tests.attack.children import dump_stacks_on_sigquit, monotonic_ms, read_plan

plan = read_plan()
PAUSE_S = plan.get("pause", 0.004)
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
        self._weights = [kind["weight"] for kind in plan["calls"]]
        modes = {window: given["consistency"] for window, given in plan["windows"].items()}
        self.write(modes=modes)

    def write(self, **facts: Any) -> None:
        os.write(self._file, json.dumps(facts).encode() + b"\n")

    def call(
        self, drawn: tuple[str, str, int], began: tuple[int, int], outcome: Any, why: str | None
    ) -> None:
        at, wall = began
        took = monotonic_ms() - at
        window, key, cost = drawn
        facts: dict[str, Any] = {"window": window, "key": key, "cost": cost, "at": at}
        if isinstance(outcome, Decision):
            facts |= {"ok": outcome.allowed, "now": outcome.now_ms, "wall": wall}
            facts["by"] = outcome.source
            if outcome.reason == "store_down" and outcome.source == "local":
                facts["by"] = "share"
        elif isinstance(outcome, StoreError):
            facts |= {"ok": None if outcome.charged is None else False, "by": "error"}
        else:
            facts |= {"ok": None, "by": "error", "wrong": repr(outcome)[:300]}
        if facts["by"] in ("error", "policy", "share"):
            facts["why"] = str(why)[:150]
        self.write(**facts, took=took)

    def draw(self) -> tuple[str, str, int]:
        """Return the window, the key and the cost of the next call."""
        rng = self.rng
        (kind,) = rng.choices(plan["calls"], self._weights)
        return (
            kind["window"],
            rng.choice(kind["keys"]).format(name=self.name),
            rng.choice(kind["costs"]),
        )


def now() -> tuple[int, int]:
    """Return CLOCK_MONOTONIC and the time since the epoch, ms."""
    return monotonic_ms(), time.time_ns() // 1_000_000


def resources() -> dict[str, int]:
    """Return how many threads and open files this process has."""
    process = psutil.Process()
    return {"threads": process.num_threads(), "files": process.num_fds()}


def work(limiters: dict[str, Limiter], log: Log, stop: threading.Event) -> None:
    while not stop.is_set():
        window, key, cost = drawn = log.draw()
        began = now()
        outcome: Any
        try:
            outcome = limiters[window].try_acquire(key, cost)
        except Exception as exc:
            outcome = exc
        log.call(drawn, began, outcome, limiters[window].health().last_error)
        time.sleep(log.rng.random() * PAUSE_S)


def log_pauses(log: Log, stop: threading.Event) -> None:
    """Log when this process could not run, because it was stopped or the machine was busy."""
    while not stop.is_set():
        before = monotonic_ms()
        time.sleep(PAUSE_CHECK_S)
        lost = monotonic_ms() - before - int(PAUSE_CHECK_S * 1000)
        if lost > 20:
            log.write(pause=before, lost=lost)


def flush_and_close(limiters: dict[str, Limiter], log: Log) -> int:
    """Flush, in several attempts: the faults have ended. Return the calls of unknown outcome."""
    for limiter in limiters.values():
        for _ in range(20):
            try:
                limiter.flush()
                break
            except (StoreError, ConfigurationError) as exc:
                log.write(flush=repr(exc))
                time.sleep(0.2)  # before the next attempt
        limiter.close()
    return sum(limiter.unknown_total for limiter in limiters.values())


def log_end(log: Log, unknown: int, before: dict[str, int]) -> None:
    """Log that all counts are flushed, and what is left of threads and files, which may take a
    moment to end.
    """
    # The worker of all limiters is one thread, which stays.
    allowed = {"threads": 1, "files": 2}
    until = time.monotonic() + 5
    while True:
        after = resources()
        is_flat = all(after[name] <= before[name] + allowed[name] for name in before)
        if is_flat or time.monotonic() > until:
            break
        time.sleep(0.05)  # before the next look
    found = {name: [before[name], after[name], allowed[name]] for name in before}
    log.write(ended=True, unknown=unknown, resources=found)


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
        log.write(ended=True, unknown=flush_and_close(limiters, log))
    finally:
        os._exit(0)


def run_threads() -> None:
    log, stop = Log(plan["name"]), threading.Event()
    before = resources()
    limiters = {window: Limiter(plan["url"], **given) for window, given in plan["windows"].items()}
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
    log_end(log, flush_and_close(limiters, log), before)


async def work_async(limiters: dict[str, AsyncLimiter], log: Log, stop: threading.Event) -> None:
    while not stop.is_set():
        window, key, cost = drawn = log.draw()
        began = now()
        outcome: Any
        try:
            outcome = await limiters[window].try_acquire(key, cost)
        except Exception as exc:
            outcome = exc
        log.call(drawn, began, outcome, limiters[window].health().last_error)
        await asyncio.sleep(log.rng.random() * PAUSE_S)


async def run_tasks() -> None:
    log, stop = Log(plan["name"]), threading.Event()
    before = resources()
    reader = asyncio.create_task(asyncio.to_thread(sys.stdin.readline))
    limiters = {
        window: AsyncLimiter(plan["url"], **given) for window, given in plan["windows"].items()
    }
    pauses = threading.Thread(target=log_pauses, args=(log, stop), daemon=True)
    pauses.start()
    tasks = [asyncio.create_task(work_async(limiters, log, stop)) for _ in range(plan["threads"])]
    while await reader == "fork\n":
        reader = asyncio.create_task(asyncio.to_thread(sys.stdin.readline))
    stop.set()
    await asyncio.gather(*tasks)
    pauses.join()
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
    await asyncio.get_running_loop().shutdown_default_executor()
    log_end(log, unknown, before)


if __name__ == "__main__":
    dump_stacks_on_sigquit()
    if plan["kind"] == "async":
        asyncio.run(run_tasks())
    else:
        run_threads()
