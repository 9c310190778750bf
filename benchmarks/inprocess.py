"""memory:// in one thread: ns per call, over the least that any such limiter has to do."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial

from benchmarks import peers
from benchmarks.measure import error_text, log, run_rounds
from benchmarks.report import Section, Target

FLOOR = "floor: monotonic + lock + dict increment"
KEY = "user:42"
KEYS = [f"user:{number}" for number in range(10_000)]


@dataclass(frozen=True)
class Situation:
    """What the timed calls are. Each contender is opened once for each situation."""

    label: str
    quota: peers.Quota
    keys: list[str]
    admitted: bool
    target: Target

    def prepare(self, acquire: peers.Acquire) -> None:
        """Bring a limiter into this situation, and check that it is."""
        for _ in range(2):  # the first call of a key makes its window
            for key in self.keys:
                acquire(key)
        if not self.admitted:
            for _ in range(2 * self.quota.amount):
                acquire(KEY)
        peers.check_decisions((acquire(KEY) for _ in range(1_000)), self.admitted)

    def row(self, name: str) -> str:
        return f"{self.label}{name}"


HOUR_QUOTA = peers.Quota(peers.HIGH_QUOTA.amount, 3600)
"""Between two trials pass some seconds. With windows of a minute, some trials would open a bucket
with each call, and others with none.
"""
SITUATIONS = (
    Situation("", peers.HIGH_QUOTA, [KEY], True, Target(4)),
    Situation("refused: ", peers.LOW_QUOTA, [KEY], False, Target(3)),
    Situation("10,000 keys: ", HOUR_QUOTA, KEYS, True, Target(3.5)),
)


@contextmanager
def open_floor() -> Iterator[peers.Acquire]:
    lock, counts, monotonic = threading.Lock(), {KEY: 0}, time.monotonic

    def acquire(key: str) -> float:
        now = monotonic()
        with lock:
            counts[key] += 1
        return now

    yield acquire


def _trial(acquire: peers.Acquire, keys: list[str], calls: int) -> float:
    """Return ns per call."""
    called = keys * (calls // len(keys))
    start = time.perf_counter_ns()
    for key in called:
        acquire(key)
    return (time.perf_counter_ns() - start) / len(called)


def run(quick: bool) -> Section:
    section = Section("inprocess", "memory://, one thread")
    count = 11 if quick else 25
    errors: dict[str, str] = {}
    with ExitStack() as stack:
        trials = {FLOOR: partial(_trial, stack.enter_context(open_floor()), [KEY], len(KEYS))}
        contenders = [
            *[p for p in (*peers.limiters(), *peers.more_limiters()) if "redis" not in p.name],
            *peers.memory_peers(),
        ]
        for situation in SITUATIONS:
            for peer in contenders:
                name = situation.row(peer.name)
                try:
                    acquire = stack.enter_context(peer.open("memory://", situation.quota))
                    situation.prepare(acquire)
                    trials[name] = partial(_trial, acquire, situation.keys, len(KEYS))
                except Exception as error:
                    errors[name] = error_text(error)
                    log(f"inprocess: {name} failed: {errors[name]}")
        results = run_rounds("inprocess", trials, count)
    section.add(FLOOR, 1.0, detail=f"{results.median(FLOOR):,.0f} ns per call")
    for situation in SITUATIONS:
        names = {situation.row(peer.name) for peer in contenders} & results.values.keys()
        for name in sorted(names, key=results.median):
            section.add(
                name,
                results.ratio(name, FLOOR),
                target=situation.target if name == situation.row(peers.DISTWINDOW) else None,
                detail=f"{results.median(name):,.0f} ns per call",
            )
    section.add_failures({**errors, **results.errors})
    return section
