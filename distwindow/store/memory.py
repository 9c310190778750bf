"""The store in this process: it executes the commands over `core.ring`, under one lock.

It is `memory://`, and the specification that every other store is compared with.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Sequence
from threading import Lock
from typing import Any, TypeVar

from ..core.charge import Charge
from ..core.clock import SYSTEM, AsyncClock, Clock
from ..core.decision import Decision, Source
from ..core.errors import closed_failure
from ..core.limit import Limit
from ..core.ring import Ring, SenderRecords
from ..protocol.commands import Acquire, Command, Flush, Lease, Peek, Read, Refund, Reset
from ..protocol.decisions import admitted_decision, decision_of
from ..protocol.replies import AcquireReply, CountReply, FleetCounts, LeaseReply, ReadReply

Reply = TypeVar("Reply")

_MIN_SWEEP_SIZE = 1024
"""Up to this number of rings, none is dropped."""


class MemoryStore:
    """Rings in this process, for one process. Safe to share between threads.

    Rings expire as they do in Redis: after their window has passed without a call.
    """

    source: Source = "local"

    def __init__(
        self,
        clock: Clock = SYSTEM,
        rings: dict[bytes, Ring] | None = None,
        senders: dict[bytes, SenderRecords] | None = None,
    ) -> None:
        """`rings` and `senders`, by the names of the rings: where to keep them. A store that keeps
        rings elsewhere passes those of one command, and stores what is in the dicts after it.
        """
        self.clock = clock
        self._now_ms = clock.now_ms
        self.unknown_total = 0
        self._rings: dict[bytes, Ring] = {} if rings is None else rings
        self._senders: dict[bytes, SenderRecords] = {} if senders is None else senders
        self._lock: Lock | _Closed = threading.Lock()
        self._sweep_size = _MIN_SWEEP_SIZE
        self._handlers: dict[str, Callable[[Any, int], Any]] = {
            "acquire": self._acquire,
            "peek": self._peek,
            "lease": self._lease,
            "flush": self._flush,
            "refund": self._refund,
            "read": self._read,
            "reset": self._reset,
        }

    def execute(self, command: Command[Reply], deadline: float | None = None) -> Reply:
        """The reply that the script of `command` would give. Waits for nothing but the lock."""
        now = command.now_ms
        with self._lock:
            handler = self._handlers[command.script]
            reply: Reply = handler(command, self.clock.now_ms() if now is None else now)
            return reply

    def attempt(self, command: Acquire, deadline: float | None = None) -> Decision:
        """The decision on the reply of `execute`. With one ring that has room, and whose newest
        bucket is the current one, it is made without a reply, which is faster.
        """
        charges = command.charges
        name, limit, cost, _, _ = charges[0]
        with self._lock:
            ring = self._rings.get(name)
            if ring is not None and len(charges) == 1 and not command.write_limit:
                now = self._now_ms()
                age = now - ring.start
                left = limit.amount - ring.used - cost
                if 0 <= age < ring.bucket_ms and left >= 0:
                    ring.used += cost
                    return admitted_decision(
                        command, 0, left, ring.span * ring.bucket_ms - age, now, "local"
                    )
        return decision_of(command, self.execute(command), "local")

    def exchange(
        self, commands: Sequence[Command[Any]], deadline: float | None = None
    ) -> list[Any]:
        return [self.execute(command) for command in commands]

    def close(self) -> None:
        """Calls after this raise `ConfigurationError`."""
        self._lock = _Closed()

    def after_fork(self) -> None:
        """Make a new lock: one that another thread held at the fork would never be released."""
        if not isinstance(self._lock, _Closed):
            self._lock = threading.Lock()

    def _acquire(self, command: Acquire, now: int) -> AcquireReply:
        calls, rings, admitted = command.calls, [], command.calls
        for charge in command.charges:
            ring = self._ring_at(charge, now)
            rings.append(ring)
            admitted = min(admitted, max(0, (charge.limit.amount - ring.used) // charge.cost))
        for charge, ring in zip(command.charges, rings, strict=True):
            if command.write_limit:
                ring.limit = _limit_text(charge.limit)
            ring.used += charge.cost * admitted
            if admitted < calls:
                ring.count_blocked(charge.cost * (calls - admitted))
        reply = _acquire_reply(command.charges, rings, calls, admitted, now)
        starts = _bucket_starts(rings, now) if admitted else None
        return reply if starts is None else reply._replace(bucket_starts_ms=starts)

    def _peek(self, command: Peek, now: int) -> AcquireReply:
        rings = []
        for charge in command.charges:
            ring = self._rings.get(charge.ring)
            ring = ring.copy() if ring else _new_ring(charge, now)
            ring.rotate(now, ring.limit)
            rings.append(ring)
        room = all(
            ring.used + charge.cost <= charge.limit.amount
            for charge, ring in zip(command.charges, rings, strict=True)
        )
        return _acquire_reply(command.charges, rings, 1, int(room), now)

    def _lease(self, command: Lease, now: int) -> LeaseReply:
        charges = command.charges
        rings = [self._ring_at(charge, now) for charge in charges]
        min_left = min(
            charge.limit.amount - ring.used - charge.cost
            for charge, ring in zip(charges, rings, strict=True)
        )
        starts = _bucket_starts(rings, now)
        extra = max(0, min(command.extra, min_left // 2))
        if starts and len(rings) > 1:
            extra = 0
        for charge, ring in zip(charges, rings, strict=True):
            if min_left >= 0:
                ring.used += charge.cost + extra
            elif not command.prefetch:
                ring.count_blocked(charge.cost)
        reply = _acquire_reply(charges, rings, 1, int(min_left >= 0), now)
        if min_left < 0:
            return LeaseReply(reply, 0, 0)
        ends_ms = min(ring.start + ring.bucket_ms for ring in rings) - now
        return LeaseReply(reply._replace(bucket_starts_ms=starts), extra, ends_ms)

    def _flush(self, command: Flush, now: int) -> FleetCounts:
        passed = []
        for i, charge in enumerate(command.charges):
            before = self._rings.get(charge.ring)
            if before is not None and before.is_stale(now):
                before = None
            ring = before.copy() if before else _new_ring(charge, now)
            ring.rotate(now, _limit_text(charge.limit))
            added = bool(command.counts) and self._apply_flush(command, i, ring, now)
            exists = added or before is not None
            if added or (command.pull and exists):
                self._rings[charge.ring] = ring
            if command.pull:
                passed.append(ring.passed_by_start() if exists else {})
        return FleetCounts(tuple(passed), now)

    def _apply_flush(self, command: Flush, i: int, ring: Ring, now: int) -> bool:
        """Add the counts that are still in the window, unless this flush was applied before. True
        if any were added.
        """
        name, sender, seq = command.charges[i].ring, command.sender, command.seq
        records = self._senders.get(name)
        if sender and records is not None and records.has(sender, seq, ring):
            return False
        if not ring.add(command.counts[i]):
            return False
        if sender:
            if records is None:
                records = self._senders[name] = SenderRecords()
            records.remember(sender, seq, ring, now)
        return True

    def _refund(self, command: Refund, now: int) -> CountReply:
        refunded = []
        for charge, start in zip(command.charges, command.bucket_starts_ms(), strict=True):
            ring = self._rings.get(charge.ring)
            if ring is None or ring.is_stale(now):
                refunded.append(0)
            else:
                refunded.append(self._ring_at(charge, now).refund(charge.cost, start))
        return CountReply(min(refunded), now)

    def _read(self, command: Read, now: int) -> ReadReply:
        rings = (self._rings.get(charge.ring) for charge in command.charges)
        return ReadReply(tuple(ring.state() if ring else None for ring in rings), now)

    def _reset(self, command: Reset, now: int) -> CountReply:
        removed = [self._rings.pop(charge.ring, None) for charge in command.charges]
        return CountReply(sum(ring is not None for ring in removed), now)

    def _ring_at(self, charge: Charge, now: int) -> Ring:
        """The ring of `charge`, made if it does not exist, with its newest bucket at `now`."""
        ring = self._rings.get(charge.ring)
        if ring is None:
            if len(self._rings) >= self._sweep_size:
                self._sweep()
            ring = self._rings[charge.ring] = _new_ring(charge, now)
        elif now - ring.start >= ring.bucket_ms or now < ring.start:
            ring.rotate(now, _limit_text(charge.limit))
        return ring

    def _sweep(self) -> None:
        """Drop the rings that have expired. It is done again when the number of rings has doubled,
        so the cost per call is constant.
        """
        now = self.clock.now_ms()
        self._rings = {
            name: ring
            for name, ring in self._rings.items()
            if now < ring.start + (ring.span + 1) * ring.bucket_ms
        }
        self._senders = {
            name: records for name, records in self._senders.items() if now < records.expires_at
        }
        self._sweep_size = max(_MIN_SWEEP_SIZE, 2 * len(self._rings))


class _Closed:
    """Takes the place of the lock in a closed store, and raises. So calls of an open store need not
    check whether it is closed.
    """

    def __enter__(self) -> None:
        raise closed_failure()

    def __exit__(self, *exc: object) -> None: ...


class AsyncMemoryStore:
    """A `MemoryStore` for tasks."""

    source: Source = "local"

    def __init__(self, store: MemoryStore) -> None:
        self.clock = store.clock
        self.unknown_total = 0
        self._store = store
        self.decide = store.attempt
        """As `attempt`, for callers that need not await it."""

    async def attempt(self, command: Acquire, deadline: float | None = None) -> Decision:
        return self._store.attempt(command)

    async def execute(
        self,
        command: Command[Reply],
        deadline: float | None = None,
        on_late_reply: Callable[[Reply], object] | None = None,
    ) -> Reply:
        return self._store.execute(command)

    async def exchange(
        self, commands: Sequence[Command[Any]], deadline: float | None = None
    ) -> list[Any]:
        return self._store.exchange(commands)

    async def drain(self) -> None: ...

    async def sleep(self, seconds: float) -> None:
        if self.clock is SYSTEM:
            await asyncio.sleep(seconds)
        elif isinstance(self.clock, AsyncClock):
            await self.clock.sleep_async(seconds)
        else:
            self.clock.sleep(seconds)
            await asyncio.sleep(0)

    async def aclose(self) -> None:
        """Calls after this raise `ConfigurationError`."""
        self._store.close()


def _new_ring(charge: Charge, now: int) -> Ring:
    limit = charge.limit
    return Ring(limit.bucket_ms, limit.span, now, _limit_text(limit))


def _limit_text(limit: Limit) -> str:
    return f"{limit.amount} {limit.bound}"


def _acquire_reply(
    charges: tuple[Charge, ...], rings: list[Ring], calls: int, admitted: int, now: int
) -> AcquireReply:
    """The reply to `calls` equal calls, of which the first ones were admitted and counted."""
    if admitted == calls:
        index, left, reset = _most_restrictive(charges, rings, now)
        return AcquireReply(calls, index, left, reset, 0, now)
    index, latest = 0, -1
    for i, (charge, ring) in enumerate(zip(charges, rings, strict=True)):
        need = ring.used + charge.cost - charge.limit.amount
        if need > 0:
            room_at = ring.room_at_ms(need)
            if room_at > latest:
                index, latest = i, room_at
    ring = rings[index]
    admitted_by = _most_restrictive(charges, rings, now) if admitted else None
    left = charges[index].limit.amount - ring.used
    return AcquireReply(admitted, index, left, _reset_ms(ring, now), latest - now, now, admitted_by)


def _bucket_starts(rings: list[Ring], now: int) -> tuple[int, ...] | None:
    """The start of each ring's newest bucket if one of them is ahead of a clock that was set back;
    else None.
    """
    ahead = any(ring.start > now for ring in rings)
    return tuple(ring.start for ring in rings) if ahead else None


def _most_restrictive(
    charges: tuple[Charge, ...], rings: list[Ring], now: int
) -> tuple[int, int, int]:
    """Index, permits left and `reset_ms` of the ring that has the fewest permits left."""
    left = [charge.limit.amount - ring.used for charge, ring in zip(charges, rings, strict=True)]
    index = left.index(min(left))
    return index, left[index], _reset_ms(rings[index], now)


def _reset_ms(ring: Ring, now: int) -> int:
    """Ms until the window of `ring` is empty."""
    return max(0, ring.empty_at_ms() - now)
