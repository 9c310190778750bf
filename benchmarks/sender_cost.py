"""What a flush costs on a ring to which many other processes have flushed in its window.

The ring remembers what it has taken of which sender in a second hash. The rows say what that costs
at any number of senders: a flush, with and without pull, and an acquire, in microseconds of the
server (`INFO commandstats` around pipelined EVALSHA calls), and the bytes of both hashes.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from itertools import count

import hiredis

from benchmarks.measure import Results, Trial, rounds, say
from benchmarks.report import Section, Target
from benchmarks.resp import Socket
from benchmarks.server import last_core, running
from benchmarks.server_cost import GUARD, timed
from distwindow.core.limit import Limit
from distwindow.core.stats import Bucket
from distwindow.protocol import keys
from distwindow.protocol import scripts as script
from distwindow.protocol.commands import CURRENT_BUCKET, Acquire, Flush, charges_of

TWICE = Target(2)
SAME = Target(1.15)
SENDERS = (0, 100, 400, 2_000, 20_000)
"""400 still lie in one compact block, where looking for one that is absent is dearest."""

LIMIT = Limit(10**9, per=86_400, buckets=24)
COUNTS = (Bucket(CURRENT_BUCKET, 1),)
CALLS = 100
"""In a trial; of new senders only so many that they do not change what is measured."""
NEW = 100


@dataclass
class Scene:
    """A ring with a pass in each of its 24 buckets, and so many senders' records beside it."""

    connection: Socket
    senders: int
    stale: int = 0
    """So many besides that were heard of two windows ago, and are to be deleted."""
    records: bytes = b""
    kept: bytes = b""
    names: Iterator[int] = field(default_factory=lambda: count(10**9))
    numbers: Iterator[int] = field(default_factory=lambda: count(2))

    def prepare(self) -> None:
        now = int(time.time() * 1000)
        before = now - 2 * LIMIT.interval_ms
        seen = (Bucket(before, 1),)
        self._call([self.flush(_name(10**8 + i), 1, seen).at(before) for i in range(self.stale)])
        self._call([self.acquire(now - age * LIMIT.bucket_ms) for age in range(23, -1, -1)])
        self._call([self.flush(_name(i), 1) for i in range(self.senders)])
        ring = self.acquire().charges[0].ring
        self.records, self.kept = keys.senders_name(ring), keys.senders_name(ring) + b":kept"
        self.connection.call("COPY", self.records, self.kept)

    def acquire(self, now_ms: int | None = None) -> Acquire:
        stem = keys.key_prefix("distwindow", f"senders:{self.senders}:{self.stale}")
        return Acquire(charges_of("user", stem, [LIMIT], 1), now_ms)

    def flush(
        self, sender: str, seq: int, counts: tuple[Bucket, ...] = COUNTS, *, pull: bool = False
    ) -> Flush:
        charges = self.acquire().charges
        return Flush(charges, counts=(counts,), sender=sender, seq=seq, pull=pull)

    def of_nobody(self, pull: bool) -> float:
        """Without a sender: counted each time, and nothing is remembered."""
        return self._timed([self.flush("", 1, pull=pull)] * CALLS)

    def of_the_last(self, pull: bool) -> float:
        """A sender that has been heard of: the one whose record is farthest from the beginning."""
        last = _name(max(0, self.senders - 1))
        flushes = [self.flush(last, next(self.numbers), pull=pull) for _ in range(CALLS)]
        return self._timed(flushes)

    def of_the_new(self, pull: bool) -> float:
        """Each flush comes from a process never heard of. Then all records are as before."""
        names = [_name(next(self.names)) for _ in range(NEW)]
        us = self._timed([self.flush(name, 1, pull=pull) for name in names])
        if not self.connection.call("COPY", self.kept, self.records, "REPLACE"):
            self.connection.call("DEL", self.records)
        return us

    def admission(self) -> float:
        return self._timed([self.acquire()] * CALLS)

    def _call(self, commands: list[Acquire] | list[Flush]) -> None:
        _check(self.connection.pipeline([command.frame(GUARD) for command in commands]))

    def _timed(self, commands: list[Acquire] | list[Flush]) -> float:
        us, replies = timed(self.connection, [command.frame(GUARD) for command in commands])
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


FLUSHES: dict[str, Callable[[Scene, bool], float]] = {
    "of nobody": Scene.of_nobody,
    "of a known sender": Scene.of_the_last,
    "of a new sender": Scene.of_the_new,
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
            connection.call("SCRIPT", "LOAD", script.load_script(name).text)
        contenders: dict[str, Trial] = {}
        scenes = [Scene(connection, senders) for senders in SENDERS]
        for scene in scenes:
            scene.prepare()
            contenders[_admission_name(scene.senders)] = scene.admission
            for which, trial in FLUSHES.items():
                for pull in (False, True):
                    if which == "of nobody" and scene.senders:
                        continue
                    name = _flush_name(which, pull, scene.senders)
                    contenders[name] = partial(trial, scene, pull)
        stale = Scene(connection, 1_000, stale=1_000)
        stale.prepare()
        for pull in (False, True):
            contenders[_stale_name(pull)] = partial(Scene.of_the_new, stale, pull)
        results = rounds("senders", contenders, 5 if quick else 15)
        _report(section, results)
        _report_bytes(section, connection, scenes)
    return section


def _report(section: Section, results: Results) -> None:
    for pull in (False, True):
        base = _flush_name("of nobody", pull, 0)
        for which in FLUSHES:
            for senders in SENDERS:
                name = _flush_name(which, pull, senders)
                if name in results.values and base in results.values:
                    ratio, us = results.ratio(name, base), results.median(name)
                    target = None if name == base else TWICE
                    section.add(name, ratio, target=target, detail=f"{us:.1f} µs")
        if _stale_name(pull) in results.values and base in results.values:
            ratio, us = results.ratio(_stale_name(pull), base), results.median(_stale_name(pull))
            section.add(_stale_name(pull), ratio, target=TWICE, detail=f"{us:.1f} µs")
    base = _admission_name(0)
    for senders in SENDERS:
        name = _admission_name(senders)
        if name in results.values and base in results.values:
            target = None if name == base else SAME
            detail = f"{results.median(name):.2f} µs"
            section.add(name, results.ratio(name, base), target=target, detail=detail)
    section.failed(results.errors)
    say("senders: done")


def _report_bytes(section: Section, connection: Socket, scenes: list[Scene]) -> None:
    for scene in scenes:
        ring = scene.acquire().charges[0].ring
        size, beside = (
            connection.call("MEMORY", "USAGE", name, "SAMPLES", 0) or 0
            for name in (ring, keys.senders_name(ring))
        )
        encoding = connection.call("OBJECT", "ENCODING", ring).decode()
        section.add(
            f"bytes of the ring, {scene.senders:,} other senders",
            size,
            unit="B",
            detail=f"{encoding}; {beside:,} B of records beside it",
        )
