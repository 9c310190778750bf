"""Eight threads on one hot key: correct decisions per second.

The target is about the best honest peer: not a fixed window, which lets up to twice the limit
through, and without the calls that were refused wrongly.
"""

from __future__ import annotations

import threading
import time
from contextlib import ExitStack
from functools import partial

from benchmarks import peers, preselection
from benchmarks.measure import error_text, run_rounds
from benchmarks.report import Section, Target
from benchmarks.server import Server, running

TARGET = Target(5, at_least=True)
THREADS = 8
KEY = "user:42"


def _trial(server: Server, peer: peers.Peer, quota: peers.Quota, seconds: float) -> float:
    """Return the correct decisions per second of all threads together."""
    server.flush()
    admitted = quota is peers.HIGH_QUOTA
    with ExitStack() as stack:
        calls = [
            stack.enter_context(peer.open(server.url, quota))
            for _ in range(THREADS if peer.per_thread else 1)
        ]
        if not admitted:
            preselection.use_up(calls[0](KEY) for _ in range(quota.amount * 2))
        return decisions_per_second(
            [calls[i % len(calls)] for i in range(THREADS)], admitted, seconds
        )


def decisions_per_second(calls: list[peers.Acquire], admitted: bool, seconds: float) -> float:
    """Return the correct decisions per second of threads that each have one of `calls`."""
    barrier = threading.Barrier(len(calls) + 1)
    counts = [0] * len(calls)
    ended = [0.0] * len(calls)
    errors: list[str] = []
    end = [0.0]

    def work(number: int, acquire: peers.Acquire) -> None:
        clock, correct = time.perf_counter, 0
        try:
            try:
                for _ in range(20):  # makes connections, loads scripts
                    acquire(KEY)
            finally:
                barrier.wait()
                barrier.wait()
            end_at = end[0]
            while clock() < end_at:
                if bool(acquire(KEY)) is admitted:
                    correct += 1
        except Exception as error:
            errors.append(error_text(error))
        counts[number], ended[number] = correct, clock()

    workers = [threading.Thread(target=work, args=item, daemon=True) for item in enumerate(calls)]
    for worker in workers:
        worker.start()
    barrier.wait()
    start = time.perf_counter()
    end[0] = start + seconds
    barrier.wait()
    for worker in workers:
        worker.join()
    if errors:
        raise RuntimeError(errors[0])
    return sum(counts) / (max(ended) - start)


def run(quick: bool) -> Section:
    section = Section("threads", f"{THREADS} threads on one hot key, against each peer's best")
    preselection_s, comparison_s, count = (0.1, 0.25, 3) if quick else (0.25, 0.5, 9)
    with running() as server:
        candidates = peers.blocking_peers()
        preselected = run_rounds(
            "threads, preselection",
            {
                peer.name: partial(_trial, server, peer, peers.HIGH_QUOTA, preselection_s)
                for peer in candidates
            },
            1,
        )
        section.add_failures(preselected.errors, "preselection: ")
        honest = [peer for peer in candidates if "fixed" not in peer.name]
        best = [
            *preselection.best_settings(candidates, preselected),
            *preselection.best_settings(honest, preselected),
        ]
        contenders = [*peers.limiters(), *dict.fromkeys(best)]
        for label, quota, target in (
            ("admitted", peers.HIGH_QUOTA, TARGET),
            ("refused", peers.LOW_QUOTA, None),
        ):
            results = run_rounds(
                f"threads, {label}, comparison",
                {
                    peer.name: partial(_trial, server, peer, quota, comparison_s)
                    for peer in contenders
                },
                count,
            )
            name = results.best([peer.name for peer in honest])
            if name is not None and peers.DISTWINDOW in results.values:
                section.add(
                    f"{label}: over the best honest peer",
                    results.ratio(peers.DISTWINDOW, name),
                    target=target,
                    detail=f"{results.median(name):,.0f}/s {name}",
                )
            preselection.report(section, label, contenders, results, None)
    return section
