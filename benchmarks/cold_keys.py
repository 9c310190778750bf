"""Keys that are new: the client's part of a first call, tasks over 10,000 new keys, and calls that
are spread over 100,000 keys, evenly and by Zipf's law. Everything is admitted.

The client's time is the processor time of this process, which other load on the machine hardly
changes. The server's is that of the scripts, from `INFO commandstats`.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import random
import statistics
import time
from collections.abc import Callable, Coroutine, Iterator, Sequence
from contextlib import AsyncExitStack, ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from itertools import accumulate
from typing import Any, TypeAlias

from benchmarks import peers, preselection
from benchmarks.measure import Quartiles, Results, error_text, log, run_rounds
from benchmarks.report import Section, Target
from benchmarks.resp import Socket
from benchmarks.server import Server, last_core, pinned, running

FIRST_CALL = Target(8)
LEASED_OVER_DIRECT = Target(1, at_least=True)
TASKS_OVER_PEERS = Target(5, at_least=True)

TASKS = 200
CALLS_PER_KEY = 3
"""Of the new keys, besides the row of `TWICE`."""
TWICE = 2
KEYS_PER_TRIAL = 500
"""Keys in one trial of first calls."""

POPULATION = 100_000
ZIPF_EXPONENT = 1.1
SETTLE_S = 0.6
"""Seconds after which the worker of leased mode has sent what a trial has left to it."""

Peer: TypeAlias = "peers.Peer | peers.AsyncPeer"
Call = Callable[[Sequence[str]], object]
"""Calls a limiter on these keys: one after the other, or with all tasks."""


@dataclass(frozen=True)
class Size:
    """How much is measured."""

    rounds: int
    first_call_rounds: int
    new_keys: int
    calls: int
    """Calls of one trial on a population of keys; tasks make five times as many."""


QUICK, FULL = Size(3, 21, 3_000, 1_500), Size(9, 61, 10_000, 10_000)


@dataclass
class Opened:
    """Limiters that stay open through all rounds."""

    calls: dict[str, Call] = field(default_factory=dict)
    errors: dict[str, str] = field(default_factory=dict)


class Session:
    """The server, the event loop of the asynchronous limiters, and what is to be closed."""

    def __init__(self, server: Server) -> None:
        self.server = server
        self.loop = asyncio.new_event_loop()
        self.trials = itertools.count()
        self._stack, self._async_stack = ExitStack(), AsyncExitStack()

    def close(self) -> None:
        self._stack.close()
        self.loop.run_until_complete(self._async_stack.aclose())
        self.loop.close()

    def open(self, limiters: Sequence[Peer]) -> Opened:
        """Open each limiter and call it, so that it is connected."""
        opened = Opened()
        for peer in limiters:
            try:
                call = self._open(peer)
                call([f"connect:{number}" for number in range(TASKS)])
                opened.calls[peer.name] = call
            except Exception as error:
                opened.errors[peer.name] = error_text(error)
                log(f"cold: {peer.name} failed: {opened.errors[peer.name]}")
        return opened

    def _open(self, peer: Peer) -> Call:
        if isinstance(peer, peers.Peer):
            acquire = self._stack.enter_context(peer.open(self.server.url, peers.HIGH_QUOTA))
            return lambda keys: peers.check_decisions([acquire(key) for key in keys])
        entered = self._async_stack.enter_async_context(
            peer.open(self.server.url, peers.HIGH_QUOTA)
        )
        acquire_async = self._run(entered)
        return lambda keys: self._run(_call_in_tasks(acquire_async, keys))

    def _run(self, work: Coroutine[Any, Any, Any]) -> Any:
        return self.loop.run_until_complete(work)

    def best_peers(self, candidates: Sequence[preselection.AnyPeer]) -> list[preselection.AnyPeer]:
        """Return the settings of each library that are the fastest on new keys."""
        results = Results()
        for library in peers.LIBRARIES:  # one after the other: each opens many connections
            session = Session(self.server)
            try:
                opened = session.open([peer for peer in candidates if peer.library == library])
                trials = {
                    name: partial(calls_per_second, call, self.new_keys, 400, CALLS_PER_KEY)
                    for name, call in opened.calls.items()
                }
                results.values |= run_rounds(f"cold, {library}", trials, 1).values
            finally:
                session.close()
        return preselection.best_settings(candidates, results)

    def new_keys(self, count: int, times: int) -> list[str]:
        """Return keys that nobody has called, in as many parts as there are tasks, and each key
        so many times in its part.
        """
        trial = next(self.trials)
        names = [f"new:{trial}:{number}" for number in range(count)]
        parts = (names[first::TASKS] for first in range(TASKS))
        return [key for part in parts for _ in range(times) for key in part]


async def _call_in_tasks(acquire: peers.AsyncAcquire, keys: Sequence[str]) -> None:
    share = -(-len(keys) // TASKS)

    async def work(own: Sequence[str]) -> None:
        for key in own:
            if not await acquire(key):
                raise RuntimeError(f"{key} was refused")

    parts = (keys[first : first + share] for first in range(0, len(keys), share))
    await asyncio.wait_for(asyncio.gather(*map(work, parts)), timeout=60)


def calls_per_second(
    call: Call, new_keys: Callable[[int, int], list[str]], count: int, times: int
) -> float:
    keys = new_keys(count, times)
    start = time.perf_counter()
    call(keys)
    return len(keys) / (time.perf_counter() - start)


# -- the first call on a key --------------------------------------------------------------------


def measure_first_calls(section: Section, session: Session, size: Size) -> None:
    """The client's µs of a call on a new key, less those of a call on a known one."""
    opened = session.open([*peers.limiters(), *peers.leased_limiters()])
    section.add_failures(opened.errors, "first call: ")
    known = ["connect:0"] * KEYS_PER_TRIAL
    beyond: dict[str, list[float]] = {name: [] for name in opened.calls}
    of_known: list[float] = []
    for _ in range(size.first_call_rounds):
        of_known.append(_client_us(opened.calls[peers.DISTWINDOW], known))
        for name, call in random.sample(list(opened.calls.items()), len(opened.calls)):
            trial = next(session.trials)
            new = [f"first:{trial}:{number}" for number in range(KEYS_PER_TRIAL)]
            beyond[name].append(_client_us(call, new) - of_known[-1])
    for name, values in beyond.items():
        section.add(
            f"client time of a first call beyond a known key's: {name}",
            Quartiles.of(values),
            target=FIRST_CALL,
            unit="µs",
            detail=f"a call on a known key, not leased: {statistics.median(of_known):.1f} µs",
        )


def _client_us(call: Call, keys: Sequence[str]) -> float:
    start = time.thread_time_ns()
    call(keys)
    return (time.thread_time_ns() - start) / len(keys) / 1000


# -- tasks over new keys --------------------------------------------------------------------------


def measure_new_keys(
    section: Section, session: Session, size: Size, best: Sequence[Peer], times: int
) -> None:
    """Calls per second of 200 tasks on new keys, each of which is called a few times."""
    label = f"{TASKS} tasks, {size.new_keys:,} {'keys twice' if times == TWICE else 'new keys'}"
    contenders: list[Any] = [*peers.async_limiters(), *peers.async_leased_limiters(), *best]
    opened = session.open(contenders)
    trials = {
        name: partial(calls_per_second, call, session.new_keys, size.new_keys, times)
        for name, call in opened.calls.items()
    }
    results = run_rounds(f"cold, {label}", trials, size.rounds)
    results.errors |= opened.errors
    own = [one for one in contenders if one.name != peers.LEASED]
    preselection.report(section, label, own, results, TASKS_OVER_PEERS)
    if {peers.LEASED, peers.DISTWINDOW} <= set(results.values):
        ratio = results.ratio(peers.LEASED, peers.DISTWINDOW)
        detail = f"{results.median(peers.LEASED):,.0f}/s leased"
        target = LEASED_OVER_DIRECT if times == CALLS_PER_KEY else None
        section.add(f"{label}: leased over direct", ratio, target=target, detail=detail)


# -- a population of keys -------------------------------------------------------------------------


@dataclass
class Costs:
    """What the admissions of one contender cost, one entry for each trial."""

    commands: list[float] = field(default_factory=list)
    server_us: list[float] = field(default_factory=list)
    client_us: list[float] = field(default_factory=list)

    def __str__(self) -> str:
        commands, server, client = map(
            statistics.median, (self.commands, self.server_us, self.client_us)
        )
        return f"{commands:.2f} commands, server {server:.1f} µs, client {client:.1f} µs"


def measure_populations(
    section: Section, session: Session, size: Size, best: Sequence[Peer], best_async: Sequence[Peer]
) -> None:
    """Calls over 100,000 keys: rates, and what one admission costs."""
    zipf = list(accumulate(rank**-ZIPF_EXPONENT for rank in range(1, POPULATION + 1)))
    own: list[Peer] = [*peers.limiters(), *peers.leased_limiters()]
    own_async: list[Peer] = [*peers.async_limiters(), *peers.async_leased_limiters()]
    for spread, weights in (("Zipf", zipf), ("uniform", None)):
        for how, limiters, times in (
            ("one thread", [*own, *best], 1),
            (f"{TASKS} tasks", [*own_async, *best_async], 5),
        ):
            label = f"{spread} over {POPULATION:,} keys, {how}"
            opened = session.open(limiters)
            costs = {name: Costs() for name in opened.calls}
            trials = {
                name: partial(
                    _spread,
                    session,
                    call,
                    weights,
                    size.calls * times,
                    costs[name],
                    SETTLE_S if name == peers.LEASED else 0.0,
                )
                for name, call in opened.calls.items()
            }
            results = run_rounds(f"cold, {label}", trials, size.rounds)
            section.add_failures(opened.errors | results.errors, f"{label}: ")
            _report_population(section, label, results, costs, [peer.name for peer in limiters[2:]])


def _spread(
    session: Session,
    call: Call,
    weights: list[float] | None,
    calls: int,
    costs: Costs,
    settle_s: float,
) -> float:
    """Make calls on a population that is new in each trial; return calls per second."""
    trial = next(session.trials)
    ranks = random.choices(range(POPULATION), cum_weights=weights, k=calls)
    keys = [f"spread:{trial}:{rank}" for rank in ranks]
    with Socket(session.server.port) as connection:
        connection.call("CONFIG", "RESETSTAT")
        start, began_cpu = time.perf_counter(), time.process_time()
        call(keys)
        seconds = time.perf_counter() - start
        session.loop.run_until_complete(asyncio.sleep(settle_s))
        client_s = time.process_time() - began_cpu
        commands, server_us = connection.script_calls()
    costs.commands.append(commands / calls)
    costs.server_us.append(server_us / calls)
    costs.client_us.append(client_s * 1e6 / calls)
    return calls / seconds


def _report_population(
    section: Section, label: str, results: Results, costs: dict[str, Costs], others: list[str]
) -> None:
    best = results.best(others)
    for name in (peers.DISTWINDOW, peers.LEASED):
        if name in results.values:
            ratio = None if best is None else results.ratio(name, best)
            detail = f"{results.median(name):,.0f}/s; {costs[name]}"
            section.add(f"{label}: {name} over the best peer", ratio, detail=detail)
    if best is not None:
        detail = f"{results.median(best):,.0f}/s; {costs[best]}"
        section.add(f"{label}: {best}", detail=detail)


# -------------------------------------------------------------------------------------------------


@contextmanager
def _session() -> Iterator[Session]:
    """Client and server on a core each, where there are two."""
    core = last_core()
    cores = os.sched_getaffinity(0) if core is not None else set()
    with running(core) as server, pinned(min(cores) if len(cores) > 1 else None):
        session = Session(server)
        try:
            yield session
        finally:
            session.close()


def run(quick: bool) -> Section:
    section = Section("cold", "new keys: the client's part, and rates against each peer's best")
    size = QUICK if quick else FULL
    blocking = peers.blocking_peers(pools=(peers.SHARED,), clients=("redis-py",))
    with _session() as session:
        best = session.best_peers(blocking)
        best_async = session.best_peers(peers.async_peers())
    for measure in (
        measure_first_calls,
        partial(measure_new_keys, best=best_async, times=TWICE),
        partial(measure_new_keys, best=best_async, times=CALLS_PER_KEY),
        partial(measure_populations, best=best[:2], best_async=best_async[:2]),
    ):
        with _session() as session:
            measure(section, session, size)
    return section
