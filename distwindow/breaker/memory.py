"""Circuit breakers in this process: the specification of `breaker_flush`, `breaker_probe` and
`breaker_adaptive`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from .commands import (
    AdaptiveFlush,
    AdaptiveReply,
    BreakerCommand,
    BreakerFlush,
    BreakerProbe,
    BreakerReply,
)
from .record import AdaptiveRecord, BreakerRecord
from .rules import BreakerRule

_MIN_SWEEP_SIZE = 1024
"""Up to this number of breakers, none is dropped."""


class MemoryAdaptive:
    """Adaptive breakers by their names. Not safe to share between threads: the store has a lock."""

    def __init__(self) -> None:
        self.records: dict[bytes, AdaptiveRecord] = {}
        self._senders: dict[bytes, dict[str, tuple[int, int]]] = {}
        """By breaker and sender: the last `seq` that was taken, and the newest bucket then."""
        self._used_ms: dict[bytes, int] = {}
        self._sweep_size = _MIN_SWEEP_SIZE
        self.handlers: dict[str, Callable[[Any, int], Any]] = {"breaker_adaptive": self._flush}

    def _flush(self, command: AdaptiveFlush, now: int) -> AdaptiveReply:
        width, span = command.bucket_ms, command.buckets
        record = self.records.get(command.name) or AdaptiveRecord()
        live = record.live_counts(command.counts, width, span, now)
        if live and not self._is_taken(command, now):
            record.add(live, span)
            if command.sender:
                senders = self._senders.setdefault(command.name, {})
                if command.sender not in senders:
                    for sender in [s for s, r in senders.items() if r[1] <= now // width - span]:
                        del senders[sender]
                senders[command.sender] = (command.seq, now // width)
        forced, passed_ms = record.note_pass(command.passed_ms, command.force_ms, now)
        if record.buckets or record.passed_ms:
            self._keep(command, record, now)
        window = tuple(record.window(width, span, now))
        return AdaptiveReply(forced, passed_ms, window, now)

    def _is_taken(self, command: AdaptiveFlush, now: int) -> bool:
        known = self._senders.get(command.name, {}).get(command.sender)
        if not command.sender or known is None:
            return False
        newest = now // command.bucket_ms
        return command.seq <= known[0] and known[1] > newest - command.buckets

    def _keep(self, command: AdaptiveFlush, record: AdaptiveRecord, now: int) -> None:
        name = command.name
        self.records[name] = record
        self._used_ms[name] = now + (command.buckets + 1) * command.bucket_ms
        if len(self.records) >= self._sweep_size:
            expired = [name for name, until in self._used_ms.items() if until <= now]
            for each in expired:
                del self.records[each], self._used_ms[each]
                self._senders.pop(each, None)
            self._sweep_size = max(_MIN_SWEEP_SIZE, 2 * len(self.records))


class SenderRecord(NamedTuple):
    """The last flush that a breaker has taken of a sender."""

    seq: int
    number: int
    """The newest bucket then."""


class MemoryBreakers:
    """Breakers by their names. Not safe to share between threads: the store has a lock."""

    def __init__(self) -> None:
        self.records: dict[bytes, BreakerRecord] = {}
        self._senders: dict[bytes, dict[str, SenderRecord]] = {}
        self._sweep_size = _MIN_SWEEP_SIZE
        self.handlers: dict[str, Callable[[Any, int], Any]] = {
            "breaker_flush": self._flush,
            "breaker_probe": self._probe,
        }

    def _flush(self, command: BreakerFlush, now: int) -> BreakerReply:
        rule, record = self._found(command, now)
        live = record.live_counts(rule, command.counts, now)
        taken = bool(live) and not self._is_taken(command, rule, now)
        if taken:
            record.add(rule, live, now)
            if command.sender:
                self._remember(command, rule, now)
            self._keep(command.name, record, now)
        return _reply(rule, record, taken, now)

    def _probe(self, command: BreakerProbe, now: int) -> BreakerReply:
        rule, record = self._found(command, now)
        if command.action == "take":
            done = record.take_probe(rule, command.probe_id, now)
        elif command.action == "renew":
            done = record.renew_probe(rule, command.probe_id, now)
        else:
            done = record.end_probe(rule, command.probe_id, command.action, now)
        if done:
            self._keep(command.name, record, now)
        return _reply(rule, record, done, now)

    def _found(self, command: BreakerCommand, now: int) -> tuple[BreakerRule, BreakerRecord]:
        """Return the rule of `command` and its breaker, a new one if there is none."""
        assert command.rule is not None
        record = self.records.get(command.name)
        if record is None or now >= record.expires_ms:
            record = BreakerRecord()
        return command.rule, record

    def _keep(self, name: bytes, record: BreakerRecord, now: int) -> None:
        self.records[name] = record
        if len(self.records) >= self._sweep_size:
            alive = {n: r for n, r in self.records.items() if now < r.expires_ms}
            self.records = alive
            self._senders = {n: s for n, s in self._senders.items() if n in alive}
            self._sweep_size = max(_MIN_SWEEP_SIZE, 2 * len(alive))

    def _is_taken(self, command: BreakerFlush, rule: BreakerRule, now: int) -> bool:
        """True if the breaker has taken this flush, or a later one of its sender. A record is
        valid until its bucket has expired, because whatever may be sent again has then expired.
        """
        known = self._senders.get(command.name, {}).get(command.sender)
        if not command.sender or known is None:
            return False
        return command.seq <= known.seq and known.number > now // rule.bucket_ms - rule.buckets

    def _remember(self, command: BreakerFlush, rule: BreakerRule, now: int) -> None:
        newest = now // rule.bucket_ms
        records = self._senders.setdefault(command.name, {})
        if command.sender not in records:
            for sender in [s for s, r in records.items() if r.number <= newest - rule.buckets]:
                del records[sender]
        records[command.sender] = SenderRecord(command.seq, newest)


def _reply(rule: BreakerRule, record: BreakerRecord, done: bool, now: int) -> BreakerReply:
    total, bad = record.totals(rule, now)
    return BreakerReply(
        done,
        record.state,
        record.epoch,
        record.retry_in_ms(rule, now),
        total,
        bad,
        now,
    )
