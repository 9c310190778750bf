"""The cost of a flush to a ring to which many other processes have flushed within its window.

A second hash records the last flush of each sender. The rows show what that costs for different
numbers of senders: a flush, with and without pull, and an acquire, in microseconds of the server
(`INFO commandstats` around pipelined EVALSHA calls), and the bytes of both hashes.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from itertools import count

import hiredis

from benchmarks.measure import Results, Trial, log, run_rounds
from benchmarks.report import Section, Target
from benchmarks.resp import Socket
from benchmarks.server import last_core, running
from benchmarks.server_cost import GUARD, server_us
from distwindow.ring import key as keys
from distwindow.ring.command import load_script
from distwindow.ring.commands import CURRENT_BUCKET, Acquire, Flush, charges_of
from distwindow.ring.limit import Limit
from distwindow.ring.stats import Bucket

FLUSH_TARGET = Target(2)
ACQUIRE_TARGET = Target(1.15)
SENDERS = (0, 100, 400, 2_000, 20_000)
"""The records of 400 are the largest of these that are one compact block (a listpack), in which the
search for a sender without a record takes longest.
"""

LIMIT = Limit(10**9, per=86_400, buckets=24)
COUNTS = (Bucket(CURRENT_BUCKET, 1),)
CALLS = 100
"""In a trial."""
NEW_SENDERS = 100
"""In a trial; few, so that they hardly change the number of senders that is measured."""


@dataclass
class RingWithSenders:
    """A ring with a pass in each of its 24 buckets, and the records of `senders` senders."""

    connection: Socket
    senders: int
    stale: int = 0
    """Further senders, which flushed two windows ago and whose records are to be deleted."""
    records: bytes = b""
    copy: bytes = b""
    names: Iterator[int] = field(default_factory=lambda: count(10**9))
    numbers: Iterator[int] = field(default_factory=lambda: count(2))

    def prepare(self) -> None:
        now = int(time.time() * 1000)
        before = now - 2 * LIMIT.interval_ms
        seen = (Bucket(before, 1),)
        self._call(
            [self.flush(_name(10**8 + i), 1, seen).with_time(before) for i in range(self.stale)]
        )
        self._call([self.acquire(now - age * LIMIT.bucket_ms) for age in range(23, -1, -1)])
        self._call([self.flush(_name(i), 1) for i in range(self.senders)])
        ring = self.acquire().charges[0].ring
        self.records, self.copy = keys.senders_name(ring), keys.senders_name(ring) + b":copy"
        self.connection.call("COPY", self.records, self.copy)

    def acquire(self, now_ms: int | None = None) -> Acquire:
        key_prefix = keys.ring_name_prefix("distwindow", f"senders:{self.senders}:{self.stale}")
        return Acquire(charges_of("user", key_prefix, [LIMIT], 1), now_ms)

    def flush(
        self, sender: str, seq: int, counts: tuple[Bucket, ...] = COUNTS, *, pull: bool = False
    ) -> Flush:
        charges = self.acquire().charges
        return Flush(charges, counts=(counts,), sender=sender, seq=seq, pull=pull)

    def flush_without_sender(self, pull: bool) -> float:
        """Measure flushes without a sender, of which the ring keeps no record."""
        return self._timed([self.flush("", 1, pull=pull)] * CALLS)

    def flush_of_known(self, pull: bool) -> float:
        """Measure a known sender: the one whose record is farthest from the start of the hash."""
        last = _name(max(0, self.senders - 1))
        flushes = [self.flush(last, next(self.numbers), pull=pull) for _ in range(CALLS)]
        return self._timed(flushes)

    def flush_of_new(self, pull: bool) -> float:
        """Measure flushes of senders without a record, then restore the records."""
        names = [_name(next(self.names)) for _ in range(NEW_SENDERS)]
        us = self._timed([self.flush(name, 1, pull=pull) for name in names])
        if not self.connection.call("COPY", self.copy, self.records, "REPLACE"):
            self.connection.call("DEL", self.records)
        return us

    def acquire_calls(self) -> float:
        return self._timed([self.acquire()] * CALLS)

    def _call(self, commands: list[Acquire] | list[Flush]) -> None:
        _check(self.connection.pipeline([command.frame(GUARD) for command in commands]))

    def _timed(self, commands: list[Acquire] | list[Flush]) -> float:
        us, replies = server_us(self.connection, [command.frame(GUARD) for command in commands])
        _check(replies)
        return us


def _name(number: int) -> str:
    return f"{number:010x}"


def _check(replies: list[object]) -> None:
    for reply in replies:
        if isinstance(reply, hiredis.ReplyError):
            raise RuntimeError(str(reply))
        if not isinstance(reply, list) or reply[1] < 0:
            raise RuntimeError(f"the script answered {reply!r}")


FLUSHES: dict[str, Callable[[RingWithSenders, bool], float]] = {
    "without a sender": RingWithSenders.flush_without_sender,
    "of a known sender": RingWithSenders.flush_of_known,
    "of a new sender": RingWithSenders.flush_of_new,
}


def _stale_name(pull: bool) -> str:
    return f"flush{' and pull' if pull else ''} of a new sender, half of 2,000 to be deleted"


def _flush_name(which: str, pull: bool, senders: int) -> str:
    return f"flush{' and pull' if pull else ''} {which}, {senders:,} other senders"


def _admission_name(senders: int) -> str:
    return f"acquire, {senders:,} other senders"


def run(quick: bool) -> Section:
    section = Section("senders", "senders: a flush and an acquire beside those of many processes")
    with running(last_core()) as server, Socket(server.port) as connection:
        for name in ("acquire", "flush"):
            connection.call("SCRIPT", "LOAD", load_script(name).text)
        contenders: dict[str, Trial] = {}
        rings = [RingWithSenders(connection, senders) for senders in SENDERS]
        for ring in rings:
            ring.prepare()
            contenders[_admission_name(ring.senders)] = ring.acquire_calls
            for which, trial in FLUSHES.items():
                for pull in (False, True):
                    if which == "without a sender" and ring.senders:
                        continue
                    name = _flush_name(which, pull, ring.senders)
                    contenders[name] = partial(trial, ring, pull)
        stale = RingWithSenders(connection, 1_000, stale=1_000)
        stale.prepare()
        for pull in (False, True):
            contenders[_stale_name(pull)] = partial(RingWithSenders.flush_of_new, stale, pull)
        results = run_rounds("senders", contenders, 5 if quick else 15)
        _report(section, results)
        _report_bytes(section, connection, rings)
    return section


def _report(section: Section, results: Results) -> None:
    for pull in (False, True):
        base = _flush_name("without a sender", pull, 0)
        for which in FLUSHES:
            for senders in SENDERS:
                name = _flush_name(which, pull, senders)
                if name in results.values and base in results.values:
                    ratio, us = results.ratio(name, base), results.median(name)
                    target = None if name == base else FLUSH_TARGET
                    section.add(name, ratio, target=target, detail=f"{us:.1f} µs")
        if _stale_name(pull) in results.values and base in results.values:
            ratio, us = results.ratio(_stale_name(pull), base), results.median(_stale_name(pull))
            section.add(_stale_name(pull), ratio, target=FLUSH_TARGET, detail=f"{us:.1f} µs")
    base = _admission_name(0)
    for senders in SENDERS:
        name = _admission_name(senders)
        if name in results.values and base in results.values:
            target = None if name == base else ACQUIRE_TARGET
            detail = f"{results.median(name):.2f} µs"
            section.add(name, results.ratio(name, base), target=target, detail=detail)
    section.add_failures(results.errors)
    log("senders: done")


def _report_bytes(section: Section, connection: Socket, rings: list[RingWithSenders]) -> None:
    for ring in rings:
        name = ring.acquire().charges[0].ring
        size, beside = (
            connection.call("MEMORY", "USAGE", each, "SAMPLES", 0) or 0
            for each in (name, keys.senders_name(name))
        )
        encoding = connection.call("OBJECT", "ENCODING", name).decode()
        section.add(
            f"bytes of the ring, {ring.senders:,} other senders",
            size,
            unit="B",
            detail=f"{encoding}; {beside:,} B of records beside it",
        )
