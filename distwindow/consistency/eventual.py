"""Decided here, settled with the store periodically.

    here     .#.##..#.|.##.#....|..#.##...        counts, by bucket
    store   --^---------^---------^-------        every `sync_interval`: ours go, the fleet's come

A key's window is what all had passed at the last sync, by bucket, and what was passed here since.
The store is never waited for. So all processes together may pass what they pass within two syncs
and the ways there and back beyond the limit, and no more than the limit each.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Iterable
from threading import Lock
from typing import Any

from ..core.charge import Charge, charged_in, limits_in, with_cost
from ..core.clock import Clock
from ..core.decision import Decision
from ..core.errors import ConfigurationError
from ..core.interrupts import is_interruption
from ..core.key import AnyKey, normalize_key
from ..operations.command_cache import CommandCache
from ..operations.steps import Operation
from ..operations.strategy import PendingCommand
from ..protocol.commands import Flush
from ..protocol.replies import FleetCounts
from .base import LocalStrategy
from .fleet_window import FleetWindow
from .key_state import NEVER, CachedRefusal, KeyState

POLL_FOR_S = 60.0
"""Seconds for which a key that nobody calls is still synced, within its window."""
STALENESS_DIVISOR = 8
"""What is known then is never older than this part of the time for which nobody has called."""
_MAX_POLLS = 1000
"""Such keys in one sync."""

_new_tuple = tuple.__new__


class EventualKeyState(KeyState):
    """A key's windows, as this process sees them."""

    __slots__ = (
        "binding_window",
        "called_repeatedly",
        "last_called_at",
        "poll_scheduled",
        "windows",
    )

    def __init__(
        self, key: Any, charges: tuple[Charge, ...], offset_ms: float, share: float
    ) -> None:
        super().__init__(key, charges, limits_in(charges), offset_ms)
        self.windows = tuple(FleetWindow(charge.limit, share) for charge in charges)
        self.binding_window = self.windows[0]
        """The one that has least left."""
        self.last_called_at = -NEVER
        """When somebody last called, as of the last sync."""
        self.called_repeatedly = False
        """It was called before within its window."""
        self.poll_scheduled = False

    def on_bucket_closed(self, start: int, passed: int) -> None:
        for share in self.windows:
            share.count_own(start, passed)

    def correct_clock(self, lock: Lock, offset_ms: float, now: float) -> None:
        shift = round(offset_ms - self.offset_ms)
        super().correct_clock(lock, offset_ms, now)
        for share in self.windows:
            share.shift(shift)


class Eventual(LocalStrategy[EventualKeyState]):
    """`consistency="eventual"`. `share` is the part of each limit that one process may admit."""

    def __init__(
        self,
        commands: CommandCache,
        clock: Clock,
        max_keys: int,
        interval: float,
        share: float = 1.0,
    ) -> None:
        self._share = share
        self._offset_ms: float | None = None
        """Of the store's clock; None before its first reply. A forked child has the same clocks."""
        self._polls = True
        self._heap_order = itertools.count()
        super().__init__(commands, clock, max_keys, interval)
        cap = min(max(1, int(limit.amount * share)) for limit in commands.limits)
        self._max_cost = min(self._max_cost, cap)

    def after_fork(self) -> None:
        super().after_fork()
        self._poll_heap: list[tuple[float, int, EventualKeyState]] = []

    # -- decisions --------------------------------------------------------------------------------

    def decide_locally(self, key: AnyKey, cost: int) -> Decision | None:
        try:
            state = self._get(key)
            if state is None and key.__class__ is not str:
                key = normalize_key(key)
                state = self._get(key)
            if state is not None:
                self._touch(key)
        except (TypeError, KeyError) as exc:
            if is_interruption(exc):
                raise
            state = None
        # A memoryview is equal to the bytes it shows, but is no key.
        wrong = key.__class__ is memoryview  # type: ignore[comparison-overlap]
        if state is None or wrong or type(cost) is not int or not 1 <= cost <= self._max_cost:
            state = self._first_call(key, cost)
        now = self._monotonic()
        if now >= state.permits_until:
            self._recompute_left(state, now)
        if not state.dirty:  # before it is counted: a signal handler may raise in between
            self._mark_dirty(state)
        with self._lock:
            left = state.permits_left - cost
            if left >= 0:
                state.permits_left = left
                state.passed += cost
            charges = state.charges
        if left < 0:
            return self._refuse(state, key, cost, now)
        if not state.dirty:  # flushed just now
            self._mark_dirty(state)
        if cost != 1:
            charges = with_cost(charges, cost)
        return _new_tuple(
            Decision,
            (
                True, key, cost, state.binding_window.limit, left, 0.0, state.reset_at - now, 0.0,
                "ok", "local", int(now * 1000 + state.offset_ms), charges,
            ),
        )  # fmt: skip

    def acquire_remote(self, key: AnyKey, cost: int) -> Operation[Decision]:
        raise AssertionError("decided without the store")
        yield

    def peek(self, key: AnyKey) -> Decision | None:
        state, now = self._get(key) or self._first_call(key, 1), self._monotonic()
        if now >= state.permits_until:
            self._recompute_left(state, now)
        if state.permits_left < 1:
            return self._refuse(state, key, 1, now, counted=False)
        return Decision(
            True, key, 1, state.binding_window.limit, state.permits_left, 0.0,
            state.reset_at - now, 0.0, "ok", "local", int(now * 1000 + state.offset_ms),
        )  # fmt: skip

    def before_multi_key(self, keys: Iterable[AnyKey]) -> list[PendingCommand]:
        states = {key: state for key in keys if (state := self._get(key)) is not None}
        return [
            pending for state in states.values() if (pending := self._flush_of(state)) is not None
        ]

    def invalidate(self, key: AnyKey) -> None:
        """A refund is seen with the next sync, soon."""
        state = self._get(key)
        if state is not None:
            state.called_repeatedly, state.last_called_at = True, self._monotonic()
            if not state.dirty:
                self._mark_dirty(state)

    def _first_call(self, key: AnyKey, cost: int) -> EventualKeyState:
        """The cell of a key that is called for the first time, or not as it should be."""
        if self._closed:
            raise ConfigurationError("this limiter is closed; make a new one")
        charges = self._command_cache.acquire(key, cost).charges
        if cost > self._max_cost:
            raise ValueError(
                f"cost={cost} can never be admitted: the share of one process is {self._max_cost}"
            )
        name = key if self._cacheable(key) else charges[0].ring
        state = self._get(name)
        if state is not None:
            return state
        offset = self._offset_ms
        if offset is None:
            offset = self._clock.now_ms() - self._monotonic() * 1000
        plain, known = with_cost(charges, 1), offset
        return self._key_states.add(name, lambda: self._new_state(name, plain, known))

    def _new_state(
        self, key: Any, charges: tuple[Charge, ...], offset_ms: float
    ) -> EventualKeyState:
        return EventualKeyState(key, charges, offset_ms, self._share)

    # -- the window -------------------------------------------------------------------------------

    def _recompute_left(self, state: EventualKeyState, now: float) -> None:
        """Say anew how many permits are left until the present bucket ends."""
        lock = self._key_states.counter_lock
        with self._key_states.state_lock:
            if not state.open_bucket(lock, now):
                state.close_bucket(lock)
            now_ms = int(now * 1000 + state.offset_ms)
            untold = (
                state.pending
                if state.in_flight is None
                else (*state.in_flight.buckets, *state.pending)
            )
            room, binding = None, state.binding_window
            for share in state.windows:
                here = share.permits_left(now_ms, untold)
                if room is None or here < room:
                    room, binding = here, share
            assert room is not None
            state.binding_window = binding
            limit = binding.limit
            state.reset_at = now + (limit.span * limit.bucket_ms - now_ms % limit.bucket_ms) / 1000
            charges = state.charges
            if state.bucket_start > now_ms:
                # The store's clock was set back: it is counted in a bucket ahead of that.
                widths = (charge.limit.bucket_ms for charge in charges)
                charges = charged_in(
                    charges, [state.bucket_start - state.bucket_start % width for width in widths]
                )
            elif charges[0].bucket_start_ms is not None:
                charges = tuple(charge._replace(bucket_start_ms=None) for charge in charges)
            with lock:
                state.charges = charges
                state.permits_left = room - state.passed  # what has been passed meanwhile
                state.permits_until = state.bucket_ends_at

    def _refuse(
        self, state: EventualKeyState, key: AnyKey, cost: int, now: float, *, counted: bool = True
    ) -> Decision:
        refusal = state.refusal
        if refusal is None or now >= state.refused_until or cost != state.refused_cost:
            with self._key_states.state_lock:
                refusal = state.refusal = self._new_refusal(state, cost, now)
                state.refused_cost, state.refused_until = cost, state.permits_until
        if counted:
            if not state.dirty:
                self._mark_dirty(state)
            with self._lock:
                state.blocked += cost
            if not state.dirty:
                self._mark_dirty(state)
        return self._refusal_decision(state, refusal, key, cost, now, "local")

    def _new_refusal(self, state: EventualKeyState, cost: int, now: float) -> CachedRefusal:
        self._recompute_left(
            state, now
        )  # what has been sent since the last time is not in `passed`
        now_ms = int(now * 1000 + state.offset_ms)
        retry, binding = -1, state.binding_window
        for share in state.windows:
            here = share.retry_ms(now_ms, cost, state.passed)
            if here > retry:
                retry, binding = here, share
        retry = max(1, retry)
        reset = max(retry, binding.reset_ms(now_ms, state.passed))
        return CachedRefusal(
            binding.limit, max(0, state.permits_left), now + retry / 1000, now + reset / 1000
        )

    # -- errands ----------------------------------------------------------------------------------

    def clock_probe(self) -> list[PendingCommand]:
        """The first thing to learn is what time it is there: counts carry their bucket."""
        if self._offset_ms is not None:
            return []
        try:
            state = self._dirty[0]
        except IndexError as exc:
            if is_interruption(exc):
                raise
            return []
        command = Flush(state.charges, pull=True)
        return [PendingCommand(command, lambda reply, sent_at: self._on_clock_reply(reply))]

    def pending_commands(
        self, now: float, found: list[PendingCommand], *, last: bool = False
    ) -> None:
        self._polls = not last
        if self._offset_ms is None and not last:
            return
        with self._key_states.state_lock:
            while self._poll_heap and self._poll_heap[0][0] <= now and len(found) < _MAX_POLLS:
                state = heapq.heappop(self._poll_heap)[2]
                state.poll_scheduled = False
                # What is told now anyway is asked about with that.
                if (
                    not state.dirty
                    and state.in_flight is None
                    and (pending := self._flush_of(state))
                ):
                    found.append(pending)
        super().pending_commands(now, found, last=last)

    def _find_next_due(self, now: float) -> None:
        super()._find_next_due(now)
        if self._poll_heap:
            self.next_due_at = min(
                self.next_due_at, max(self._poll_heap[0][0], now + self._flush_interval)
            )

    def _flush_of(self, state: EventualKeyState) -> PendingCommand | None:
        if state.has_counts():
            now = self._monotonic()
            state.called_repeatedly = now - state.last_called_at < state.longest_ms / 1000
            state.last_called_at = now
        return super()._flush_of(state)

    def _wants_fleet_counts(self) -> bool:
        return True

    def _wants_poll(self, state: EventualKeyState) -> bool:
        """A key that is called now and then has to know what the others pass meanwhile. One that
        was called once is none of these: there may be a flood of them.
        """
        idle = self._monotonic() - state.last_called_at
        wanted = state.called_repeatedly and idle < min(POLL_FOR_S, state.longest_ms / 1000)
        return wanted and self._polls and self._get(state.key) is state

    def _schedule_poll(self, state: EventualKeyState, now: float) -> bool:
        """Ask again, the later the longer nobody calls."""
        if not self._wants_poll(state):
            return False
        if not state.poll_scheduled:
            state.poll_scheduled = True
            at = now + max(self._flush_interval, (now - state.last_called_at) / STALENESS_DIVISOR)
            heapq.heappush(self._poll_heap, (at, next(self._heap_order), state))
            self._wake_worker_at(at)
        return True

    def _on_clock_reply(self, reply: FleetCounts | Exception) -> None:
        if not isinstance(reply, FleetCounts):
            return
        now = self._monotonic()
        self._offset_ms = reply.now_ms - now * 1000
        for state in self._key_states.all():
            with self._key_states.state_lock:
                state.correct_clock(self._key_states.counter_lock, self._offset_ms, now)
                self._recompute_left(state, now)

    def _apply_fleet_counts(self, state: EventualKeyState, fleet: FleetCounts) -> None:
        self._offset_ms = state.offset_ms
        for share, passed in zip(state.windows, fleet.passed, strict=True):
            share.set_fleet_counts(passed)

    def _after_flush(self, state: EventualKeyState, now: float) -> None:
        state.refused_until = 0.0
        self._recompute_left(state, now)
