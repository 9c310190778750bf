"""Adaptive breakers in this process: the specification of `breaker_adaptive`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ..core.adaptive_record import AdaptiveRecord
from ..protocol.adaptive_commands import AdaptiveFlush, AdaptiveReply

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
