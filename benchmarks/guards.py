"""What a guarded call costs, by the number of slots in its chain, beside the bare limiter's call.

All slots let the call through: an authority rule, thresholds of the process, limits for all callers
and for one, two closed breakers. The floor is a clock, a lock and an increment (`inprocess.py`).

With `leased` a call is decided in the process, and what is timed is the processor time of the
calling thread; with `direct` it waits for the store, and what is timed is the time that passes.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial

from benchmarks.inprocess import FLOOR, KEY, open_floor
from benchmarks.measure import Results, Trial, run_rounds
from benchmarks.report import Section, Target
from benchmarks.server import Server, last_core, running
from distwindow import (
    AuthorityRule,
    CircuitBreaker,
    DegradeRule,
    ErrorRatio,
    FlowRule,
    Guard,
    Limiter,
    SystemRule,
)
from distwindow.sentinel.rules import Rule

ORIGIN = "app-a"
PLENTY = 10**9
CALLS = {"leased": (1_000, time.thread_time_ns), "direct": (200, time.perf_counter_ns)}
"""How many calls are in one trial, and by which clock they are timed."""
PER_SLOT = Target(3)

FLOW = FlowRule(KEY, PLENTY)
AUTHORITY = AuthorityRule(KEY, ORIGIN)
ERRORS = DegradeRule(KEY, 0.5, grade="error_ratio", time_window_s=5)
SLOW = DegradeRule(KEY, 5_000, time_window_s=5)
CHAINS: dict[int, tuple[Rule, ...]] = {
    0: (),
    1: (FLOW,),
    3: (AUTHORITY, FLOW, ERRORS),
    6: (
        AUTHORITY,
        SystemRule(qps=PLENTY),
        FLOW,
        FlowRule(KEY, PLENTY, limit_app=ORIGIN),
        ERRORS,
        SLOW,
    ),
}
RUNNING = (FlowRule(KEY, 1_000, grade="thread"),)

BARE, ENTRY, BREAKER = "try_acquire", "an entry", "an entry with a closed breaker"


def guarded_name(slots: int) -> str:
    return f"a guarded call, {slots} slot{'' if slots == 1 else 's'}"


def _us(call: Callable[[], object], calls: int, clock_ns: Callable[[], int]) -> float:
    """Return µs per call, after as many calls that are not timed, which fetch leases and states."""
    for _ in range(calls):
        call()
    start = clock_ns()
    for _ in range(calls):
        call()
    return (clock_ns() - start) / calls / 1_000


def _guarded(guard: Guard) -> None:
    with guard.entry(KEY, ORIGIN):
        pass


def _entered(limiter: Limiter, breaker: CircuitBreaker | None = None) -> None:
    with limiter.entry(KEY, breaker=breaker):
        pass


def trials_of(server: Server, consistency: str, stack: ExitStack) -> dict[str, Trial]:
    """Return the trials of one `consistency`, which share no keys in the store."""
    options = {"consistency": consistency, "timeout": 5.0}
    limiter, entries = (
        stack.enter_context(
            Limiter(server.url, f"{PLENTY}/second", prefix=f"{consistency}.{name}", **options)  # type: ignore[arg-type]
        )
        for name in ("bare", "entries")
    )
    breaker = stack.enter_context(CircuitBreaker(server.url, ErrorRatio(0.5), timeout=5.0))
    calls: dict[str, Callable[[], object]] = {
        BARE: lambda: limiter.try_acquire(KEY),
        ENTRY: lambda: _entered(entries),
        BREAKER: lambda: _entered(entries, breaker),
    }
    chains = {guarded_name(slots): rules for slots, rules in CHAINS.items()}
    if consistency == "direct":
        chains["a guarded call, one slot for running calls"] = RUNNING
    for name, rules in chains.items():
        prefix = f"{consistency}.{len(calls)}"
        guard = stack.enter_context(
            Guard(server.url, rules, prefix=prefix, installed_slots=False, **options)  # type: ignore[arg-type]
        )
        calls[name] = partial(_guarded, guard)
    return {name: partial(_us, call, *CALLS[consistency]) for name, call in calls.items()}


def run(quick: bool) -> Section:
    section = Section("guard", "guard: what a guarded call costs")
    with running(last_core()) as server:
        for consistency in CALLS:
            with ExitStack() as stack:
                floor = stack.enter_context(open_floor())
                trials = trials_of(server, consistency, stack)
                trials[FLOOR] = partial(_us, partial(floor, KEY), *CALLS[consistency])
                results = run_rounds(f"guard, {consistency}", trials, 7 if quick else 21)
            _report(section, consistency, results)
    return section


def _report(section: Section, consistency: str, results: Results) -> None:
    slots = max(CHAINS)
    if BARE in results.values:
        section.add(f"{consistency}: {BARE}", results.stat(BARE), unit="µs")
    for name in sorted(results.values, key=results.median):
        if name == FLOOR:
            continue
        for base in (FLOOR, BARE) if consistency == "leased" else (BARE,):
            if name != base:
                section.add(
                    f"{consistency}: {name}, over {'the floor' if base == FLOOR else base}",
                    results.ratio(name, base),
                    detail=f"{results.median(name):,.2f} µs per call",
                )
    if consistency == "leased" and not results.errors:
        most, none = guarded_name(slots), guarded_name(0)
        of_slots = (results.median(most) - results.median(none)) / slots
        section.add(
            f"leased: each of {slots} slots, over the floor",
            of_slots / results.median(FLOOR),
            target=PER_SLOT,
            detail=f"{of_slots:.2f} µs; the floor is {results.median(FLOOR):.2f} µs",
        )
    section.add_failures(results.errors, f"{consistency}: ")
