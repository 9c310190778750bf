"""Simulated fleets near their limit: permits that leases leave unused, and admissions above the
limit with periodic sync. There is no server and no clock, so a fleet may have 64 processes, and
every run has the same result.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable
from typing import NamedTuple

from benchmarks.measure import log
from benchmarks.report import Section, Target
from distwindow.local.direct import Direct
from distwindow.local.eventual import Eventual
from distwindow.local.leased import Leased
from distwindow.ring.limit import Limit
from distwindow.runtime.command_cache import CommandCache
from distwindow.runtime.options import Options
from tests.simulation.admissions import most_in_buckets, permits_by_bucket
from tests.simulation.process import LocalClock, MakeStrategy
from tests.simulation.timed import most_arrivals, simulate

EVEN_TARGET = Target(0.98, at_least=True)
"""Admissions, over those of `direct` with the same calls."""
ONE_SIDED_TARGET = Target(0.95, at_least=True)
BOUND_TARGET = Target(1)
ONE_WAY_MS = 0.25
FLUSH_INTERVAL_S, MAX_KEYS = 0.25, 1000


def direct(cache: CommandCache, clock: LocalClock) -> Direct:
    return Direct(cache, clock, Options(max_local_keys=MAX_KEYS, flush_interval=FLUSH_INTERVAL_S))


def leased(cache: CommandCache, clock: LocalClock) -> Leased:
    return Leased(cache, clock, Options(max_local_keys=MAX_KEYS, flush_interval=FLUSH_INTERVAL_S))


class Load(NamedTuple):
    """The demand of each process, as a share of the limit."""

    name: str
    limit: Limit
    shares: list[float]
    target: Target | None


def _even(processes: int, load: float, limit: str) -> Load:
    name = f"{processes} processes, {limit}, load {load:g}"
    target = EVEN_TARGET if processes == 4 else None
    return Load(name, Limit(limit), [load / processes] * processes, target)


def _one_sided(load: float, limit: str) -> Load:
    name = f"4 processes, {limit}, load {load:g}, all on one"
    return Load(name, Limit(limit), [load, 0, 0, 0], ONE_SIDED_TARGET)


def _loads(quick: bool) -> Iterable[Load]:
    for limit in ("100/second", "1000/second", "1000/second strict", "10000/second"):
        for processes in (4, 16, 64):
            for load in (1.0,) if quick else (0.95, 1.0, 1.5):
                yield _even(processes, load, limit)
        for load in (1.0,) if quick else (1.0, 1.5):
            yield _one_sided(load, limit)
    yield _even(4, 1.0, "5/second")


class _Result(NamedTuple):
    admitted: int
    commands: int


def _run(make_strategy: MakeStrategy, load: Load, seconds: float, seed: int) -> _Result:
    rates = [share * load.limit.amount / load.limit.per for share in load.shares]
    found = simulate(make_strategy, load.limit, rates, seconds, seed=seed)
    return _Result(len(found.admitted), found.store.executed)


def _unused_permits(section: Section, quick: bool) -> None:
    """Make the same calls with both strategies, for longer under small limits, because their
    windows differ more.
    """
    for load in _loads(quick):
        seconds = 3.0 if load.limit.amount > 100 else 30.0
        ratios, cost, base = [], [], []
        for seed in (1,) if quick else (1, 2, 3):
            own, other = _run(leased, load, seconds, seed), _run(direct, load, seconds, seed)
            ratios.append(own.admitted / other.admitted)
            cost.append(1000 * own.commands / own.admitted)
            base.append(1000 * other.commands / other.admitted)
        used = statistics.median(ratios)
        section.add(
            f"leased, of direct: {load.name}",
            used,
            target=load.target,
            detail=f"{100 * (1 - used):+.2f} % unused; {statistics.median(cost):,.0f} commands "
            f"per 1,000 admissions, direct {statistics.median(base):,.0f}",
        )
        log(f"simulation: {section.rows[-1].what}: {used:.4f}")


def _above_limit(section: Section, quick: bool) -> None:
    """Measure how far the fullest window is above the limit, over the documented bound."""
    limit, load = Limit("1000/second"), 3.0
    for processes in (2, 4, 16) if quick else (2, 4, 16, 64):
        for sync in (0.02, 0.1, 0.5):

            def eventual(cache: CommandCache, clock: LocalClock, sync: float = sync) -> Eventual:
                return Eventual(cache, clock, Options(max_local_keys=MAX_KEYS, sync_interval=sync))

            rates = [load * limit.amount / limit.per / processes] * processes
            found = simulate(eventual, limit, rates, 3.0, seed=1, warm_up_s=4 * sync + 0.1)
            counts = permits_by_bucket(
                [one._replace(at_ms=one.bucket_start_ms) for one in found.admitted], limit.bucket_ms
            )
            over = max(0, most_in_buckets(counts, limit.span) - limit.amount)
            # How old the counts of other processes may be (docs/guarantees.md).
            staleness_ms = 2000 * sync + 2 * ONE_WAY_MS
            arrivals = most_arrivals(found.arrivals, staleness_ms)
            bound = min((processes - 1) * limit.amount, arrivals)
            section.add(
                f"eventual, beyond {limit}, of the bound: {processes} processes, sync {sync:g} s",
                over / bound,
                target=BOUND_TARGET,
                detail=f"{over:,} of {bound:,}; "
                f"{1000 * found.store.executed / len(found.admitted):,.0f} commands "
                "per 1,000 admissions",
            )
            log(f"simulation: {section.rows[-1].what}: {over} of {bound}")


def run(quick: bool) -> Section:
    section = Section(
        "simulation",
        "simulated fleets: permits that leases leave unused, admissions above the limit",
    )
    _unused_permits(section, quick)
    _above_limit(section, quick)
    return section
