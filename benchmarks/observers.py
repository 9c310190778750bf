"""What an observer costs a call: nothing where a lease decides it, and a few percent elsewhere."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any

from benchmarks.measure import Trial, run_rounds
from benchmarks.report import Section, Target
from benchmarks.server import last_core, running
from distwindow import AsyncLimiter, Limiter, Observer

CALLS = 6_000
EXCHANGES = 500
COPIES = 4
"""Limiters in turn, where calls take no exchange: one may be some percent slower than its equal, by
where its parts lie in memory.
"""
PLENTY = "1000000000/hour"
MORE = "2000000000/day"
Way = tuple[str, Any, int, bool]
WAYS: dict[str, Way] = {
    "leased, cost 1": ("leased", PLENTY, 1, False),
    "leased, cost 2": ("leased", PLENTY, 2, False),
    "eventual": ("eventual", PLENTY, 1, False),
    "a refusal that is repeated": ("direct", "1/hour", 1, False),
    "in memory": ("memory", PLENTY, 1, False),
    "in memory, cost 2": ("memory", PLENTY, 2, False),
    "in memory, with key_label": ("memory", PLENTY, 1, True),
    "in memory, two limits": ("memory", [PLENTY, MORE], 1, False),
    "in memory, paced": ("memory", "10000000/second paced 1s", 1, False),
    "direct": ("direct", PLENTY, 1, False),
    "direct, with key_label": ("direct", PLENTY, 1, True),
    "direct, awaited": ("awaited", PLENTY, 1, False),
}
"""By what it is: where a call is decided, its limits, its cost, and whether keys have labels."""


class Sum(Observer):
    """An observer that adds up calls."""

    calls = 0

    def on_counts(self, batch: Any) -> None:
        for counts in batch:
            self.calls += counts.calls


def of_threads(limiters: Sequence[Limiter], cost: int, calls: int) -> float:
    """Return ns per call: where it asks the store, of the clock, and else of the processor, with
    those of the worker.
    """
    clock = time.perf_counter_ns if calls == EXCHANGES else time.process_time_ns
    taken = 0
    for limiter in limiters:
        for _ in range(calls // 50):  # fetches a lease
            limiter.try_acquire("user:42", cost)
        start = clock()
        for _ in range(calls):
            limiter.try_acquire("user:42", cost)
        taken += clock() - start
    return taken / calls / len(limiters)


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
        for way, made in WAYS.items():
            # Each way by itself, so that the two trials of a round follow one another: a machine
            # that others share is faster now and then slower, for seconds.
            trials: dict[str, Trial] = {
                name: _trial(stack, server.url, loop, made, observer)
                for name, observer in (("observed", Sum()), ("plain", None))
            }
            found = run_rounds(f"observer, {way}", trials, 9 if quick else 241)
            section.add(
                f"{way}: with an observer, over none",
                found.ratio("observed", "plain"),
                target=Target(1.01 if way == "leased, cost 1" else 1.03),
                detail=f"{found.median('observed'):,.0f} ns and {found.median('plain'):,.0f} ns",
            )
            section.add_failures(found.errors, f"{way}: ")
    return section


def _trial(
    stack: ExitStack, url: str, loop: asyncio.AbstractEventLoop, way: Way, observer: Observer | None
) -> Callable[[], float]:
    place, limits, cost, has_labels = way
    where = "memory://" if place == "memory" else url
    how: Any = place if place in ("leased", "eventual") else "direct"
    prefix = f"{place}-{len(limits)}-{cost}-{has_labels}-{observer is None}"
    options: Any = {
        "consistency": how, "observer": observer, "timeout": 5.0,
        "key_label": str if has_labels else None, "prefix": prefix,
    }  # fmt: skip
    if place == "awaited":
        awaited = AsyncLimiter(where, limits, **options)
        stack.callback(lambda: loop.run_until_complete(awaited.aclose()))
        return partial(of_tasks, loop, awaited)
    asks = place == "direct" and limits == PLENTY
    limiters = [
        stack.enter_context(Limiter(where, limits, **options | {"prefix": f"{prefix}-{copy}"}))
        for copy in range(1 if asks else COPIES)
    ]
    calls = EXCHANGES if asks else CALLS if limits in (PLENTY, "1/hour") else CALLS // 5
    return partial(of_threads, limiters, cost, calls)
