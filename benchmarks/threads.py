"""Eight threads on one hot key: right verdicts per second."""

from __future__ import annotations

import threading
import time
from contextlib import ExitStack
from functools import partial

from benchmarks import finals, peers
from benchmarks.measure import rounds, said
from benchmarks.report import Section, Target
from benchmarks.server import Server, running

TARGET = Target(3.5, at_least=True)
THREADS = 8
KEY = "user:42"


def _trial(server: Server, peer: peers.Peer, quota: peers.Quota, seconds: float) -> float:
    """Right verdicts per second of all threads together."""
    server.flush()
    admitted = quota is peers.AMPLE
    with ExitStack() as stack:
        calls = [
            stack.enter_context(peer.open(server.url, quota))
            for _ in range(THREADS if peer.per_thread else 1)
        ]
        if not admitted:
            finals.use_up(calls[0](KEY) for _ in range(quota.amount * 2))
        return _race([calls[i % len(calls)] for i in range(THREADS)], admitted, seconds)


def _race(calls: list[peers.Acquire], admitted: bool, seconds: float) -> float:
    gate = threading.Barrier(len(calls) + 1)
    counts = [0] * len(calls)
    ended = [0.0] * len(calls)
    errors: list[str] = []
    end = [0.0]

    def work(number: int, acquire: peers.Acquire) -> None:
        clock, right = time.perf_counter, 0
        try:
            try:
                for _ in range(20):  # connections are made, scripts loaded
                    acquire(KEY)
            finally:
                gate.wait()
                gate.wait()
            until = end[0]
            while clock() < until:
                if bool(acquire(KEY)) is admitted:
                    right += 1
        except Exception as error:
            errors.append(said(error))
        counts[number], ended[number] = right, clock()

    workers = [threading.Thread(target=work, args=item, daemon=True) for item in enumerate(calls)]
    for worker in workers:
        worker.start()
    gate.wait()
    start = time.perf_counter()
    end[0] = start + seconds
    gate.wait()
    for worker in workers:
        worker.join()
    if errors:
        raise RuntimeError(errors[0])
    return sum(counts) / (max(ended) - start)


def run(quick: bool) -> Section:
    section = Section("threads", f"{THREADS} threads on one hot key, against each peer's best")
    heat, final, count = (0.1, 0.25, 3) if quick else (0.25, 0.5, 9)
    with running() as server:
        everybody = peers.sync_peers()
        heats = rounds(
            "threads, heat",
            {peer.name: partial(_trial, server, peer, peers.AMPLE, heat) for peer in everybody},
            1,
        )
        section.failed(heats.errors, "heat: ")
        chosen = [*peers.ours(), *finals.chosen(everybody, heats)]
        for label, quota, target in (
            ("admitted", peers.AMPLE, TARGET),
            ("refused", peers.SCARCE, None),
        ):
            results = rounds(
                f"threads, {label}, finals",
                {peer.name: partial(_trial, server, peer, quota, final) for peer in chosen},
                count,
            )
            finals.report(section, label, chosen, results, target)
    return section
