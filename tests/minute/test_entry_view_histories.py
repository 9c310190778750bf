"""Minute views hold what entries did, each once, whatever is lost or sent twice on the way."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from typing import NamedTuple

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from distwindow.local.base import LocalStrategy
from distwindow.local.direct import Direct
from distwindow.local.eventual import Eventual
from distwindow.local.leased import Leased
from distwindow.minute.commands import ViewFlush, ViewRead, views_name
from distwindow.minute.view import ALL_ORIGINS
from distwindow.ring.stats import Bucket
from distwindow.runtime.command_cache import CommandCache
from distwindow.runtime.options import OTHER_ORIGINS, Options
from distwindow.runtime.strategy import Strategy
from distwindow.stores.memory import MemoryStore
from distwindow.testing.histories import FEATURES, ViewStep, view_commands_of
from tests.simulation.process import LocalClock, OperationRun, Process, SimulatedStore
from tests.stores.test_stores_agree import drawn_histories

START = 1_700_000_000_000
ORIGINS = ("", "a", "b", "c", "d")
MAX_ORIGINS = 2
MODES: list[Callable[[CommandCache, LocalClock], Strategy]] = [
    lambda commands, clock: Direct(commands, clock, Options(max_local_keys=10)),
    lambda commands, clock: Leased(commands, clock, Options(max_local_keys=10)),
    lambda commands, clock: Eventual(commands, clock, Options(max_local_keys=10)),
]

# What happens: (process 0 or 1, what, a number that says more about it).
moves = st.lists(
    st.tuples(
        st.integers(0, 1),
        st.sampled_from(["pass", "pass", "block", "end", "fail", "flush", "execute", "deliver",
                         "lose", "time"]),
        st.integers(0, 999),
    ),
    max_size=80,
)  # fmt: skip


class Event(NamedTuple):
    """An `EntryEvent` by names."""

    key: str
    at_ms: int
    origin: str
    passed: int = 0
    blocked: int = 0
    success: int = 0
    error: int = 0
    rt_ms: int = 0


class Ledger:
    """What entries did, by second: the view of all, and the sums over all origins."""

    def __init__(self) -> None:
        self.seconds: dict[int, list[int]] = defaultdict(lambda: [0, 0, 0, 0, 0])
        self.least: dict[int, int] = {}
        self.named: dict[int, list[int]] = defaultdict(lambda: [0, 0, 0, 0, 0])

    def write(self, event: Event) -> None:
        start = event.at_ms // 1000 * 1000
        counts = (event.passed, event.blocked, event.success, event.error, event.rt_ms)
        for book in [self.seconds, *([self.named] if event.origin else [])]:
            book[start] = [a + b for a, b in zip(book[start], counts, strict=True)]
        if event.success + event.error:
            self.least[start] = min(event.rt_ms, self.least.get(start, event.rt_ms))


def counters(bucket: Bucket) -> list[int]:
    return [bucket.passed, bucket.blocked, bucket.success, bucket.error, bucket.rt_sum_ms]


@settings(deadline=None, suppress_health_check=list(HealthCheck), print_blob=True, max_examples=150)
@given(moves=moves, mode=st.sampled_from(MODES))
def test_the_views_hold_what_entries_did_each_once(
    moves: list[tuple[int, str, int]], mode: Callable[[CommandCache, LocalClock], Strategy]
) -> None:
    store = SimulatedStore(START)
    processes = [Process(store, "100/second", mode, origin=at) for at in (50.0, 1000.0)]
    views = []
    for process in processes:
        assert isinstance(process.strategy, LocalStrategy)
        views.append(
            process.strategy.add_views(
                Options(prefix="fleet", max_origins=MAX_ORIGINS, max_local_keys=10)
            )
        )
    ledger = Ledger()
    under_way: list[list[OperationRun]] = [[], []]

    def count(at: int, event: Event) -> None:
        views[at].count(event)
        ledger.write(event)

    for at, what, number in moves:
        origin, runs = ORIGINS[number % 5], under_way[at]
        now, rt_ms = store.now_ms(), number % 7
        if what in ("pass", "block"):
            cost = number % 3 + 1
            passed, blocked = (cost, 0) if what == "pass" else (0, cost)
            count(at, Event("k", now, origin, passed=passed, blocked=blocked))
        elif what in ("end", "fail"):
            success = int(what == "end")
            event = Event("k", now, origin, success=success, error=1 - success, rt_ms=rt_ms)
            count(at, event)
        elif what == "flush":
            runs.append(processes[at].flush(everything=number % 2 == 0))
        elif what == "time":
            store.ms += number
        elif runs:
            run = runs[number % len(runs)]
            {"execute": run.execute, "deliver": run.deliver, "lose": run.lose_reply}[what]()
    for at, process in enumerate(processes):
        for run in under_way[at]:
            while not run.done:
                run.deliver()
        for _ in range(2):
            last = process.flush(everything=True)
            while not last.done:
                last.deliver()
        assert views[at].unacknowledged() == views[at].dropped == 0

    found = store.memory.execute(ViewRead((), name=views_name("fleet", "k"))).views
    window = {start: counts for start, counts in ledger.seconds.items() if any(counts)}
    everything = {bucket.start: bucket for bucket in found.pop(ALL_ORIGINS, ())}
    assert {start: counters(bucket) for start, bucket in everything.items() if any(
        counters(bucket))} == window  # fmt: skip
    assert {s: b.rt_min_ms for s, b in everything.items() if b.rt_min_ms is not None} == (
        ledger.least
    )
    assert len(found.keys() - {OTHER_ORIGINS}) <= MAX_ORIGINS
    sums: dict[int, list[int]] = {}
    for buckets in found.values():
        for bucket in buckets:
            before = sums.get(bucket.start, [0] * 5)
            sums[bucket.start] = [a + b for a, b in zip(before, counters(bucket), strict=True)]
    assert {s: c for s, c in sums.items() if any(c)} == {
        s: c for s, c in ledger.named.items() if any(c)
    }


@settings(deadline=None, suppress_health_check=list(HealthCheck), max_examples=100)
@given(history=drawn_histories(FEATURES["minute views"], 30))
def test_the_view_of_all_entries_is_the_sum_of_all_views(history: list[ViewStep]) -> None:
    """Of what has an origin; entries without one are in the view of all alone. Time goes on here: a
    view drops its oldest second when it begins another, so right after the clock was set back, one
    view may show a second more than another.
    """
    history = [step._replace(elapsed_ms=abs(step.elapsed_ms)) for step in history]
    store = MemoryStore().execute
    without_origin = 0
    for command in view_commands_of(history, "k"):
        reply = store(command)
        if isinstance(command, ViewFlush):
            without_origin += any(bs for origin, bs in command.counts if origin == ALL_ORIGINS)
            continue
        views = dict(reply.views)
        total = {b.start: b for b in views.pop(ALL_ORIGINS, ())}
        for start in {b.start for buckets in views.values() for b in buckets}:
            summed = sum(b.passed for bs in views.values() for b in bs if b.start == start)
            assert summed <= total[start].passed
            if not without_origin:
                assert summed == total[start].passed
