"""memory:// in one thread: ns per call, over the least that any such limiter has to do."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial

from benchmarks import peers
from benchmarks.measure import error_text, log, run_rounds
from benchmarks.report import Section, Target

TARGET = Target(4)
FLOOR = "floor: monotonic + lock + dict increment"
KEY = "user:42"


@contextmanager
def open_floor() -> Iterator[peers.Acquire]:
    lock, counts, monotonic = threading.Lock(), {KEY: 0}, time.monotonic

    def acquire(key: str) -> float:
        now = monotonic()
        with lock:
            counts[key] += 1
        return now

    yield acquire


def _trial(acquire: peers.Acquire, calls: int) -> float:
    """Return ns per call."""
    numbers = range(calls)
    start = time.perf_counter_ns()
    for _ in numbers:
        acquire(KEY)
    return (time.perf_counter_ns() - start) / calls


def run(quick: bool) -> Section:
    section = Section("inprocess", "memory://, one thread")
    calls, count = (3_000, 11) if quick else (10_000, 25)
    errors: dict[str, str] = {}
    with ExitStack() as stack:
        opened = {FLOOR: stack.enter_context(open_floor())}
        contenders = [
            *[p for p in (*peers.limiters(), *peers.more_limiters()) if "redis" not in p.name],
            *peers.memory_peers(),
        ]
        for peer in contenders:
            try:
                acquire = stack.enter_context(peer.open("memory://", peers.HIGH_QUOTA))
                peers.check_decisions(acquire(KEY) for _ in range(1_000))
                opened[peer.name] = acquire
            except Exception as error:
                errors[peer.name] = error_text(error)
                log(f"inprocess: {peer.name} failed: {errors[peer.name]}")
        results = run_rounds(
            "inprocess",
            {name: partial(_trial, acquire, calls) for name, acquire in opened.items()},
            count,
        )
    for name in sorted(results.values, key=results.median):
        section.add(
            name,
            1.0 if name == FLOOR else results.ratio(name, FLOOR),
            target=TARGET if name == peers.DISTWINDOW else None,
            detail=f"{results.median(name):,.0f} ns per call",
        )
    section.add_failures({**errors, **results.errors})
    return section
