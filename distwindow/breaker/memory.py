"""Circuit breakers in this process: the specification of `breaker_flush`, `breaker_probe` and
`breaker_adaptive`.
"""

from __future__ import annotations

from ..ring.memory_rings import Handlers, MemoryValues
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


class MemoryBreakers:
    """The commands of circuit breakers. Callers hold the lock of the store."""

    def __init__(self, values: MemoryValues) -> None:
        self._values = values
        self.handlers: Handlers = {
            "breaker_flush": self._flush,
            "breaker_probe": self._probe,
            "breaker_adaptive": self._flush_adaptive,
        }

    def _flush(self, command: BreakerFlush, now: int) -> BreakerReply:
        rule, record = self._found(command, now)
        live = record.live_counts(rule, command.counts, now)
        newest, span = now // rule.bucket_ms, rule.buckets
        taken = bool(live) and not self._values.has_taken(command.name, command, newest, span)
        if taken:
            record.add(rule, live, now)
            self._values.put(command.name, record)
            self._values.remember(command.name, command, newest, span, record.expires_at_ms)
        return _reply(rule, record, taken, now)

    def _probe(self, command: BreakerProbe, now: int) -> BreakerReply:
        rule, record = self._found(command, now)
        if command.action == "take":
            done = record.take_probe(rule, command.probe_id, now)
        elif command.action == "renew":
            done = record.renew_probe(rule, command.probe_id, now)
        elif command.action in ("open", "close"):
            done = True
            getattr(record, command.action)(rule, now)
        else:
            done = record.end_probe(rule, command.probe_id, command.action, now)
        if done:
            self._values.put(command.name, record)
        return _reply(rule, record, done, now)

    def _flush_adaptive(self, command: AdaptiveFlush, now: int) -> AdaptiveReply:
        width, span = command.bucket_ms, command.buckets
        newest, expires_at_ms = now // width, now + (span + 1) * width
        record = self._values.get(command.name) or AdaptiveRecord()
        live = record.live_counts(command.counts, width, span, now)
        if live and not self._values.has_taken(command.name, command, newest, span):
            record.add(live, span)
            self._values.remember(command.name, command, newest, span, expires_at_ms)
        forced, passed_ms = record.note_pass(command.passed_ms, command.force_ms, now)
        if record.buckets or record.passed_ms:
            record.expires_at_ms = expires_at_ms
            self._values.put(command.name, record)
        window = tuple(record.window(width, span, now))
        return AdaptiveReply(forced, passed_ms, window, now)

    def _found(self, command: BreakerCommand, now: int) -> tuple[BreakerRule, BreakerRecord]:
        """Return the rule of `command` and its breaker, a new one if there is none."""
        assert command.rule is not None
        record = self._values.get(command.name)
        if record is None or now >= record.expires_at_ms:
            record = BreakerRecord()
        return command.rule, record


def _reply(rule: BreakerRule, record: BreakerRecord, done: bool, now: int) -> BreakerReply:
    total, bad = record.totals(rule, now)
    return BreakerReply(
        done, record.state, record.epoch, record.retry_in_ms(rule, now), total, bad, now
    )
