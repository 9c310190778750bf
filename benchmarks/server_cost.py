"""The acquire script's microseconds on the server, against `return 1`.

EVALSHA calls are pipelined, and the server's own account of them (`INFO commandstats`) is read
after each trial. The states are made with the script itself, at given times.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import hiredis

from benchmarks.measure import Results, Trial, rounds, say
from benchmarks.report import Section, Target
from benchmarks.resp import NOOP, NOOP_SHA, Socket, pack
from benchmarks.server import last_core, running
from distwindow.core.limit import Limit
from distwindow.protocol import keys
from distwindow.protocol import scripts as script
from distwindow.protocol.commands import Acquire, charges_of

TARGET = Target(6)
FLAT = Target(1.15)
SHAPES = (1, 10, 60, 500)
AMOUNTS = (10, 100_000)

DAY = 86_400
"""The interval, in s. Its buckets are so long that a trial on the server's clock stays in one."""

GUARD = b"9999999999999.000001"
COPIES = 180
"""Every state is copied to as many keys, and each is called `STEPS` times."""
STEPS = 8
PARTS = 5
"""In which a trial is timed."""
TURNS = 5
"""Bucket changes per key, so that what leaves the window are the buckets that were prepared."""

BARE, SAME = "return 1, bare", "return 1"


@dataclass(frozen=True)
class Ring:
    """One state to be measured: a limit and the permits used of it, evenly over the buckets."""

    limit: Limit
    used: int

    def acquire(self, copy: int | str, cost: int = 1, now_ms: int | None = None) -> Acquire:
        stem = keys.key_prefix("distwindow", f"user:42:{copy}")
        return Acquire(charges_of("user", stem, [self.limit], cost), now_ms=now_ms)

    def frame(self, copy: int | str, now_ms: int | None = None) -> bytes:
        return self.acquire(copy, now_ms=now_ms).frame(GUARD)

    def prepare(self, connection: Socket, now_ms: int, copies: int) -> None:
        """Fill one ring, oldest bucket first, and copy it."""
        width, span = self.limit.bucket_ms, self.limit.span
        each, more = divmod(self.used - 1, span - 1) if span > 1 else (0, 0)
        costs = {age: each + (span - age <= more) for age in range(span - 1, 0, -1)}
        costs[0] = self.used - sum(costs.values())
        frames = [
            self.acquire("first", cost, now_ms - age * width).frame(GUARD)
            for age, cost in costs.items()
            if cost
        ]
        _expect(connection.pipeline(frames), admitted=True)
        first = self.acquire("first").keys[0]
        connection.pipeline(
            [pack("COPY", first, self.acquire(copy).keys[0]) for copy in range(copies)]
        )


def timed(connection: Socket, commands: Sequence[bytes]) -> tuple[float, list[object]]:
    """Microseconds per EVALSHA, as the server counts them, and the replies.

    The median of a few parts: a neighbour that takes the core for some ms spoils only one.
    """
    replies: list[object] = []
    parts: list[float] = []
    size = -(-len(commands) // PARTS)
    for at in range(0, len(commands), size):
        connection.call("CONFIG", "RESETSTAT")
        replies += connection.pipeline(commands[at : at + size])
        stats = connection.info("commandstats")["cmdstat_evalsha"]
        figures = dict(pair.split("=") for pair in stats.split(","))
        parts.append(int(figures["usec"]) / int(figures["calls"]))
    return statistics.median(parts), replies


def _expect(replies: Sequence[object], admitted: bool) -> None:
    """Every reply is the verdict that this trial is about."""
    for reply in replies:
        if isinstance(reply, hiredis.ReplyError):
            raise RuntimeError(str(reply))
        if not isinstance(reply, list) or (reply[1] >= 0) != admitted:
            raise RuntimeError(f"the script answered {reply!r} where admitted={admitted}")


Case = Callable[[Socket, Limit], float]


def _ready(connection: Socket, ring: Ring, copies: int) -> int:
    connection.call("FLUSHALL")
    now = int(time.time() * 1000)
    ring.prepare(connection, now, copies)
    return now


def allowed(connection: Socket, limit: Limit) -> float:
    """The hot path: the newest bucket is the present one, and there is room."""
    ring = Ring(limit, limit.amount - STEPS)
    _ready(connection, ring, COPIES)
    us, replies = timed(connection, [ring.frame(c) for c in range(COPIES) for _ in range(STEPS)])
    _expect(replies, admitted=True)
    return us


def refused(connection: Socket, limit: Limit) -> float:
    """A full window, refused before in this bucket."""
    ring = Ring(limit, limit.amount)
    _ready(connection, ring, COPIES)
    connection.pipeline([ring.frame(copy) for copy in range(COPIES)])
    us, replies = timed(connection, [ring.frame(c) for c in range(COPIES) for _ in range(STEPS)])
    _expect(replies, admitted=False)
    return us


def refused_first(connection: Socket, limit: Limit) -> float:
    """A full window, the first refusal in this bucket: the time of room is found."""
    ring = Ring(limit, limit.amount)
    copies = COPIES * 3
    _ready(connection, ring, copies)
    us, replies = timed(connection, [ring.frame(copy) for copy in range(copies)])
    _expect(replies, admitted=False)
    return us


def bucket_change(connection: Socket, limit: Limit) -> float:
    """Every call opens a bucket: the newest is closed, one leaves the window."""
    ring = Ring(limit, limit.amount // 2)
    now = _ready(connection, ring, COPIES)
    frames = [
        ring.frame(copy, now + step * limit.bucket_ms)
        for copy in range(COPIES)
        for step in range(1, TURNS + 1)
    ]
    us, replies = timed(connection, frames)
    _expect(replies, admitted=True)
    return us


CASES: dict[str, Case] = {
    "allowed": allowed,
    "refused": refused,
    "first refusal of a bucket": refused_first,
    "bucket change": bucket_change,
}


def _name(case: str, buckets: int, amount: int) -> str:
    return f"{case}, {buckets} bucket{'s' if buckets > 1 else ''}, limit {amount:,}"


def run(quick: bool) -> Section:
    section = Section(
        "server", "server: the acquire script against `return 1` with the same key and arguments"
    )
    limits = {(n, amount): Limit(amount, per=DAY, buckets=n) for n in SHAPES for amount in AMOUNTS}
    with running(last_core()) as server, Socket(server.port) as connection:
        connection.call("SCRIPT", "LOAD", NOOP)
        connection.call("SCRIPT", "LOAD", script.load_script("acquire").text)
        plain = Ring(limits[10, 100_000], 1).acquire(1)
        same = pack("EVALSHA", NOOP_SHA, 1, plain.keys[0], GUARD, *plain.arguments())
        bare = pack("EVALSHA", NOOP_SHA, 0)
        count = COPIES * STEPS
        contenders: dict[str, Trial] = {
            SAME: lambda: timed(connection, [same] * count)[0],
            BARE: lambda: timed(connection, [bare] * count)[0],
        }
        for case, trial in CASES.items():
            for (buckets, amount), limit in limits.items():
                contenders[_name(case, buckets, amount)] = partial(trial, connection, limit)
        contenders[SAME]()  # the first calls of a fresh server are dear
        results = rounds("server", contenders, 5 if quick else 15)
    _report(section, results)
    return section


def _report(section: Section, results: Results) -> None:
    one = results.median(SAME)
    bare = results.median(BARE)
    section.add(
        "return 1 without key and arguments",
        results.ratio(BARE, SAME),
        detail=f"{bare:.2f} µs of {one:.2f} µs",
    )
    for name in results.values:
        if name not in (SAME, BARE):
            us = results.median(name)
            detail = f"{us:.2f} µs; {us / bare:.1f}x a bare return 1"
            section.add(name, results.ratio(name, SAME), target=TARGET, detail=detail)
    section.rows[1:] = sorted(section.rows[1:], key=lambda row: _order(row.what))
    hot = {
        name: results.ratio(name, SAME).low
        for name in (_name("allowed", n, amount) for n in SHAPES for amount in AMOUNTS)
        if name in results.values
    }
    if hot:
        dear, cheap = max(hot, key=lambda n: hot[n]), min(hot, key=lambda n: hot[n])
        section.add(
            "hot path, dearest shape over cheapest",
            hot[dear] / hot[cheap],
            target=FLAT,
            detail=f"of the lower quartiles; dearest: {dear}; cheapest: {cheap}",
        )
    section.failed(results.errors)
    say("server: done")


def _order(name: str) -> int:
    order = [_name(case, n, amount) for case in CASES for n in SHAPES for amount in AMOUNTS]
    return order.index(name)
