"""One process and one hot key: commands per admission, and latencies."""

from __future__ import annotations

import time
from contextlib import ExitStack
from functools import partial

from benchmarks import peers
from benchmarks.consistency.setup import MODES, decisions_until, open_limiter, script_calls
from benchmarks.measure import Quartiles, percentile, run_rounds
from benchmarks.report import Section, Target
from benchmarks.server import running
from distwindow import Limit

TARGET = Target(100, at_least=True)
"""Admissions per command: less than ten commands for 1,000 of them."""
LIMIT = Limit("100000/second")


def _timed(acquire: peers.Acquire, latencies_ns: list[int]) -> peers.Acquire:
    """Return `acquire`, appending the latency of every call to the list."""
    clock = time.perf_counter_ns

    def timed(key: str) -> object:
        start = clock()
        decision = acquire(key)
        latencies_ns.append(clock() - start)
        return decision

    return timed


def measure(section: Section, quick: bool) -> None:
    """Call at half the limit, or as fast as it goes."""
    seconds, count = (0.5, 3) if quick else (1.0, 9)
    admitted_per_command: dict[str, list[float]] = {mode: [] for mode in MODES}
    rates: dict[str, list[float]] = {mode: [] for mode in MODES}
    all_latencies_ns: dict[str, list[int]] = {mode: [] for mode in MODES}
    with running() as server, ExitStack() as stack:
        limiters = {
            mode: stack.enter_context(open_limiter(server, mode, LIMIT, prefix=mode))
            for mode in MODES
        }

        def trial(mode: str) -> float:
            latencies_ns: list[int] = []
            before = script_calls(server)
            acquire = _timed(limiters[mode].try_acquire, latencies_ns)
            start = time.time()
            decisions = decisions_until(start + seconds, acquire, LIMIT.amount / 2)
            admitted = sum(map(bool, decisions))
            elapsed = time.time() - start
            limiters[mode].flush()
            admitted_per_command[mode].append(admitted / (script_calls(server) - before))
            rates[mode].append(admitted / elapsed)
            all_latencies_ns[mode].extend(latencies_ns)
            return percentile(sorted(latencies_ns), 0.5)

        results = run_rounds(
            "consistency, a hot key", {mode: partial(trial, mode) for mode in MODES}, count
        )
    for mode in results.values:
        per_command = Quartiles.of(admitted_per_command[mode])
        section.add(
            f"admissions per command on a hot key, {LIMIT}: {mode}",
            per_command,
            target=TARGET if mode == "leased" else None,
            detail=f"{1000 / per_command.median:,.1f} commands per 1,000 admissions "
            f"at {Quartiles.of(rates[mode]).median:,.0f}/s",
        )
    for mode in results.values:
        ordered = sorted(all_latencies_ns[mode])
        p50, p99, p999 = (percentile(ordered, share) / 1000 for share in (0.5, 0.99, 0.999))
        section.add(
            f"direct's p50 on a hot key, over the p50 of: {mode}",
            1.0 if mode == "direct" else results.ratio("direct", mode),
            detail=f"p50 {p50:.1f}  p99 {p99:.1f}  p99.9 {p999:.1f} µs",
        )
    section.add_failures(results.errors, "a hot key: ")
