"""The store in this process, for threads and tasks: it executes the commands under one lock.

It is `memory://`, and the specification that every other store is compared with.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Sequence
from threading import Lock
from typing import Any, TypeAlias, TypeVar

from ..borrow.memory import MemoryBorrowing
from ..breaker.memory import MemoryBreakers
from ..concurrency.memory import MemorySlots
from ..errors import ConfigurationError, closed_failure
from ..minute.memory import MemoryViews
from ..ring.clock import SYSTEM, AsyncClock, Clock
from ..ring.command import Command
from ..ring.commands import Acquire
from ..ring.decision import Decision, Source
from ..ring.decisions import decision_of
from ..ring.key import AnyKey
from ..ring.limit import Limit
from ..ring.memory_rings import Handlers, MemoryRings, MemoryValues, limit_text
from ..ring.ring import Ring
from ..shaping.memory import MemoryShaping
from ..support.async_use import running_loop
from ..upstream.memory import MemoryPauses
from ..waiting.memory import MemoryLines

Reply = TypeVar("Reply")

_RingLink: TypeAlias = "tuple[MemoryStore, Ring, int, int, int, Limit, int, AnyKey, Any]"
"""A command's link to its only ring (`Acquire.ring_link`): (store, ring, `bucket_ms`, ms of the
window, amount, limit, cost, key, its `Acquire.counts`). A plain tuple, which is unpacked fastest.
"""
_new_tuple = tuple.__new__


class MemoryStore:
    """Rings in this process, for one process. Safe to share between threads.

    A ring whose window has passed without a call is dropped when many new ones have been made.
    """

    decided_by: Source = "local"

    def __init__(self, clock: Clock = SYSTEM, values: dict[bytes, Any] | None = None) -> None:
        """`values`: where everything is kept, by the names that it has in Redis. A store that keeps
        it elsewhere passes what it has of the keys of one command, has the command executed, and
        stores what the dictionary then has of these keys until `expires_at_ms` of each value.
        """
        self.clock = clock
        self._now_ms = clock.now_ms
        self.unknown_total = 0
        self._lock: Lock | _Closed = threading.Lock()
        self._values = MemoryValues({} if values is None else values, clock.now_ms)
        self._ring_of: Callable[[bytes], Ring | None] = self._values.get
        rings = MemoryRings(self._values)
        self._handlers: Handlers = {
            # Of two handlers of one name, the later one is that of the feature that extends it.
            **rings.handlers,
            **MemoryShaping(self._values, rings).handlers,
            **MemoryBorrowing(rings).handlers,
            **MemoryLines(self._values, rings).handlers,
            **MemoryViews(self._values).handlers,
            **MemoryBreakers(self._values).handlers,
            **MemorySlots(self._values).handlers,
            **MemoryPauses(self._values, rings).handlers,
        }

    def execute(self, command: Command[Reply], deadline: float | None = None) -> Reply:
        """The reply that the script of `command` would give. Waits for nothing but the lock."""
        now = command.now_ms
        with self._lock:
            handler = self._handlers.get(command.script)
            if handler is None:
                raise ConfigurationError(f"this store cannot execute {command.script!r}")
            reply: Reply = handler(command, self.clock.now_ms() if now is None else now)
            return reply

    def decide(self, command: Acquire, deadline: float | None = None) -> Decision:
        """The decision on the reply of `execute`."""
        return self.decide_at_once(command)

    def decide_at_once(self, command: Acquire) -> Decision:
        """Do as `decide`, and count the call in `command.counts`, if it has them.

        For a command that is linked to its ring, it is made without a reply, which takes a fifth of
        the time, if the newest bucket is the current one and has room, or has a refusal to repeat.
        """
        link: _RingLink | None = command.ring_link or self._link(command)
        if link is None:
            return self._attempt_by_reply(command)
        store, ring, bucket_ms, window_ms, amount, limit, cost, key, counts = link
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
            if counts is not None:
                try:
                    counts.admitted += 1
                except TypeError:
                    counts.count(1, 0)
            return _new_tuple(
                Decision,
                (
                    True, key, cost, limit, left, 0.0, (window_ms - age) / 1000, 0.0, "ok",
                    "local", now, command.charges,
                ),
            )  # fmt: skip
        if refusal is None:
            if age < bucket_ms or store is not self:
                return self._attempt_by_reply(command)
            with self._lock:
                if now - ring.shortcut_start >= bucket_ms:  # not dropped meanwhile
                    ring.rotate(now, limit_text(limit))
            return self.decide_at_once(command)  # in the bucket that this has opened
        if counts is not None:
            try:
                counts.refused += 1
            except TypeError:
                counts.count(0, 1)
        left, room_at, empty_at = refusal
        return _new_tuple(
            Decision,
            (
                False, key, cost, limit, left, (room_at - now) / 1000, (empty_at - now) / 1000,
                0.0, "over_limit", "local", now, None,
            ),
        )  # fmt: skip

    def _attempt_by_reply(self, command: Acquire) -> Decision:
        """Do as `decide_at_once`, by a reply."""
        reply = self.execute(command)
        if command.counts is not None:
            counts = command.counts[reply[1]]
            try:
                if reply[0]:
                    if reply[8]:
                        counts = counts.paced
                    if reply[2] < counts.few:
                        counts.near += 1
                    counts.admitted += 1
                else:
                    counts.refused += 1
            except TypeError:
                counts.count(reply[0], 1 - reply[0])
        decision = decision_of(command, reply, "local")
        link = command.ring_link
        if link is not None and link[1] is not self._ring_of(command.charges[0].ring):
            self._link(command)  # its ring was dropped
        return decision

    def _link(self, command: Acquire) -> _RingLink | None:
        """Link `command` to its only ring, if it has one ring that exists and needs no reply."""
        charges = command.charges
        name, limit, cost, key, _ = charges[0]
        ring = self._ring_of(name)
        if ring is None or len(charges) > 1 or command.write_limit or command.now_ms is not None:
            return None
        if limit.is_shaped:
            return None
        window_ms = limit.span * limit.bucket_ms
        counts = None if command.counts is None else command.counts[0]
        link = (
            self, ring, limit.bucket_ms, window_ms, limit.amount, limit, cost, key, counts,
        )  # fmt: skip
        command.ring_link = link
        return link

    def execute_many(
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


class _Closed:
    """Replaces the lock of a closed store, and raises, so that no call has to check for that."""

    def __enter__(self) -> None:
        raise closed_failure()

    def __exit__(self, *exc: object) -> None: ...


class AsyncMemoryStore:
    """A `MemoryStore` for tasks."""

    decided_by: Source = "local"

    def __init__(self, store: MemoryStore) -> None:
        self.clock = store.clock
        self.unknown_total = 0
        self._store = store
        self.decide_at_once = store.decide_at_once
        """As `decide`, for callers that need not await it."""

    async def decide(self, command: Acquire, deadline: float | None = None) -> Decision:
        return self._store.decide(command)

    async def execute(
        self,
        command: Command[Reply],
        deadline: float | None = None,
        on_late_reply: Callable[[Reply], object] | None = None,
    ) -> Reply:
        return self._store.execute(command)

    async def execute_many(
        self, commands: Sequence[Command[Any]], deadline: float | None = None
    ) -> list[Any]:
        return self._store.execute_many(commands)

    async def drain(self) -> None: ...

    async def sleep(self, seconds: float) -> None:
        running_loop()
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
