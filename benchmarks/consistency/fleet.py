"""A fleet of processes over one server: decisions per second, and the windows against the limit."""

from __future__ import annotations

import multiprocessing
import time
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field

from benchmarks import peers
from benchmarks.consistency.setup import KEY, MODES, decisions_until, script_calls
from benchmarks.measure import error_text, log
from benchmarks.report import Section, Target
from benchmarks.server import Server, running
from distwindow import Limit, Limiter

FULLEST_TARGET = Target(1)
MEAN_TARGET = Target(0.99, at_least=True)
PROCESSES = 4


@dataclass
class ProcessResult:
    """The decisions of one process: admissions by the store's bucket, and the number of all."""

    admitted: Counter[int] = field(default_factory=Counter)
    decisions: int = 0


@dataclass(frozen=True)
class ProcessOptions:
    """What one process calls from `begin` on: at `per_second`, without pause if that is None."""

    url: str
    mode: str
    limit: Limit
    share: float | None
    prefix: str
    per_second: float | None
    begin: float
    seconds: float


def _run_process(options: ProcessOptions) -> ProcessResult:
    """Run in a process of its own: call, and count each admission in the bucket of its `now_ms`."""
    bucket_ms, result = options.limit.bucket_ms, ProcessResult()
    with Limiter(
        options.url,
        options.limit,
        consistency=options.mode,  # type: ignore[arg-type]  # a str, but one of MODES
        share=options.share,
        prefix=options.prefix,
        timeout=peers.TIMEOUT_S,
    ) as limiter:
        limiter.stats(f"not {KEY}")  # connects; one command, which `_run_fleet` subtracts
        pause = options.begin - time.time()
        if pause < 0:
            raise RuntimeError("the process was not ready when the calls had to begin")
        time.sleep(pause)
        admitted, decisions = result.admitted, 0
        end = options.begin + options.seconds
        for decision in decisions_until(end, limiter.try_acquire, options.per_second):
            decisions += 1
            if decision:
                # The type of any peer's decisions is object; these are distwindow's.
                admitted[decision.now_ms // bucket_ms] += 1  # type: ignore[attr-defined]
        result.decisions = decisions
    return result


def _sleep(seconds: float) -> None:
    time.sleep(seconds)


@dataclass(frozen=True)
class FleetResult:
    """The sums over a fleet. Windows are aligned to buckets, and are shares of the limit."""

    decisions_per_second: float
    fullest: float
    mean: float
    """Of the windows after the first."""
    commands: float
    """Per 1,000 admissions."""

    def __str__(self) -> str:
        return (
            f"fullest window {100 * self.fullest:,.1f} %, mean {100 * self.mean:,.1f} % of the "
            f"limit, {self.commands:,.1f} commands per 1,000"
        )


def _run_fleet(
    server: Server, pool: ProcessPoolExecutor, processes: int, options: ProcessOptions
) -> FleetResult:
    server.flush()
    before = script_calls(server)
    futures = [pool.submit(_run_process, options) for _ in range(processes)]
    results = [future.result() for future in futures]
    commands = script_calls(server) - before - processes
    admitted: Counter[int] = sum((result.admitted for result in results), Counter())
    decisions = sum(result.decisions for result in results)
    limit = options.limit
    # The mean leaves out windows that contain the bucket in which the calls began, or the one in
    # which they ended: both are incomplete.
    first = int(options.begin * 1000) // limit.bucket_ms + 1
    last = int((options.begin + options.seconds) * 1000) // limit.bucket_ms - 1

    def window(start: int) -> int:
        return sum(admitted[start + i] for i in range(limit.buckets))

    fullest = max(window(start) for start in range(first - limit.buckets, last + 2))
    later = [window(start) for start in range(first + limit.buckets, last - limit.buckets + 2)] or [
        0
    ]
    return FleetResult(
        decisions / options.seconds,
        fullest / limit.amount,
        sum(later) / len(later) / limit.amount,
        commands * 1000 / max(1, sum(admitted.values())),
    )


def measure(section: Section, quick: bool) -> None:
    seconds = 2.5 if quick else 5.0
    limits = [Limit(text) for text in ("100/second", "10000/second", "100000/second")]
    context = multiprocessing.get_context("spawn")
    results_by_mode: dict[str, list[FleetResult]] = {"direct": [], "leased": []}
    leased_at_twice: list[FleetResult] = []
    with running() as server, ProcessPoolExecutor(PROCESSES, mp_context=context) as pool:
        # A process that is busy for a second lets the pool start the next one.
        for future in [pool.submit(_sleep, 1.0) for _ in range(PROCESSES)]:
            future.result()
        for processes in (1, PROCESSES):
            for limit in limits[::2] if quick else limits:
                direct_rate: float | None = None
                for mode, share in _modes_and_shares(processes):
                    name = mode if share is None else f"{mode}, share 1/{processes}"
                    fleet = f"{processes} processes" if processes > 1 else "1 process"
                    label = f"{fleet}, {limit}: {name}"
                    log(f"consistency, fleet: {label}")
                    try:
                        results = []
                        for per_second in (None, 2 * limit.amount / processes):
                            options = ProcessOptions(
                                server.url, mode, limit, share, "fleet", per_second,
                                time.time() + 0.3, seconds,
                            )  # fmt: skip
                            results.append(_run_fleet(server, pool, processes, options))
                    except Exception as error:
                        section.add_failures({label: error_text(error)})
                        continue
                    without_pause, at_twice = results
                    results_by_mode.get(mode, []).extend(results)
                    if mode == "leased":
                        leased_at_twice.append(at_twice)
                    rate = without_pause.decisions_per_second
                    direct_rate = direct_rate or rate
                    section.add(
                        f"{label}: decisions per second, over direct's",
                        rate / direct_rate,
                        detail=f"{rate:,.0f}/s; without pause: {without_pause}; "
                        f"at twice the limit: {at_twice}",
                    )
    for mode, own in results_by_mode.items():
        section.add(
            f"the fullest window of all these runs, over the limit: {mode}",
            max(result.fullest for result in own),
            target=FULLEST_TARGET,
        )
    section.add(
        "the least mean at twice the limit, over the limit: leased",
        min(result.mean for result in leased_at_twice),
        target=MEAN_TARGET,
    )


def _modes_and_shares(processes: int) -> Sequence[tuple[str, float | None]]:
    without_share: list[tuple[str, float | None]] = [(mode, None) for mode in MODES]
    return without_share if processes == 1 else [*without_share, ("eventual", 1 / processes)]
