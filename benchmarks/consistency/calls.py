"""Calls on one key that need no command: of one thread, and of eight."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial

from benchmarks import inprocess, peers, preselection, threads
from benchmarks.consistency.setup import KEY, open_limiter
from benchmarks.measure import error_text, log, run_rounds
from benchmarks.report import Section, Target
from benchmarks.server import Server, running

ONE_THREAD_TARGET = Target(2.2)
OVER_REDIS_TARGET = Target(20, at_least=True)
"""For "tens of times faster" in the documentation."""
THREADS_TARGET = Target(1, at_least=True)

FLOOR = inprocess.FLOOR
LEASED, DENIED, EVENTUAL = "leased hit", "cached refusal", "eventual hit"
_MAX_WARMUPS = 200_000
_UNTIMED_CALLS = 5_000
"""The calls before a trial. While other contenders run, a lease ends and its demand fades, and the
first calls after that fetch some leases that grow. `hot_key.py` counts these commands.
"""

Prepare = Callable[[], peers.Acquire]
"""Brings a limiter into the state that is measured, and returns its `acquire`."""


@contextmanager
def _decided_locally(
    server: Server, mode: str, quota: peers.Quota, source: str
) -> Iterator[Prepare]:
    """Open a limiter that is prepared when a hundred decisions in a row have this `source`."""
    with open_limiter(server, mode, quota.limit(), prefix=source) as limiter:
        acquire = limiter.try_acquire

        def prepare() -> peers.Acquire:
            for _ in range(_UNTIMED_CALLS):
                acquire(KEY)
            for _ in range(_MAX_WARMUPS):
                if all([acquire(KEY).source == source for _ in range(100)]):
                    return acquire
            raise RuntimeError(f"no decision came from {source!r}")

        yield prepare


@contextmanager
def _always_prepared(opened: AbstractContextManager[peers.Acquire]) -> Iterator[Prepare]:
    with opened as acquire:
        peers.check_decisions(acquire(KEY) for _ in range(200))
        yield lambda: acquire


def _ns_per_call(prepare: Prepare, calls: int) -> float:
    """Return ns per call, including what the worker does meanwhile."""
    acquire, numbers = prepare(), range(calls)
    start = time.perf_counter_ns()
    for _ in numbers:
        acquire(KEY)
    return (time.perf_counter_ns() - start) / calls


def _preselected(server: Server, section: Section) -> list[peers.Peer]:
    """Return the best settings of each peer over Redis, in one thread."""
    candidates = peers.blocking_peers(pools=(peers.SHARED,))

    def rate(peer: peers.Peer) -> float:
        with _always_prepared(peer.open(server.url, peers.HIGH_QUOTA)) as prepare:
            return 1e9 / _ns_per_call(prepare, 500)

    results = run_rounds(
        "consistency, preselection", {p.name: partial(rate, p) for p in candidates}, 1
    )
    section.add_failures(results.errors, "preselection: ")
    return preselection.best_settings(candidates, results)


def measure_one_thread(section: Section, quick: bool) -> None:
    calls, calls_over_redis, count = (3_000, 200, 11) if quick else (10_000, 500, 25)
    errors: dict[str, str] = {}
    with running() as server, ExitStack() as stack:
        selected = _preselected(server, section)
        over_redis = [f"{peer.name}, over Redis" for peer in selected]
        contexts = {
            FLOOR: _always_prepared(inprocess.open_floor()),
            LEASED: _decided_locally(server, "leased", peers.HIGH_QUOTA, "lease"),
            DENIED: _decided_locally(server, "direct", peers.LOW_QUOTA, "deny_cache"),
            EVENTUAL: _decided_locally(server, "eventual", peers.HIGH_QUOTA, "local"),
            **{
                p.name: _always_prepared(p.open("memory://", peers.HIGH_QUOTA))
                for p in peers.memory_peers()
            },
            **{
                name: _always_prepared(peer.open(server.url, peers.HIGH_QUOTA))
                for name, peer in zip(over_redis, selected, strict=True)
            },
        }
        trials: dict[str, Callable[[], float]] = {}
        for name, context in contexts.items():
            try:
                prepare = stack.enter_context(context)
                prepare()
                own_calls = calls_over_redis if name in over_redis else calls
                trials[name] = partial(_ns_per_call, prepare, own_calls)
            except Exception as error:
                errors[name] = error_text(error)
                log(f"consistency: {name} failed: {errors[name]}")
        results = run_rounds("consistency, one thread", trials, count)
    for name in sorted(results.values, key=results.median):
        section.add(
            f"one thread: {name}",
            1.0 if name == FLOOR else results.ratio(name, FLOOR),
            target=ONE_THREAD_TARGET if name in (LEASED, DENIED, EVENTUAL) else None,
            detail=f"{results.median(name):,.0f} ns per call",
        )
    measured = [name for name in over_redis if name in results.values]
    if measured:
        best = min(measured, key=results.median)
        for name in (LEASED, DENIED, EVENTUAL):
            section.add(
                f"one thread: calls in the time of the fastest peer's over Redis: {name}",
                results.ratio(best, name),
                target=OVER_REDIS_TARGET if name != EVENTUAL else None,
                detail=f"{results.median(best) / 1000:,.1f} µs {best}",
            )
    section.add_failures({**errors, **results.errors}, "one thread: ")


def measure_threads(section: Section, quick: bool) -> None:
    seconds, count = (0.25, 5) if quick else (0.5, 11)
    one, many = "1 thread", f"{threads.THREADS} threads"
    for name, mode, quota, source, admitted in (
        (LEASED, "leased", peers.HIGH_QUOTA, "lease", True),
        (DENIED, "direct", peers.LOW_QUOTA, "deny_cache", False),
        (EVENTUAL, "eventual", peers.HIGH_QUOTA, "local", True),
    ):
        with running() as server, _decided_locally(server, mode, quota, source) as prepare:

            def trial(number: int, prepare: Prepare = prepare, admitted: bool = admitted) -> float:
                return threads.decisions_per_second([prepare()] * number, admitted, seconds)

            results = run_rounds(
                f"consistency, {many}, {name}",
                {one: partial(trial, 1), many: partial(trial, threads.THREADS)},
                count,
            )
        if not results.errors:
            section.add(
                f"{many} on one key, over {one}: {name}",
                results.ratio(many, one),
                target=THREADS_TARGET if name == LEASED else None,
                detail=f"{results.median(many):,.0f}/s, {one} {results.median(one):,.0f}/s",
            )
        section.add_failures(results.errors, f"{name}: ")
