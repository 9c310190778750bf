"""One synchronous acquire at a time, client and server on one core, against a raw socket."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial

import redis

from benchmarks import peers
from benchmarks.measure import error_text, log, percentile, run_rounds
from benchmarks.report import Section, Target
from benchmarks.resp import NOOP, NOOP_SHA, Socket, pack
from benchmarks.server import Server, last_core, pinned, running

TARGET = Target(1.45)
RAW, BARE = "raw socket, return 1", "redis-py, return 1"
KEY = "user:42"


@contextmanager
def _raw(server: Server) -> Iterator[Callable[[str], object]]:
    with Socket(server.port) as connection:
        connection.call("SCRIPT", "LOAD", NOOP)
        command = pack("EVALSHA", NOOP_SHA, 1, KEY, 1)
        yield lambda key: connection.exchange(command)


@contextmanager
def _redis_py(server: Server) -> Iterator[Callable[[str], object]]:
    with redis.Redis.from_url(server.url) as client:
        client.script_load(NOOP)
        yield lambda key: client.evalsha(NOOP_SHA, 1, key, 1)


def _trial(call: Callable[[str], object], calls: int, latencies_ns: list[float]) -> float:
    """Return the median latency of this trial in ns, and append all latencies to the list."""
    clock = time.perf_counter_ns
    for _ in range(30):
        call(KEY)
    times: list[float] = []
    for _ in range(calls):
        start = clock()
        call(KEY)
        times.append(clock() - start)
    latencies_ns += times
    return percentile(sorted(times), 0.5)


def run(quick: bool) -> Section:
    section = Section(
        "latency", "latency of one synchronous acquire, client and server on one core"
    )
    core = last_core()
    calls, count = (300, 7) if quick else (1_000, 15)
    with running(core) as server, pinned(core), ExitStack() as stack:
        opened: dict[str, Callable[[str], object]] = {
            RAW: stack.enter_context(_raw(server)),
            BARE: stack.enter_context(_redis_py(server)),
        }
        contenders = [
            *peers.limiters(),
            *peers.more_limiters(),
            *peers.blocking_peers(pools=(peers.SHARED,)),
        ]
        errors: dict[str, str] = {}
        for peer in contenders:
            try:
                call = stack.enter_context(peer.open(server.url, peers.HIGH_QUOTA))
                peers.check_decisions([call(KEY) for _ in range(200)])
                opened[peer.name] = call
            except Exception as error:
                errors[peer.name] = error_text(error)
                log(f"latency: {peer.name} failed: {errors[peer.name]}")
        all_latencies_ns: dict[str, list[float]] = {name: [] for name in opened}
        results = run_rounds(
            "latency",
            {
                name: partial(_trial, call, calls, all_latencies_ns[name])
                for name, call in opened.items()
            },
            count,
        )
    for name in sorted(results.values, key=results.median):
        ordered = sorted(all_latencies_ns[name])
        p50, p99, p999 = (percentile(ordered, share) / 1000 for share in (0.5, 0.99, 0.999))
        section.add(
            f"p50: {name}",
            1.0 if name == RAW else results.ratio(name, RAW),
            target=TARGET if name == peers.DISTWINDOW else None,
            detail=f"p50 {p50:.1f}  p99 {p99:.1f}  p99.9 {p999:.1f} µs",
        )
    section.add_failures({**errors, **results.errors})
    return section
