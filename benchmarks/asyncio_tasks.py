"""200 asyncio tasks, on one hot key and over 10,000 keys: correct decisions per second.

All run on asyncio's event loop. distwindow on uvloop is compared with distwindow on asyncio.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass
from functools import partial

from benchmarks import peers, preselection
from benchmarks.measure import Results, error_text, log, run_rounds
from benchmarks.report import Section, Target
from benchmarks.server import Server, running

TASKS = 200
HOT = ["user:42"]
MANY = [f"user:{number}" for number in range(10_000)]


@dataclass(frozen=True)
class Workload:
    """The keys of the calls, their quota, and the target of the row."""

    label: str
    keys: list[str]
    quota: peers.Quota
    target: Target | None


WORKLOADS = (
    Workload("one hot key", HOT, peers.HIGH_QUOTA, Target(5, at_least=True)),
    Workload("10,000 keys", MANY, peers.HIGH_QUOTA, Target(5, at_least=True)),
    Workload("one hot key, refused", HOT, peers.LOW_QUOTA, None),
)


async def _decisions_per_second(
    acquire: peers.AsyncAcquire, keys: Sequence[str], admitted: bool, seconds: float
) -> float:
    """Return the correct decisions per second of all tasks together, which share the keys."""
    clock, correct = time.perf_counter, 0
    share = max(1, len(keys) // TASKS)

    async def work(own: Sequence[str]) -> None:
        nonlocal correct
        while True:
            for key in own:
                if clock() >= end:
                    return
                if bool(await acquire(key)) is admitted:
                    correct += 1

    start = clock()
    end = start + seconds
    parts = [keys[i * share % len(keys) :][:share] for i in range(TASKS)]
    tasks = [asyncio.ensure_future(work(part)) for part in parts]
    try:
        await asyncio.wait_for(asyncio.gather(*tasks), timeout=60)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    return correct / (clock() - start)


async def _warm(acquire: peers.AsyncAcquire, workload: Workload) -> None:
    """Create every key and open every connection; use up a low quota."""
    if workload.quota is peers.LOW_QUOTA:
        preselection.use_up(
            [await acquire(workload.keys[0]) for _ in range(workload.quota.amount * 2)]
        )
        return
    for at in range(0, len(workload.keys), TASKS):
        await asyncio.gather(*map(acquire, workload.keys[at : at + TASKS]))
    await asyncio.gather(*(acquire(workload.keys[0]) for _ in range(TASKS)))


class _LoopRunner:
    """One event loop for all rounds of a workload, in which every contender stays open."""

    def __init__(
        self,
        server: Server,
        workload: Workload,
        new_loop: Callable[[], asyncio.AbstractEventLoop] = asyncio.new_event_loop,
    ) -> None:
        self.server, self.workload = server, workload
        self.loop = new_loop()
        self.stack = AsyncExitStack()

    def run(
        self, section: str, limiters: Sequence[peers.AsyncPeer], seconds: float, count: int
    ) -> Results:
        self.server.flush()
        try:
            contenders, errors = self.contenders(section, limiters, seconds)
            results = run_rounds(section, contenders, count)
            results.errors |= errors
            return results
        finally:
            self.close()

    def contenders(
        self, section: str, limiters: Sequence[peers.AsyncPeer], seconds: float
    ) -> tuple[dict[str, Callable[[], float]], dict[str, str]]:
        """Return a trial for each limiter that can be opened, and the errors of the others."""
        opened, errors = self.loop.run_until_complete(self._open(section, limiters))
        return {name: partial(self._trial, call, seconds) for name, call in opened.items()}, errors

    def close(self) -> None:
        with suppress(Exception):
            self.loop.run_until_complete(self.stack.aclose())
        self.loop.run_until_complete(self.loop.shutdown_asyncgens())
        self.loop.close()

    def _trial(self, acquire: peers.AsyncAcquire, seconds: float) -> float:
        admitted = self.workload.quota is peers.HIGH_QUOTA
        return self.loop.run_until_complete(
            _decisions_per_second(acquire, self.workload.keys, admitted, seconds)
        )

    async def _open(
        self, section: str, limiters: Sequence[peers.AsyncPeer]
    ) -> tuple[dict[str, peers.AsyncAcquire], dict[str, str]]:
        opened: dict[str, peers.AsyncAcquire] = {}
        errors: dict[str, str] = {}
        for peer in limiters:
            try:
                acquire = await self.stack.enter_async_context(
                    peer.open(self.server.url, self.workload.quota)
                )
                await _warm(acquire, self.workload)
                opened[peer.name] = acquire
            except Exception as error:
                errors[peer.name] = error_text(error)
                log(f"{section}: {peer.name} failed: {errors[peer.name]}")
        return opened, errors


def _on_uvloop(
    section: Section, server: Server, workload: Workload, seconds: float, count: int
) -> None:
    """Measure distwindow on uvloop over distwindow on asyncio: the same workload, by rounds."""
    import uvloop

    server.flush()
    loops = {
        "asyncio": _LoopRunner(server, workload),
        "uvloop": _LoopRunner(server, workload, uvloop.new_event_loop),
    }
    trials: dict[str, Callable[[], float]] = {}
    try:
        for name, loop in loops.items():
            opened, errors = loop.contenders(name, peers.async_limiters(), seconds)
            section.add_failures(errors, f"{workload.label}, on {name}: ")
            if peers.DISTWINDOW in opened:
                trials[name] = opened[peers.DISTWINDOW]
        results = run_rounds(f"asyncio, {workload.label}, event loops", trials, count)
    finally:
        for loop in loops.values():
            loop.close()
    section.add_failures(results.errors, f"{workload.label}, on ")
    if len(results.values) == len(loops):
        detail = ", ".join(f"{results.median(name):,.0f}/s on {name}" for name in loops)
        ratio = results.ratio("uvloop", "asyncio")
        section.add(f"{workload.label}: on uvloop, over asyncio", ratio, detail=detail)


def run(quick: bool) -> Section:
    section = Section("asyncio", f"{TASKS} asyncio tasks, against each peer's best")
    preselection_s, comparison_s, count = (0.1, 0.25, 3) if quick else (0.25, 0.5, 9)
    with running() as server:
        candidates = peers.async_peers()
        preselected = Results()
        for library in peers.LIBRARIES:  # in turn, as each opens hundreds of connections
            own = [peer for peer in candidates if peer.library == library]
            part = _LoopRunner(server, WORKLOADS[0]).run(
                f"asyncio, preselection of {library}", own, preselection_s, 1
            )
            preselected.values |= part.values
            preselected.errors |= part.errors
        section.add_failures(preselected.errors, "preselection: ")
        contenders = [*peers.async_limiters(), *preselection.best_settings(candidates, preselected)]
        for workload in WORKLOADS:
            results = _LoopRunner(server, workload).run(
                f"asyncio, {workload.label}, comparison", contenders, comparison_s, count
            )
            preselection.report(section, workload.label, contenders, results, workload.target)
            _on_uvloop(section, server, workload, comparison_s, count)
    return section
