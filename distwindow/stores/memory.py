"""The store in this process, for threads and tasks: it executes the commands under one lock.

It is `memory://`, and the specification that every other store is compared with.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Sequence
from threading import Lock
from typing import Any, TypeAlias, TypeVar

from ..borrow.commands import Borrow, BorrowReply
from ..borrow.memory import borrow
from ..breaker.memory import MemoryAdaptive, MemoryBreakers
from ..concurrency.memory import slot_handlers
from ..errors import ConfigurationError, closed_failure
from ..minute.memory import MemoryViews
from ..ring.clock import SYSTEM, AsyncClock, Clock
from ..ring.command import Command
from ..ring.commands import Acquire, Flush, Lease, Peek, Read, Refund, Reset
from ..ring.decision import BorrowedCharge, Charge, Decision, Source
from ..ring.key import AnyKey, shaping_name
from ..ring.limit import Limit
from ..ring.memory_replies import acquire_reply, bucket_starts
from ..ring.memory_rings import MemoryRings, limit_text, new_ring
from ..ring.replies import AcquireReply, CountReply, FleetCounts, LeaseReply, ReadReply
from ..ring.ring import Ring, SenderRecords
from ..runtime.decisions import decision_of
from ..shaping.commands import AcquireShaped, PeekShaped, ReadShaped
from ..shaping.memory import decide_shaped, read_shapings
from ..shaping.shaping import ShapingState
from ..waiting.commands import AcquireTurn, TurnReply
from ..waiting.line import Line

# --------------------------------------------------------------------------------------------------
#
# The store in this process: it executes the commands over `core.ring`, under one lock.
#
# It is `memory://`, and the specification that every other store is compared with.

Reply = TypeVar("Reply")

_RingLink: TypeAlias = "tuple[MemoryStore, Ring, int, int, int, Limit, int, AnyKey]"
"""What a command keeps of its only ring (`Acquire.ring_link`): (store, ring, `bucket_ms`, ms of the
window, amount, limit, cost, key). A plain tuple, which is unpacked fastest.
"""
_new_tuple = tuple.__new__


class MemoryStore(MemoryRings):
    """Rings in this process, for one process. Safe to share between threads.

    A ring whose window has passed without a call is dropped when many new ones have been made.
    """

    source: Source = "local"

    def __init__(
        self,
        clock: Clock = SYSTEM,
        rings: dict[bytes, Ring] | None = None,
        senders: dict[bytes, SenderRecords] | None = None,
        *,
        slots: dict[bytes, dict[bytes, int]] | None = None,
        shapings: dict[bytes, ShapingState] | None = None,
        lines: dict[bytes, Line] | None = None,
    ) -> None:
        """`rings` and `senders`, by the names of the rings, `slots`, by their own names,
        `shapings`, by their `shaping_name`, and `lines`, by their `line_name`: where to keep them.
        A store that keeps rings elsewhere passes those of one command, and stores what is in the
        dicts after it. With `rings` alone, concurrency limits are refused.
        """
        super().__init__(clock, rings, senders, shapings, lines)
        self._now_ms = clock.now_ms
        self.unknown_total = 0
        self._lock: Lock | _Closed = threading.Lock()
        self._handlers: dict[str, Callable[[Any, int], Any]] = {
            "acquire": self._acquire,
            "acquire_shaped": self._acquire_shaped,
            "acquire_turn": self._acquire_turn,
            "peek_shaped": self._peek_shaped,
            "peek": self._peek,
            "borrow": self._borrow,
            "lease": self._lease,
            "flush": self._flush,
            "refund": self._refund,
            "read": self._read,
            "reset": self._reset,
        }
        self._handlers |= slot_handlers(slots, kept_elsewhere=rings is not None)
        self.keeps_views = rings is None
        """False for a store that keeps rings elsewhere: it would lose minute views."""
        if self.keeps_views:  # and breakers
            self._handlers |= MemoryBreakers().handlers | MemoryAdaptive().handlers
            self._handlers |= MemoryViews().handlers

    def execute(self, command: Command[Reply], deadline: float | None = None) -> Reply:
        """The reply that the script of `command` would give. Waits for nothing but the lock."""
        now = command.now_ms
        with self._lock:
            handler = self._handlers.get(command.script)
            if handler is None:
                raise ConfigurationError(f"this store cannot execute {command.script!r}")
            reply: Reply = handler(command, self.clock.now_ms() if now is None else now)
            return reply

    def attempt(self, command: Acquire, deadline: float | None = None) -> Decision:
        """The decision on the reply of `execute`. For a command that is linked to its ring, it is
        made without a reply, which takes a fifth of the time, if the newest bucket is the current
        one and has room, or has a refusal to repeat.
        """
        link: _RingLink | None = command.ring_link or self._link(command)
        if link is None:
            return self._attempt_by_reply(command, deadline)
        store, ring, bucket_ms, window_ms, amount, limit, cost, key = link
        now = self._now_ms()
        admitted, refusal = False, None
        # No call while the lock is held: a signal handler that calls the limiter would wait for it.
        with self._lock:
            age = now - ring.shortcut_start
            left = amount - ring.used - cost
            if 0 <= age < bucket_ms and store is self:
                if left >= 0:
                    ring.used += cost
                    admitted = True
                elif ring.refusal is not None:
                    of_amount, used, least, greatest, counters, stored = ring.refusal
                    if used == ring.used and of_amount == amount and least <= cost <= greatest:
                        counters[0] += cost
                        refusal = stored
        if admitted:
            return _new_tuple(
                Decision,
                (
                    True, key, cost, limit, left, 0.0, (window_ms - age) / 1000, 0.0, "ok",
                    "local", now, command.charges,
                ),
            )  # fmt: skip
        if refusal is None:
            if age < bucket_ms or store is not self:
                return self._attempt_by_reply(command, deadline)
            with self._lock:
                if now - ring.shortcut_start >= bucket_ms:  # not dropped meanwhile
                    ring.rotate(now, limit_text(limit))
            return self.attempt(command, deadline)  # in the bucket that this has opened
        left, room_at, empty_at = refusal
        return _new_tuple(
            Decision,
            (
                False, key, cost, limit, left, (room_at - now) / 1000, (empty_at - now) / 1000,
                0.0, "over_limit", "local", now, None,
            ),
        )  # fmt: skip

    def _attempt_by_reply(self, command: Acquire, deadline: float | None) -> Decision:
        """Do as `attempt`, by a reply."""
        decision = decision_of(command, self.execute(command, deadline), "local")
        link = command.ring_link
        if link is not None and link[1] is not self._rings.get(command.charges[0].ring):
            self._link(command)  # its ring was dropped
        return decision

    def _link(self, command: Acquire) -> _RingLink | None:
        """Link `command` to its only ring, if it has one ring that exists and needs no reply."""
        charges = command.charges
        name, limit, cost, key, _ = charges[0]
        ring = self._rings.get(name)
        if ring is None or len(charges) > 1 or command.write_limit or command.now_ms is not None:
            return None
        if limit.is_shaped:
            return None
        window_ms = limit.span * limit.bucket_ms
        link = (self, ring, limit.bucket_ms, window_ms, limit.amount, limit, cost, key)
        command.ring_link = link
        return link

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
            _store_refusal(command.charges[0], rings[0], reply)
        starts = bucket_starts(rings, now) if admitted else None
        return reply if starts is None else reply._replace(bucket_starts_ms=starts)

    def _acquire_turn(self, command: AcquireTurn, now: int) -> TurnReply:
        reply = self._acquire(Acquire(command.charges), now)
        rings = [self._rings[charge.ring] for charge in command.charges]
        return self._lines.turn(command, reply, rings, now)

    def _borrow(self, command: Borrow, now: int) -> BorrowReply:
        return borrow(command, [self._ring_at(charge, now) for charge in command.charges], now)

    def _acquire_shaped(self, command: AcquireShaped, now: int) -> AcquireReply:
        charges = command.charges
        rings = [self._ring_at(charge, now) for charge in charges]
        names = [shaping_name(charge.ring) for charge in charges]
        states = [self._shapings.get(name) for name in names]
        call = decide_shaped(charges, rings, states, command.cap_ms, now)
        for charge, ring in zip(charges, rings, strict=True):
            if command.write_limit:
                ring.limit = limit_text(charge.limit)
        for name, state in zip(names, call.count_call(), strict=True):
            if state is not None:
                self._shapings[name] = state
        return call.reply()

    def _peek_shaped(self, command: PeekShaped, now: int) -> AcquireReply:
        charges = command.charges
        states = [self._shapings.get(shaping_name(charge.ring)) for charge in charges]
        call = decide_shaped(charges, self._copies_at(charges, now), states, None, now)
        return call.reply()._replace(bucket_starts_ms=None)  # nothing is counted

    def _peek(self, command: Peek, now: int) -> AcquireReply:
        rings = self._copies_at(command.charges, now)
        room = all(
            ring.peak + charge.cost <= charge.limit.amount
            for charge, ring in zip(command.charges, rings, strict=True)
        )
        return acquire_reply(command.charges, rings, 1, int(room), now)

    def _lease(self, command: Lease, now: int) -> LeaseReply:
        charges = command.charges
        rings = [self._ring_at(charge, now) for charge in charges]
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
            before = self._rings.get(charge.ring)
            if before is not None and before.is_stale(now):
                before = None
            ring = before.copy() if before else new_ring(charge, now)
            ring.rotate(now, limit_text(charge.limit))
            added = bool(command.counts) and self._add_flushed(command, i, ring, now)
            exists = added or before is not None
            if added or (command.pull and exists):
                self._put(charge.ring, ring)
            if command.pull:
                passed.append(ring.passed_by_start() if exists else {})
        return FleetCounts(tuple(passed), now)

    def _refund(self, command: Refund, now: int) -> CountReply:
        refunded = []
        for charge, start in zip(command.charges, command.bucket_starts_ms(), strict=True):
            ring = self._rings.get(charge.ring)
            if ring is None or ring.is_stale(now):
                refunded.append(0)
            else:
                borrowed = isinstance(charge, BorrowedCharge)
                ring = self._ring_at(charge, now)
                refunded.append(ring.refund(charge.cost, start, borrowed=borrowed))
        return CountReply(max(refunded), now)

    def _read(self, command: Read, now: int) -> ReadReply:
        rings = (self._rings.get(charge.ring) for charge in command.charges)
        states = tuple(ring.state() if ring else None for ring in rings)
        if isinstance(command, ReadShaped):
            return ReadReply(states, now, read_shapings(command.charges, self._shapings))
        return ReadReply(states, now)

    def _reset(self, command: Reset, now: int) -> CountReply:
        removed = [self._remove(charge.ring) for charge in command.charges]
        return CountReply(sum(removed), now)


class _Closed:
    """Takes the place of the lock in a closed store, and raises. So calls of an open store need not
    check whether it is closed.
    """

    def __enter__(self) -> None:
        raise closed_failure()

    def __exit__(self, *exc: object) -> None: ...


def _store_refusal(charge: Charge, ring: Ring, reply: AcquireReply) -> None:
    """Keep the refusal `reply` in its ring, for `attempt` to repeat."""
    ring.store_refusal(
        charge.limit.amount,
        charge.cost,
        max(0, reply.left),
        reply.now_ms + reply.retry_ms,
        reply.now_ms + reply.reset_ms,
    )


class AsyncMemoryStore:
    """A `MemoryStore` for tasks."""

    source: Source = "local"

    def __init__(self, store: MemoryStore) -> None:
        self.clock = store.clock
        self.unknown_total = 0
        self.memory = self._store = store
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
