"""Waiters of many processes on one key: eight processes with 25 threads each wait in `acquire`, by
turns and without them.

script calls   those of the waiters, for each admission
order          rank correlation of the order in which they came and in which they were admitted
unused         permits that were free while somebody waited, as a part of the limit, on average
last           when the last one was admitted, after the first had come
"""

from __future__ import annotations

import itertools
import multiprocessing
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from benchmarks.measure import Quartiles, log, run_rounds
from benchmarks.report import Section
from benchmarks.resp import Socket
from benchmarks.server import Server, running
from benchmarks.waiters_process import Admission, Crowd, serve
from distwindow import Limit, Limiter

PROCESSES, WAITERS = 8, 25
LIMITS = ("20/second", "20/second strict")
ARRIVE_IN_S = 0.05
PREPARE_S, STARTED_BEFORE_S = 0.5, 0.01
"""How long the processes have for starting threads, and when they are done."""
STARTS = {"an empty window": False, "a window that was filled evenly": True}


class Fleet:
    """The processes. They live as long as the section, as starting them takes longer than a
    trial.
    """

    def __init__(self, server: Server) -> None:
        self.server = server
        context = multiprocessing.get_context("spawn")
        self.pipes, self.processes = [], []
        for _ in range(PROCESSES):
            here, there = context.Pipe()
            process = context.Process(target=serve, args=[server.url, there])
            process.start()
            self.pipes.append(here)
            self.processes.append(process)
        self.trials = 0

    def run(
        self, connection: Socket, *, text: str, by_turns: bool, filled: bool
    ) -> dict[str, float]:
        """Return the figures of one crowd."""
        self.trials += 1
        key = f"crowd:{self.trials}"
        limit, admitted_before = Limit(text), []
        for number, pipe in enumerate(self.pipes):
            seed = self.trials * 1000 + number
            pipe.send(Crowd(key, text, by_turns, ARRIVE_IN_S, WAITERS, seed))
        for pipe in self.pipes:
            pipe.recv()  # it is ready
        begin_at = time.time() + PREPARE_S + limit.per
        for pipe in self.pipes:
            pipe.send(begin_at)
        if filled:
            with Limiter(self.server.url, limit, timeout=5) as limiter:
                for number in range(limit.amount):
                    at = begin_at - limit.per * (1 - number / limit.amount)
                    time.sleep(max(0.0, at - time.time()))
                    admitted_before.append(limiter.acquire(key).now_ms)
        time.sleep(max(0.0, begin_at - STARTED_BEFORE_S - time.time()))
        before, _ = connection.script_calls()
        admissions = [admission for pipe in self.pipes for admission in pipe.recv()]
        calls = connection.script_calls()[0] - before
        came = min(admission.came_ms for admission in admissions)
        return {
            "calls": calls / len(admissions),
            "order": order(admissions),
            "unused": unused(admissions, admitted_before, limit),
            "last": (max(admission.admitted_ms for admission in admissions) - came) / 1000,
        }

    def close(self) -> None:
        for pipe in self.pipes:
            pipe.send(None)
        for process in self.processes:
            process.join(10)


def order(admissions: Sequence[Admission]) -> float:
    """Return the rank correlation of coming and being admitted."""
    by_arrival = sorted(range(len(admissions)), key=lambda i: admissions[i].came_ms)
    by_admission = sorted(range(len(admissions)), key=lambda i: admissions[i].admitted_ms)
    rank = {i: place for place, i in enumerate(by_admission)}
    n = len(admissions)
    squares = sum((place - rank[i]) ** 2 for place, i in enumerate(by_arrival))
    return 1 - 6 * squares / (n * (n * n - 1))


def unused(admissions: Sequence[Admission], before: Sequence[float], limit: Limit) -> float:
    """Return the mean part of the limit that was free while somebody waited, by ms."""
    passed: dict[int, int] = defaultdict(int)
    for at in [*before, *(admission.admitted_ms for admission in admissions)]:
        passed[int(at)] += 1
    begin = int(min(admission.came_ms for admission in admissions))
    end = int(max(admission.admitted_ms for admission in admissions))
    changes: dict[int, int] = defaultdict(int)
    for came_ms, admitted_ms in admissions:
        changes[int(came_ms)] += 1
        changes[int(admitted_ms)] -= 1
    by_bucket: dict[int, int] = defaultdict(int)
    for at, count in passed.items():
        if at < begin:
            by_bucket[at // limit.bucket_ms] += count
    waiting, free, waited = 0, 0, 0
    for at in range(begin, end):
        waiting += changes.get(at, 0)
        by_bucket[at // limit.bucket_ms] += passed.get(at, 0)
        if waiting > 0:
            newest = at // limit.bucket_ms
            used = sum(
                by_bucket.get(number, 0) for number in range(newest - limit.span + 1, newest + 1)
            )
            free += limit.amount - used
            waited += 1
    return free / waited / limit.amount if waited else 0.0


def run(quick: bool) -> Section:
    section = Section("waiters", "waiters: eight processes with 25 waiters each on one key")
    figures: dict[str, list[dict[str, float]]] = defaultdict(list)

    with running() as server, Socket(server.port) as connection:
        fleet = Fleet(server)
        try:

            def trial(name: str, options: dict[str, Any]) -> float:
                measured = fleet.run(connection, **options)
                figures[name].append(measured)
                return measured["calls"]

            contenders: dict[str, Callable[[], float]] = {}
            for text, start in itertools.product(LIMITS, STARTS):
                for way, by_turns in (("without turns", False), ("by turns", True)):
                    name = f"{text}, {start}: script calls for each admission, {way}"
                    options = {"text": text, "by_turns": by_turns, "filled": STARTS[start]}
                    contenders[name] = partial(trial, name, options)
            log("waiters: about 14 s for each trial")
            results = run_rounds("waiters", contenders, 1 if quick else 3)
        finally:
            fleet.close()
    for name in [name for name in contenders if name in results.values]:
        median = {
            what: Quartiles.of([each[what] for each in figures[name]]).median
            for what in ("order", "unused", "last")
        }
        section.add(
            name, results.stat(name),
            detail=f"order {median['order']:.2f}; {median['unused']:.0%} of the limit unused; "
            f"last after {median['last']:.2f} s",
        )  # fmt: skip
    section.add_failures(results.errors)
    return section
