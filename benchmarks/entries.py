"""What entries and their minute views cost: nothing to a plain acquire, and what to themselves.

Script times are the server's own (`INFO commandstats`), calls in process are leased hits, and bytes
are those of `MEMORY USAGE key SAMPLES 0`.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial

from benchmarks.inprocess import FLOOR, open_floor
from benchmarks.measure import Results, Trial, run_rounds
from benchmarks.report import Section, Target
from benchmarks.resp import Socket
from benchmarks.server import Server, last_core, running
from benchmarks.server_cost import CALLS_PER_COPY, COPIES, GUARD, RingState, server_us
from distwindow import Limit, Limiter
from distwindow.minute.commands import ViewFlush, views_name
from distwindow.minute.view import SECONDS
from distwindow.ring.command import load_script
from distwindow.ring.stats import Bucket

LIMIT = Limit("100000/day")
SAME = Target(1.05)
ORIGINS = (0, 1, 10, 100)
CALLS = 5_000
PLENTY = "1000000000/hour"

SCRIPT_WITHOUT = "script time of a plain acquire, no views in the store"
SCRIPT_WITH = "script time of a plain acquire on keys with views of 100 origins"
CALL_WITHOUT = "a plain try_acquire, leased, of a limiter without entries"
CALL_WITH = "a plain try_acquire, leased, of a limiter with entries of 100 origins"
ENTRY_WITHOUT = "an entry without an origin, leased"
ENTRY_WITH = "an entry with one of 100 origins, leased"


def views_flush(key: str, origins: int, *, seconds: int = 1, calls: int = 40) -> ViewFlush:
    """Return a flush of `calls` finished calls of each origin, in each of the last seconds."""
    now = int(time.time())
    buckets = tuple(
        Bucket((now - age) * 1000, calls, 2, calls - 1, 1, calls * 12, 3) for age in range(seconds)
    )
    names = [f"application-{number}" for number in range(origins)] or [""]
    name = views_name("distwindow", key)
    return ViewFlush((), name=name, counts=tuple((origin, buckets) for origin in names))


def plain_script_us(connection: Socket, *, with_views: bool) -> float:
    """Return the microseconds of an admitted acquire, on the server."""
    connection.call("FLUSHALL")
    ring = RingState(LIMIT, 50_000)
    ring.prepare(connection, int(time.time() * 1000), COPIES)
    if with_views:
        for copy in range(COPIES):
            connection.pipeline([views_flush(f"user:42:{copy}", 100).frame(GUARD)])
    frames = [ring.frame(copy) for copy in range(COPIES) for _ in range(CALLS_PER_COPY)]
    return server_us(connection, frames)[0]


def flush_us(connection: Socket, origins: int, *, over_the_cap: bool = False) -> float:
    """Return the microseconds of a flush of a key with views of a whole minute, on the server."""
    connection.call("FLUSHALL")
    known = views_flush("user:42", max(origins, 100 * over_the_cap), seconds=SECONDS)
    connection.pipeline([known.frame(GUARD)])
    flush = views_flush("user:42", origins)
    if over_the_cap:
        flush.counts = tuple((f"new-{name}", buckets) for name, buckets in flush.counts)
    return server_us(connection, [flush.frame(GUARD)] * 200)[0]


def ring_bytes(connection: Socket, *, with_views: bool) -> int:
    """Return the bytes of a key's ring."""
    connection.call("FLUSHALL")
    ring = RingState(LIMIT, 50_000)
    ring.prepare(connection, int(time.time() * 1000), 1)
    if with_views:
        connection.pipeline([views_flush("user:42:first", 100).frame(GUARD)])
    name = ring.acquire("first").keys[0]
    size: int = connection.call("MEMORY", "USAGE", name, "SAMPLES", 0)
    return size


def views_bytes(connection: Socket, origins: int) -> int:
    """Return the bytes of a key's views, in which each second of a minute is counted."""
    connection.call("FLUSHALL")
    flush = views_flush("user:42", origins, seconds=SECONDS)
    connection.pipeline([flush.frame(GUARD)])
    size: int = connection.call("MEMORY", "USAGE", flush.name, "SAMPLES", 0)
    return size


def calls_ns(call: Callable[[], object]) -> float:
    """Return ns per call."""
    start = time.perf_counter_ns()
    for _ in range(CALLS):
        call()
    return (time.perf_counter_ns() - start) / CALLS


def in_process(server: Server, stack: ExitStack) -> dict[str, Trial]:
    """Return the trials of calls that are decided in this process."""
    plain, used, other = (
        stack.enter_context(
            Limiter(server.url, PLENTY, consistency="leased", prefix=name, timeout=5.0)
        )
        for name in ("plain", "used", "other")
    )
    origins = [f"application-{number}" for number in range(100)]
    acquire_floor = stack.enter_context(open_floor())
    number = 0

    def enter() -> None:
        with other.entry("user:42"):
            pass

    def enter_with_origin() -> None:
        nonlocal number
        number = (number + 1) % 100
        with used.entry("user:42", origin=origins[number]):
            pass

    def plain_of(limiter: Limiter) -> float:
        """Time plain calls after as many that are not timed, which fetch a lease for them."""
        calls_ns(lambda: limiter.try_acquire("user:42"))
        return calls_ns(lambda: limiter.try_acquire("user:42"))

    def plain_of_used() -> float:
        for _ in range(100):
            enter_with_origin()
        return plain_of(used)

    return {
        FLOOR: lambda: calls_ns(lambda: acquire_floor("user:42")),
        CALL_WITHOUT: lambda: plain_of(plain),
        CALL_WITH: plain_of_used,
        ENTRY_WITHOUT: lambda: calls_ns(enter),
        ENTRY_WITH: lambda: calls_ns(enter_with_origin),
    }


def run(quick: bool) -> Section:
    section = Section("entries", "entries and minute views: what they cost, and a plain acquire")
    count = 7 if quick else 21
    with running(last_core()) as server, Socket(server.port) as connection:
        for name in ("acquire", "view_flush"):
            connection.call("SCRIPT", "LOAD", load_script(name).text)
        trials: dict[str, Trial] = {
            SCRIPT_WITHOUT: partial(plain_script_us, connection, with_views=False),
            SCRIPT_WITH: partial(plain_script_us, connection, with_views=True),
        }
        for origins in ORIGINS:
            trials[_flush_name(origins)] = partial(flush_us, connection, origins)
        trials[_flush_name(10, over=True)] = partial(flush_us, connection, 10, over_the_cap=True)
        on_server = run_rounds("entries", trials, count)
        sizes = [ring_bytes(connection, with_views=w) for w in (False, True)]
        views = {origins: views_bytes(connection, origins) for origins in ORIGINS}
        with ExitStack() as stack:
            called = run_rounds("entries", in_process(server, stack), count)
    _report(section, on_server, called, sizes)
    for origins, size in views.items():
        section.add(
            f"views of a key, {_origins_text(origins)}, all seconds counted", float(size), unit="B"
        )
    return section


def _flush_name(origins: int, *, over: bool = False) -> str:
    beyond = " for which there is no room" if over else ""
    return f"script time of a flush of views, {_origins_text(origins)}{beyond}"


def _origins_text(origins: int) -> str:
    return f"{origins or 'no'} origin{'s' if origins != 1 else ''}"


def _report(section: Section, on_server: Results, called: Results, sizes: list[int]) -> None:
    us = on_server.median
    section.add(
        f"{SCRIPT_WITH}, over one without",
        on_server.ratio(SCRIPT_WITH, SCRIPT_WITHOUT),
        target=SAME,
        detail=f"{us(SCRIPT_WITH):.2f} µs and {us(SCRIPT_WITHOUT):.2f} µs",
    )
    section.add("bytes of its ring, over those without views", sizes[1] / sizes[0], target=SAME)
    section.add(
        f"{CALL_WITH}, over one without",
        called.ratio(CALL_WITH, CALL_WITHOUT),
        target=SAME,
        detail=f"{called.median(CALL_WITH):,.0f} ns and {called.median(CALL_WITHOUT):,.0f} ns",
    )
    for name in (CALL_WITHOUT, ENTRY_WITHOUT, ENTRY_WITH):
        section.add(
            f"{name}, over the floor",
            called.ratio(name, FLOOR),
            detail=f"{called.median(name):,.0f} ns per call",
        )
    for name in on_server.values:
        if name not in (SCRIPT_WITH, SCRIPT_WITHOUT):
            section.add(name, on_server.stat(name), unit="µs")
    section.add_failures({**on_server.errors, **called.errors})
