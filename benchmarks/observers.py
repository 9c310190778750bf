"""What an observer costs a call: nothing where a lease decides it, and a few percent elsewhere."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from typing import Any

from benchmarks.measure import Trial, run_rounds
from benchmarks.report import Section, Target
from benchmarks.server import last_core, running
from distwindow import AsyncLimiter, Limiter, Observer

CALLS = 100_000
EXCHANGES = 2_000
PLENTY = "1000000000/hour"
WAYS: dict[str, tuple[Any, str, int, Target]] = {
    "leased, cost 1": ("leased", PLENTY, 1, Target(1.01)),
    "leased, cost 2": ("leased", PLENTY, 2, Target(1.03)),
    "eventual": ("eventual", PLENTY, 1, Target(1.03)),
    "a refusal that is repeated": ("direct", "1/hour", 1, Target(1.03)),
    "memory://": ("memory", PLENTY, 1, Target(1.03)),
    "direct": ("direct", PLENTY, 1, Target(1.03)),
    "direct, awaited": ("awaited", PLENTY, 1, Target(1.03)),
}


class Sum(Observer):
    """An observer that adds up calls."""

    calls = 0

    def on_counts(self, batch: Any) -> None:
        for counts in batch:
            self.calls += counts.calls


def of_threads(limiter: Limiter, cost: int, calls: int) -> float:
    """Return ns per call: where it asks the store, of the clock, and else of the processor, with
    those of the worker.
    """
    clock = time.perf_counter_ns if calls == EXCHANGES else time.process_time_ns
    for _ in range(calls // 50):  # fetches a lease
        limiter.try_acquire("user:42", cost)
    start = clock()
    for _ in range(calls):
        limiter.try_acquire("user:42", cost)
    return (clock() - start) / calls


def of_tasks(loop: asyncio.AbstractEventLoop, limiter: AsyncLimiter) -> float:
    """Return ns per awaited call."""

    async def call() -> float:
        start = time.perf_counter_ns()
        for _ in range(EXCHANGES):
            await limiter.try_acquire("user:42")
        return (time.perf_counter_ns() - start) / EXCHANGES

    return loop.run_until_complete(call())


def run(quick: bool) -> Section:
    section = Section("observer", "calls with an observer, over those without")
    with running(last_core()) as server, ExitStack() as stack:
        loop = asyncio.new_event_loop()
        stack.callback(loop.close)
        for way, (consistency, limit, cost, target) in WAYS.items():
            # Each way by itself, so that the two trials of a round follow one another: a machine
            # that others share is faster now and then slower, for seconds.
            trials: dict[str, Trial] = {
                name: _trial(stack, server.url, loop, consistency, limit, cost, observer)
                for name, observer in (("observed", Sum()), ("plain", None))
            }
            found = run_rounds(f"observer, {way}", trials, 9 if quick else 61)
            section.add(
                f"{way}: with an observer, over none",
                found.ratio("observed", "plain"),
                target=target,
                detail=f"{found.median('observed'):,.0f} ns and {found.median('plain'):,.0f} ns",
            )
            section.add_failures(found.errors, f"{way}: ")
    return section


def _trial(
    stack: ExitStack,
    url: str,
    loop: asyncio.AbstractEventLoop,
    consistency: str,
    limit: str,
    cost: int,
    observer: Observer | None,
) -> Callable[[], float]:
    where = "memory://" if consistency == "memory" else url
    how: Any = consistency if consistency in ("leased", "eventual") else "direct"
    options: Any = {
        "consistency": how, "observer": observer, "timeout": 5.0,
        "prefix": f"{consistency}-{limit.partition('/')[0]}-{cost}-{observer is None}",
    }  # fmt: skip
    if consistency == "awaited":
        awaited = AsyncLimiter(where, limit, **options)
        stack.callback(lambda: loop.run_until_complete(awaited.aclose()))
        return partial(of_tasks, loop, awaited)
    limiter = stack.enter_context(Limiter(where, limit, **options))
    exchanges = consistency == "direct" and limit == PLENTY
    return partial(of_threads, limiter, cost, EXCHANGES if exchanges else CALLS)
