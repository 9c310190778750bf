"""Values of a store in this process, and the commands on plain rings, executed on it: the
specification of their scripts.

Each feature has a `memory.py` with its own commands, and keeps what it stores beside the rings.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

from .commands import Acquire, Flush, Lease, Peek, Read, Refund, Reset
from .decision import BorrowedCharge, Charge
from .key import senders_name
from .limit import Limit
from .replies import AcquireReply, CountReply, FleetCounts, LeaseReply, ReadReply
from .ring import RETIRED_START, Ring, SenderRecords


def acquire_reply(
    charges: tuple[Charge, ...], rings: list[Ring], calls: int, admitted: int, now: int
) -> AcquireReply:
    """The reply to `calls` equal calls, of which the first ones were admitted and counted."""
    if admitted == calls:
        index, left, reset = binding_ring(charges, rings, now)
        return AcquireReply(calls, index, left, reset, 0, now)
    index, latest = 0, -1
    for i, (charge, ring) in enumerate(zip(charges, rings, strict=True)):
        need = ring.peak + charge.cost - charge.limit.amount
        if need > 0:
            room_at = ring.room_at_ms(need)
            if room_at > latest:
                index, latest = i, room_at
    ring = rings[index]
    admitted_by = binding_ring(charges, rings, now) if admitted else None
    left = charges[index].limit.amount - ring.peak
    return AcquireReply(admitted, index, left, reset_ms(ring, now), latest - now, now, admitted_by)


def bucket_starts(rings: list[Ring], now: int) -> tuple[int, ...] | None:
    """The newest buckets' starts if one is ahead of a clock that was set back; else None."""
    ahead = any(ring.start > now for ring in rings)
    return tuple(ring.start for ring in rings) if ahead else None


def binding_ring(charges: tuple[Charge, ...], rings: list[Ring], now: int) -> tuple[int, int, int]:
    """Index, permits left and `reset_ms` of the ring that has the fewest permits left."""
    left = [charge.limit.amount - ring.peak for charge, ring in zip(charges, rings, strict=True)]
    index = left.index(min(left))
    return index, left[index], reset_ms(rings[index], now)


def reset_ms(ring: Ring, now: int) -> int:
    """Ms until the window of `ring` is empty."""
    return max(0, ring.empty_at_ms() - now)


_MIN_SWEEP_SIZE = 1024
"""Up to this number of values, none is dropped."""

Handlers: TypeAlias = "dict[str, Callable[[Any, int], Any]]"
"""By the name of a script: what executes its command at this time (ms), and returns the reply."""


class MemoryValues:
    """Everything that is stored, by the names that it has in Redis. Each value has
    `expires_at_ms`, and is dropped some time later. Callers hold the lock of the store.
    """

    def __init__(self, values: dict[bytes, Any], now_ms: Callable[[], int]) -> None:
        self.by_name = values
        self.get = values.get
        self._now_ms = now_ms
        self._sweep_size = _MIN_SWEEP_SIZE

    def put(self, name: bytes, value: Any) -> None:
        """Store `value` under this name."""
        if name not in self.by_name and len(self.by_name) >= self._sweep_size:
            self._sweep()
        self.by_name[name] = value

    def remove(self, name: bytes) -> bool:
        """Remove the value of this name. Return True if there was one."""
        value = self.by_name.get(name)
        if isinstance(value, Ring):
            # First, so that no linked command counts in a ring that nobody finds.
            value.shortcut_start = RETIRED_START
        return self.by_name.pop(name, None) is not None

    def has_taken(self, name: bytes, flush: Any, newest: int, span: int) -> bool:
        """True if the value of this name has taken `flush`, or a later one of its sender. Its
        newest bucket has the number `newest`, and it has `span` of them.
        """
        records: SenderRecords | None = self.get(senders_name(name))
        if not flush.sender or records is None:
            return False
        return records.has(flush.sender, flush.seq, newest, span)

    def remember(self, name: bytes, flush: Any, newest: int, span: int, expires_at_ms: int) -> None:
        """Note that the value of this name has taken `flush`; see `has_taken`."""
        if flush.sender:
            records = self.get(senders_name(name)) or SenderRecords()
            records.remember(flush.sender, flush.seq, newest, span, expires_at_ms)
            self.put(senders_name(name), records)

    def _sweep(self) -> None:
        """Drop what has expired by the clock of the store: a command may bear the time of a client
        whose clock is ahead. It is done again when the number of values has doubled, so the cost
        per call is constant.
        """
        now = self._now_ms()
        for name in [name for name, value in self.by_name.items() if now >= value.expires_at_ms]:
            self.remove(name)
        self._sweep_size = max(_MIN_SWEEP_SIZE, 2 * len(self.by_name))


class MemoryRings:
    """The commands on plain rings. Callers hold the lock of the store."""

    def __init__(self, values: MemoryValues) -> None:
        self._values = values
        self.handlers: Handlers = {
            "acquire": self.acquire,
            "peek": self._peek,
            "lease": self._lease,
            "flush": self._flush,
            "refund": self._refund,
            "read": self.read,
            "reset": self._reset,
        }

    def ring_at(self, charge: Charge, now: int) -> Ring:
        """Return the ring of `charge`, or a new one. Its newest bucket is that of `now`."""
        ring: Ring | None = self._values.get(charge.ring)
        if ring is None:
            ring = new_ring(charge, now)
            self._values.put(charge.ring, ring)
        elif now - ring.start >= ring.bucket_ms or now < ring.start:
            ring.rotate(now, limit_text(charge.limit))
        return ring

    def copies_at(self, charges: tuple[Charge, ...], now: int) -> list[Ring]:
        """Return copies of the rings of `charges`, rotated to `now`."""
        rings = []
        for charge in charges:
            ring = self._values.get(charge.ring)
            ring = ring.copy() if ring else new_ring(charge, now)
            ring.rotate(now, ring.limit)
            rings.append(ring)
        return rings

    def acquire(self, command: Acquire, now: int) -> AcquireReply:
        """See `lua/acquire.lua`."""
        calls, rings, admitted = command.calls, [], command.calls
        for charge in command.charges:
            ring = self.ring_at(charge, now)
            rings.append(ring)
            admitted = min(admitted, max(0, (charge.limit.amount - ring.peak) // charge.cost))
        for charge, ring in zip(command.charges, rings, strict=True):
            if command.write_limit:
                ring.limit = limit_text(charge.limit)
            ring.used += charge.cost * admitted
            if admitted < calls:
                ring.count_blocked(charge.cost * (calls - admitted))
        reply = acquire_reply(command.charges, rings, calls, admitted, now)
        # In an empty window only a cost above the limit is refused, and `reset_ms` stays 0.
        if admitted < calls and len(rings) == 1 and rings[0].used:
            (charge,), (ring,) = command.charges, rings
            room_at, empty_at = now + reply.retry_ms, now + reply.reset_ms
            left = max(0, reply.left)
            ring.store_refusal(charge.limit.amount, charge.cost, left, room_at, empty_at)
        starts = bucket_starts(rings, now) if admitted else None
        return reply if starts is None else reply._replace(bucket_starts_ms=starts)

    def _peek(self, command: Peek, now: int) -> AcquireReply:
        rings = self.copies_at(command.charges, now)
        room = all(
            ring.peak + charge.cost <= charge.limit.amount
            for charge, ring in zip(command.charges, rings, strict=True)
        )
        return acquire_reply(command.charges, rings, 1, int(room), now)

    def _lease(self, command: Lease, now: int) -> LeaseReply:
        charges = command.charges
        rings = [self.ring_at(charge, now) for charge in charges]
        min_left = min(
            charge.limit.amount - ring.peak - charge.cost
            for charge, ring in zip(charges, rings, strict=True)
        )
        starts = bucket_starts(rings, now)
        extra = max(0, min(command.extra, min_left // 2))
        if starts and len(rings) > 1:
            extra = 0
        for charge, ring in zip(charges, rings, strict=True):
            if min_left >= 0:
                ring.used += charge.cost + extra
            elif not command.prefetch:
                ring.count_blocked(charge.cost)
        reply = acquire_reply(charges, rings, 1, int(min_left >= 0), now)
        if min_left < 0:
            return LeaseReply(reply, 0, 0)
        ends_ms = min(ring.start + ring.bucket_ms for ring in rings) - now
        return LeaseReply(reply._replace(bucket_starts_ms=starts), extra, ends_ms)

    def _flush(self, command: Flush, now: int) -> FleetCounts:
        passed = []
        for i, charge in enumerate(command.charges):
            present: Ring | None = self._values.get(charge.ring)
            live = None if present is None or present.is_stale(now) else present
            ring = live.copy() if live else new_ring(charge, now)
            ring.rotate(now, limit_text(charge.limit))
            added = bool(command.counts) and self._add_flushed(command, i, ring, now)
            exists = added or live is not None
            if added or (command.pull and exists):
                # Looked up again, as `_add_flushed` may have dropped values that have expired.
                if (present := self._values.get(charge.ring)) is None:
                    self._values.put(charge.ring, ring)
                else:  # its content, as commands may be linked to the present ring of this name
                    present.replace_with(ring)
            if command.pull:
                passed.append(ring.passed_by_start() if exists else {})
        return FleetCounts(tuple(passed), now)

    def _refund(self, command: Refund, now: int) -> CountReply:
        refunded = []
        for charge, start in zip(command.charges, command.bucket_starts_ms(), strict=True):
            ring = self._values.get(charge.ring)
            if ring is None or ring.is_stale(now):
                refunded.append(0)
            else:
                borrowed = isinstance(charge, BorrowedCharge)
                ring = self.ring_at(charge, now)
                refunded.append(ring.refund(charge.cost, start, borrowed=borrowed))
        return CountReply(max(refunded), now)

    def read(self, command: Read, now: int) -> ReadReply:
        """See `lua/read.lua`."""
        rings = (self._values.get(charge.ring) for charge in command.charges)
        states = tuple(ring.state() if ring else None for ring in rings)
        return ReadReply(states, now)

    def _reset(self, command: Reset, now: int) -> CountReply:
        removed = [self._values.remove(charge.ring) for charge in command.charges]
        return CountReply(sum(removed), now)

    def _add_flushed(self, command: Flush, i: int, ring: Ring, now: int) -> bool:
        """Add counts that are still in the window, once for each flush. True if any were added."""
        name, newest, span = command.charges[i].ring, ring.newest_number, ring.span
        if self._values.has_taken(name, command, newest, span) or not ring.add(command.counts[i]):
            return False
        expires_at_ms = max(ring.start, now) + (span + 1) * ring.bucket_ms
        self._values.remember(name, command, newest, span, expires_at_ms)
        return True


def new_ring(charge: Charge, now: int) -> Ring:
    """Return an empty ring for `charge`."""
    limit = charge.limit
    return Ring(limit.bucket_ms, limit.span, now, limit_text(limit))


def limit_text(limit: Limit) -> str:
    """Return the limit as rings keep it."""
    return f"{limit.amount} {limit.bound}"
