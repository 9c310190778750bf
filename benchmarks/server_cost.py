"""The acquire script's microseconds on the server, over those of `return 1`.

EVALSHA calls are pipelined, and the server's statistics of them (`INFO commandstats`) are read
after each trial. The states are made with the script itself, at given times.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import hiredis

from benchmarks.measure import Results, Trial, log, run_rounds
from benchmarks.report import Section, Target
from benchmarks.resp import NOOP, NOOP_SHA, Socket, pack
from benchmarks.server import last_core, running
from distwindow.ring import key as keys
from distwindow.ring.command import load_script
from distwindow.ring.commands import Acquire, charges_of
from distwindow.ring.limit import Limit

FLAT = Target(1.15)
SHAPES = (1, 10, 60, 500)
AMOUNTS = (10, 100_000)

INTERVAL_S = 86_400
"""The interval in s. Its buckets are so long that a trial on the server's clock stays in one."""

GUARD = b"9999999999999.000001"
COPIES = 180
"""Every state is copied to this many keys, and each is called `CALLS_PER_COPY` times."""
CALLS_PER_COPY = 8
PARTS = 5
"""Parts of a trial that are timed one by one."""
NEW_KEYS = 1_500
"""Keys that are each refused for the first time."""
ROTATIONS = 5
"""Bucket changes per key; few, so that prepared buckets leave the window."""

BARE, SAME_ARGUMENTS = "return 1, bare", "return 1"


@dataclass(frozen=True)
class RingState:
    """One state to be measured: a limit, and its used permits, spread evenly over the buckets."""

    limit: Limit
    used: int

    def acquire(self, copy: int | str, cost: int = 1, now_ms: int | None = None) -> Acquire:
        key_prefix = keys.ring_name_prefix("distwindow", f"user:42:{copy}")
        return Acquire(charges_of("user", key_prefix, [self.limit], cost), now_ms=now_ms)

    def frame(self, copy: int | str, now_ms: int | None = None) -> bytes:
        return self.acquire(copy, now_ms=now_ms).frame(GUARD)

    def prepare(self, connection: Socket, now_ms: int, copies: int) -> None:
        """Fill one ring, the oldest bucket first, and copy it."""
        bucket_ms, span = self.limit.bucket_ms, self.limit.span
        each, more = divmod(self.used - 1, span - 1) if span > 1 else (0, 0)
        costs = {age: each + (span - age <= more) for age in range(span - 1, 0, -1)}
        costs[0] = self.used - sum(costs.values())
        frames = [
            self.acquire("first", cost, now_ms - age * bucket_ms).frame(GUARD)
            for age, cost in costs.items()
            if cost
        ]
        _check_replies(connection.pipeline(frames), admitted=True)
        first = self.acquire("first").keys[0]
        connection.pipeline(
            [pack("COPY", first, self.acquire(copy).keys[0]) for copy in range(copies)]
        )


def server_us(connection: Socket, commands: Sequence[bytes]) -> tuple[float, list[object]]:
    """Return microseconds per EVALSHA, as the server counts them, and the replies.

    It is the median of a few parts, because another process that takes the core for some ms then
    affects one part only.
    """
    replies: list[object] = []
    parts: list[float] = []
    size = -(-len(commands) // PARTS)
    for at in range(0, len(commands), size):
        connection.call("CONFIG", "RESETSTAT")
        replies += connection.pipeline(commands[at : at + size])
        calls, us = connection.script_calls()
        parts.append(us / calls)
    return statistics.median(parts), replies


def _check_replies(replies: Sequence[object], admitted: bool) -> None:
    """Raise unless every reply is the decision that this trial measures."""
    for reply in replies:
        if isinstance(reply, hiredis.ReplyError):
            raise RuntimeError(str(reply))
        if not isinstance(reply, list) or (reply[1] >= 0) != admitted:
            raise RuntimeError(f"the script answered {reply!r} where admitted={admitted}")


Case = Callable[[Socket, Limit], float]
"""Returns µs per call."""


def _prepare(connection: Socket, ring: RingState, copies: int) -> int:
    connection.call("FLUSHALL")
    now = int(time.time() * 1000)
    ring.prepare(connection, now, copies)
    return now


def allowed(connection: Socket, limit: Limit) -> float:
    """Measure the hot path: the newest bucket is the current one, and there is room."""
    ring = RingState(limit, limit.amount - CALLS_PER_COPY)
    _prepare(connection, ring, COPIES)
    us, replies = server_us(
        connection, [ring.frame(c) for c in range(COPIES) for _ in range(CALLS_PER_COPY)]
    )
    _check_replies(replies, admitted=True)
    return us


def refused(connection: Socket, limit: Limit) -> float:
    """Measure a full window that has refused before in this bucket."""
    ring = RingState(limit, limit.amount)
    _prepare(connection, ring, COPIES)
    connection.pipeline([ring.frame(copy) for copy in range(COPIES)])
    us, replies = server_us(
        connection, [ring.frame(c) for c in range(COPIES) for _ in range(CALLS_PER_COPY)]
    )
    _check_replies(replies, admitted=False)
    return us


def refused_first(connection: Socket, limit: Limit) -> float:
    """Measure the first refusal of a full window in this bucket, which computes `retry_after`."""
    ring = RingState(limit, limit.amount)
    copies = COPIES * 3
    _prepare(connection, ring, copies)
    us, replies = server_us(connection, [ring.frame(copy) for copy in range(copies)])
    _check_replies(replies, admitted=False)
    return us


def refused_key(connection: Socket, limit: Limit) -> float:
    """Measure the first call of many keys after those that have used up their limits."""
    connection.call("FLUSHALL")
    ring = RingState(limit, limit.amount)
    frames = [ring.frame(copy) for copy in range(NEW_KEYS)]
    for _ in range(limit.amount):
        _check_replies(connection.pipeline(frames), admitted=True)
    us, replies = server_us(connection, frames)
    _check_replies(replies, admitted=False)
    return us


def bucket_change(connection: Socket, limit: Limit) -> float:
    """Measure calls that each begin a bucket: one bucket ends, and one leaves the window."""
    ring = RingState(limit, limit.amount // 2)
    now = _prepare(connection, ring, COPIES)
    frames = [
        ring.frame(copy, now + step * limit.bucket_ms)
        for copy in range(COPIES)
        for step in range(1, ROTATIONS + 1)
    ]
    us, replies = server_us(connection, frames)
    _check_replies(replies, admitted=True)
    return us


def new_ring(connection: Socket, limit: Limit) -> float:
    """Measure the first call on a key."""
    connection.call("FLUSHALL")
    ring = RingState(limit, 1)
    us, replies = server_us(connection, [ring.frame(copy) for copy in range(COPIES * 5)])
    _check_replies(replies, admitted=True)
    return us


CASES: dict[str, tuple[Case, Target]] = {
    "allowed": (allowed, Target(4.2)),
    "refused": (refused, Target(6)),
    "first refusal of a bucket": (refused_first, Target(10)),
    "bucket change": (bucket_change, Target(7)),
    "new ring": (new_ring, Target(7)),
}


KEY_CASE = f"first refusal of a key, {NEW_KEYS:,} keys of "
KEY_LIMITS: dict[str, tuple[Limit, Target | None]] = {
    KEY_CASE + "1/hour": (Limit(1, per=3_600), Target(6)),
    KEY_CASE + "5/hour": (Limit(5, per=3_600), None),
}


def _name(case: str, buckets: int, amount: int) -> str:
    return f"{case}, {buckets} bucket{'s' if buckets > 1 else ''}, limit {amount:,}"


def run(quick: bool) -> Section:
    section = Section(
        "server", "server: the acquire script against `return 1` with the same key and arguments"
    )
    limits = {
        (n, amount): Limit(amount, per=INTERVAL_S, buckets=n) for n in SHAPES for amount in AMOUNTS
    }
    with running(last_core()) as server, Socket(server.port) as connection:
        connection.call("SCRIPT", "LOAD", NOOP)
        connection.call("SCRIPT", "LOAD", load_script("acquire").text)
        plain = RingState(limits[10, 100_000], 1).acquire(1)
        same = pack("EVALSHA", NOOP_SHA, 1, plain.keys[0], GUARD, *plain.arguments())
        bare = pack("EVALSHA", NOOP_SHA, 0)
        count = COPIES * CALLS_PER_COPY
        contenders: dict[str, Trial] = {
            SAME_ARGUMENTS: lambda: server_us(connection, [same] * count)[0],
            BARE: lambda: server_us(connection, [bare] * count)[0],
        }
        for case, (trial, _) in CASES.items():
            for (buckets, amount), limit in limits.items():
                contenders[_name(case, buckets, amount)] = partial(trial, connection, limit)
        for name, (limit, _) in KEY_LIMITS.items():
            contenders[name] = partial(refused_key, connection, limit)
        contenders[SAME_ARGUMENTS]()  # the first calls on a fresh server are slow
        results = run_rounds("server", contenders, 5 if quick else 15)
    _report(section, results)
    return section


def _report(section: Section, results: Results) -> None:
    one = results.median(SAME_ARGUMENTS)
    bare = results.median(BARE)
    section.add(
        "return 1 without key and arguments",
        results.ratio(BARE, SAME_ARGUMENTS),
        detail=f"{bare:.2f} µs of {one:.2f} µs",
    )
    for name in results.values:
        if name not in (SAME_ARGUMENTS, BARE):
            us = results.median(name)
            detail = f"{us:.2f} µs; {us / bare:.1f}x a bare return 1"
            case = name.split(",")[0]
            target = CASES[case][1] if case in CASES else KEY_LIMITS[name][1]
            section.add(name, results.ratio(name, SAME_ARGUMENTS), target=target, detail=detail)
    section.rows[1:] = sorted(section.rows[1:], key=lambda row: _order(row.what))
    hot = {
        name: results.ratio(name, SAME_ARGUMENTS).low
        for name in (_name("allowed", n, amount) for n in SHAPES for amount in AMOUNTS)
        if name in results.values
    }
    if hot:
        slowest, fastest = max(hot, key=lambda n: hot[n]), min(hot, key=lambda n: hot[n])
        section.add(
            "hot path, dearest shape over cheapest",
            hot[slowest] / hot[fastest],
            target=FLAT,
            detail=f"of the lower quartiles; dearest: {slowest}; cheapest: {fastest}",
        )
    section.add_failures(results.errors)
    log("server: done")


def _order(name: str) -> int:
    order = [_name(case, n, amount) for case in CASES for n in SHAPES for amount in AMOUNTS]
    return [*order, *KEY_LIMITS].index(name)
