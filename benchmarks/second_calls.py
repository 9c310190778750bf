"""What the calls beside `try_acquire` cost the client: `acquire`, entries, slots, breakers, a
cluster, and many tasks beside rate-limiter-flexible on Node.

The client's time is the processor time of its process, with all its threads. Client and servers
share one core. The ratio of the same calls with a core for each is a detail: there the kernel takes
several times the client's own part to wake the other core, which hides how the calls differ.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AsyncExitStack, ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks import peers
from benchmarks.measure import Answering, Results, Trial, error_text, log, run_rounds
from benchmarks.peers import libraries
from benchmarks.report import Section, Target
from benchmarks.server import Server, last_core, pinned, running
from distwindow import AsyncLimiter, CircuitBreaker, Concurrency, ErrorRatio, Limiter
from tests.servers import Cluster

Loop = Callable[[int], None]
"""Makes that many calls."""

KEY = "user:42"
SOME = [f"user:{number}" for number in range(100)]
MANY = [f"user:{number}" for number in range(10_000)]
LIMIT = peers.HIGH_QUOTA.limit()
TASKS = 200
SETTLE_S = 0.3
"""Seconds before a trial in which background threads send what earlier trials have left to them."""

CALLS_OF_ONE_KEY = 50
"""Calls of a task on a hot key between two looks at the clock."""

NODE_PROGRAM = Path(__file__).parent / "peers" / "rate_limiter_flexible.mjs"
NODE_PACKAGES = "npm install --no-package-lock --prefix benchmarks/peers"


# -- calls of one thread --------------------------------------------------------------------------


def calls(function: Callable[..., object], *arguments: object) -> Loop:
    """Return a loop of plain calls."""

    def loop(count: int) -> None:
        for _ in range(count):
            function(*arguments)

    return loop


def calls_on(keys: Sequence[str], function: Callable[[str], object]) -> Loop:
    """Return a loop of calls on one key after the other."""

    def loop(count: int) -> None:
        for number in range(count):
            function(keys[number % len(keys)])

    return loop


def blocks(block: Callable[..., Any], *arguments: object) -> Loop:
    """Return a loop of empty `with` blocks."""

    def loop(count: int) -> None:
        for _ in range(count):
            with block(*arguments):
                pass

    return loop


def cpu_us(loop: Loop, seconds: float) -> float:
    """Return the µs of processor time of one call, after a quarter as many that are not timed."""
    time.sleep(SETTLE_S)
    _repeat(loop, seconds / 4)
    began = time.process_time()
    made = _repeat(loop, seconds)
    return (time.process_time() - began) * 1e6 / made


def _repeat(loop: Loop, seconds: float) -> int:
    end, made = time.perf_counter() + seconds, 0
    while time.perf_counter() < end:
        loop(100)
        made += 100
    return made


def _trials(loops: dict[str, Loop], seconds: float) -> dict[str, Trial]:
    return {name: partial(cpu_us, loop, seconds) for name, loop in loops.items()}


def limiter_trials(server: Server, stack: ExitStack, seconds: float) -> dict[str, Trial]:
    """Return calls of a limiter with each `consistency`, of a concurrency limit and of a lock."""
    loops: dict[str, Loop] = {}
    for mode in ("direct", "leased"):
        limiter = stack.enter_context(
            Limiter(server.url, LIMIT, prefix=mode, consistency=mode, timeout=peers.TIMEOUT_S)
        )
        loops[f"{mode} try_acquire"] = calls(limiter.try_acquire, "try")
        loops[f"{mode} acquire"] = calls(limiter.acquire, "acquire")
        loops[f"{mode} entry"] = blocks(limiter.entry, "entry")
    slots = stack.enter_context(Concurrency(server.url, 10, timeout=peers.TIMEOUT_S))
    loops["hold"] = blocks(slots.hold, KEY)
    lock = stack.enter_context(_redis_py(server)).lock(KEY, timeout=10)
    loops["redis-py's Lock"] = blocks(lambda: lock)
    return _trials(loops, seconds)


def report_limiters(add: Adder) -> None:
    for call, words, targets in (
        ("acquire", "acquire that need not wait", (1.15, 2)),
        ("entry", "entry", (1.2, 4)),
    ):
        for mode, target in zip(("direct", "leased"), targets, strict=True):
            what = f"{words}, over try_acquire: {mode}"
            add(what, f"{mode} {call}", f"{mode} try_acquire", target)
    what = "hold and free, over two try_acquire"
    add(what, "hold", "direct try_acquire", 1.4, calls_of_base=2)
    add("hold and free, over redis-py's Lock", "hold", "redis-py's Lock")


@contextmanager
def _redis_py(server: Server) -> Iterator[Any]:
    import redis

    retry: Any = libraries.no_retry("redis")
    with redis.Redis.from_url(server.url, retry=retry) as client:
        yield client


# -- circuit breakers -----------------------------------------------------------------------------


def nothing() -> None:
    """Do what a service does in no time."""


def breaker_trials(server: Server, stack: ExitStack, seconds: float) -> dict[str, Trial]:
    """Return calls of closed breakers: ours on Redis and in memory, and pybreaker's."""
    import pybreaker

    loops: dict[str, Loop] = {}
    for name, store in (("", server.url), (" on memory://", "memory://")):
        breaker = stack.enter_context(
            CircuitBreaker(store, ErrorRatio(0.5), timeout=peers.TIMEOUT_S)
        )
        loops[f"CircuitBreaker.call{name}"] = blocks(breaker.call, "payments")
        loops[f"protect{name}"] = calls(breaker.protect("payments")(nothing))
    client = stack.enter_context(_redis_py(server))
    for name, storage in (
        ("", pybreaker.CircuitMemoryStorage(pybreaker.STATE_CLOSED)),
        (" on Redis", pybreaker.CircuitRedisStorage(pybreaker.STATE_CLOSED, client)),
    ):
        peer = pybreaker.CircuitBreaker(state_storage=storage)
        loops[f"pybreaker's calling{name}"] = blocks(peer.calling)
        loops[f"pybreaker's decorator{name}"] = calls(peer(nothing))
    return _trials(loops, seconds)


def report_breakers(add: Adder) -> None:
    for name, peer, target in (
        ("CircuitBreaker.call", "pybreaker's calling", 1.5),
        ("protect", "pybreaker's decorator", 1.8),
    ):
        add(f"{name}, over pybreaker in memory", name, peer, target)
        in_memory = f"{name} on memory://"
        add(f"{in_memory}, over pybreaker in memory", in_memory, peer)
        add(f"{name}, over pybreaker on Redis", name, f"{peer} on Redis")


# -- tasks ----------------------------------------------------------------------------------------


async def tasks_cpu_us(
    acquire: peers.AsyncAcquire, keys: Sequence[str], tasks: int, seconds: float
) -> float:
    """Return the µs of processor time of one call of tasks that share the keys."""
    clock, made = time.perf_counter, 0

    async def work(own: Sequence[str]) -> None:
        nonlocal made
        while clock() < end:
            for key in own:
                if not await acquire(key):
                    raise RuntimeError(f"{key} was refused")
            made += len(own)

    if len(keys) < tasks:
        parts = [list(keys) * CALLS_OF_ONE_KEY] * tasks
    else:
        parts = [list(keys[number::tasks]) for number in range(tasks)]
    end, began = clock() + seconds, time.process_time()
    await asyncio.gather(*map(work, parts))
    return (time.process_time() - began) * 1e6 / made


class Tasks:
    """Limiters of one event loop, which stay open through all rounds."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._stack = AsyncExitStack()

    def trial(self, url: str, keys: Sequence[str], tasks: int, seconds: float) -> Trial:
        """Return a trial of a limiter of its own, which has called each of these keys before."""
        limiter = AsyncLimiter(url, LIMIT, prefix=f"{tasks}-tasks", timeout=peers.TIMEOUT_S)
        run = self._loop.run_until_complete
        run(self._stack.enter_async_context(limiter))
        work = partial(tasks_cpu_us, limiter.try_acquire, keys, tasks)
        run(work(max(0.3, seconds)))
        return lambda: run(work(seconds))

    def close(self) -> None:
        self._loop.run_until_complete(self._stack.aclose())
        self._loop.close()


class Node(Answering):
    """A process of Node that makes the same calls with rate-limiter-flexible on ioredis."""

    def __init__(self, server: Server) -> None:
        node = shutil.which("node") or shutil.which("nodejs")
        if node is None:
            raise FileNotFoundError("there is no node on the PATH")
        if not (NODE_PROGRAM.parent / "node_modules" / "rate-limiter-flexible").is_dir():
            raise FileNotFoundError(f"rate-limiter-flexible is missing: {NODE_PACKAGES}")
        super().__init__([node, NODE_PROGRAM, server.port])
        log(f"second: {self.read()['versions']}")

    def trial(self, keys: Sequence[str], pipelining: bool, seconds: float) -> Trial:
        """Return a trial with or without ioredis's automatic pipelining, compiled before."""
        job = {"keys": len(keys), "tasks": TASKS, "pipelining": pipelining}
        for _ in range(3):
            self._cpu_us({**job, "seconds": 0.3})
        return lambda: self._cpu_us({**job, "seconds": seconds})

    def _cpu_us(self, job: dict[str, Any]) -> float:
        us: float = self.ask(job)["cpu_us"]
        return us

    def read(self) -> Any:
        found = super().read()
        if "error" in found:
            raise RuntimeError(found["error"])
        return found


TASK_KEYS = {"hot key": ([KEY], 0.2), "10,000 keys": (MANY, 0.6)}
"""The keys of the rows beside rate-limiter-flexible, and their targets."""
NODE_CLIENTS = {"ioredis": False, "ioredis, automatic pipelining": True}


def task_trials(server: Server, stack: ExitStack, seconds: float) -> dict[str, Trial]:
    """Return calls of 200 tasks, and those of Node if it and its packages are there."""
    trials: dict[str, Trial] = {}
    tasks = Tasks()
    stack.callback(tasks.close)
    try:
        node = Node(server)
    except FileNotFoundError as error:
        log(f"second: no rows of rate-limiter-flexible: {error}")
        return trials
    stack.callback(node.close)
    for what, (keys, _) in TASK_KEYS.items():
        trials[what] = tasks.trial(server.url, keys, TASKS, seconds)
        for client, pipelining in NODE_CLIENTS.items():
            trials[f"{what}, {client}"] = node.trial(keys, pipelining, seconds)
    return trials


def report_tasks(add: Adder) -> None:
    for what, (_, target) in TASK_KEYS.items():
        for client in NODE_CLIENTS:
            words = f"client CPU per call of {TASKS} tasks, over rate-limiter-flexible on {client}"
            bound = target if not NODE_CLIENTS[client] else None
            add(f"{words}: {what}", what, f"{what}, {client}", bound)


# -- a cluster ------------------------------------------------------------------------------------


CLUSTER_TASKS = {"asyncio": (MANY, TASKS), "asyncio, one task": (SOME, 1)}


def cluster_trials(server: Server, stack: ExitStack, seconds: float) -> dict[str, Trial]:
    """Return calls over one server, and over a cluster of three on the same core."""
    with pinned(server.core):
        cluster = stack.enter_context(Cluster())
    tasks = Tasks()
    stack.callback(tasks.close)
    trials: dict[str, Trial] = {}
    for place, url in (("one server", server.url), ("the cluster", cluster.url)):
        limiter = stack.enter_context(
            Limiter(url, LIMIT, prefix="cluster", timeout=peers.TIMEOUT_S)
        )
        loop = calls_on(SOME, limiter.try_acquire)
        trials[f"synchronous, {place}"] = partial(cpu_us, loop, seconds)
        for kind, (keys, number) in CLUSTER_TASKS.items():
            trials[f"{kind}, {place}"] = tasks.trial(url, keys, number, seconds)
    return trials


def report_cluster(add: Adder) -> None:
    for kind in ("synchronous", *CLUSTER_TASKS):
        what = f"a cluster of three over one server, client CPU per call: {kind}"
        add(what, f"{kind}, the cluster", f"{kind}, one server", 1.2)


# -------------------------------------------------------------------------------------------------


@dataclass
class Adder:
    """Adds rows of results, with the ratio of `apart` as a detail: a core each for client and
    servers, where there are two.
    """

    section: Section
    results: Results
    apart: Results | None = None

    def __call__(
        self, what: str, name: str, base: str, target: float | None = None, calls_of_base: int = 1
    ) -> None:
        """Add a row of `name` over as many calls of `base`, unless one of them was not measured."""
        if not {name, base} <= self.results.values.keys():
            return
        us = self.results.median
        detail = f"{us(name):.2f} µs; {base} {us(base):.2f} µs"
        if self.apart is not None and {name, base} <= self.apart.values.keys():
            ratio = self.apart.ratio(name, base).over(calls_of_base)
            detail += f"; on a core each {ratio.median:.2f}x ({ratio.low:.2f}..{ratio.high:.2f})"
        self.section.add(
            what,
            self.results.ratio(name, base).over(calls_of_base),
            target=None if target is None else Target(target),
            detail=detail,
        )


GROUPS = {
    "limiters": (limiter_trials, report_limiters),
    "breakers": (breaker_trials, report_breakers),
    "tasks": (task_trials, report_tasks),
    "cluster": (cluster_trials, report_cluster),
}


def measure(group: str, seconds: float, rounds: int, client: int | None) -> Results:
    """Run the rounds of a group, with the client on this core and the servers on the last one."""
    make, _ = GROUPS[group]
    with running(last_core()) as server, pinned(client), ExitStack() as stack:
        where = "one core" if client == server.core else "a core each"
        return run_rounds(f"second, {group}, {where}", make(server, stack, seconds), rounds)


def run(quick: bool) -> Section:
    section = Section("second", "calls beside try_acquire: the client's processor time")
    seconds, rounds = (0.1, 5) if quick else (0.2, 21)
    core = last_core()
    cores = os.sched_getaffinity(0) if core is not None else set()
    for group, (_, report) in GROUPS.items():
        try:
            results = measure(group, seconds, rounds, core)
            apart = None
            if len(cores) > 1 and group != "breakers":  # whose calls do not wait for a server
                apart = measure(group, seconds, max(5, rounds // 3), min(cores))
        except Exception as error:  # a peer, or a cluster, cannot be started
            section.add_failures({group: error_text(error)})
            continue
        report(Adder(section, results, apart))
        section.add_failures(results.errors)
    return section
