"""Updates the windows of this process with what all processes count.

Every flush of a key returns the fleet's counts of it. A key that is not called any more has nothing
to flush, and is polled instead, ever more slowly:

    calls    . ..  .   |
    flushes  ^   ^   ^ |
    polls              |    ^     ^       ^          ^               ^     until POLL_FOR_S
                       0    each after 1/8 of the time since the last call

A key that was called at one flush only is not polled, because there may be very many such keys.
"""

from __future__ import annotations

import heapq
import itertools

from ..core.charge import with_bucket_starts
from ..core.clock import Clock
from ..core.limit import expires_in_ms
from ..operations.strategy import OutgoingCommand
from ..protocol.commands import Flush
from ..protocol.replies import FleetCounts
from .eventual_key_state import EventualKeyState
from .flush_schedule import FlushSchedule
from .key_state import NEVER
from .key_state_cache import KeyStateCache
from .pending_counts import PendingCounts

POLL_FOR_S = 60.0
"""Seconds after its last call for which a key is polled. Never for longer than its window."""
POLL_DELAY_DIVISOR = 8
"""A key is polled again after the time since its last call divided by this: what is known of it is
not older than that.
"""
_MAX_POLLS = 1000
"""The most polls in one flush."""


class FleetSync:
    """Recomputes how many permits are left, and polls. The `FlushHooks` of `PendingCounts`."""

    def __init__(
        self,
        states: KeyStateCache[EventualKeyState],
        schedule: FlushSchedule,
        counts: PendingCounts[EventualKeyState],
        clock: Clock,
    ) -> None:
        self._states = states
        self._schedule = schedule
        self._counts = counts
        self._monotonic = clock.monotonic
        self._clock = clock
        self._heap_order = itertools.count()
        self.polls_enabled = True
        """False while everything is flushed, as nobody may decide any more by what polls return."""
        self.offset_ms: float | None = None
        """From monotonic time to the store's, ms; None before its first reply. Kept in a forked
        child, which has the same clocks."""
        self.after_fork()

    def after_fork(self) -> None:
        """Start empty."""
        self._heap: list[tuple[float, int, EventualKeyState]] = []
        """When to poll which key. The number in between only keeps key states from being
        compared."""

    # -- the store's clock ------------------------------------------------------------------------

    def known_offset_ms(self) -> float:
        """Return the offset to the store's time, or to this machine's wall clock before the store's
        first reply.
        """
        if self.offset_ms is not None:
            return self.offset_ms
        return self._clock.now_ms() - self._monotonic() * 1000

    def clock_probe(self) -> list[OutgoingCommand]:
        """Return a flush without counts while the store's time is not known: counts carry the start
        of their bucket, so its reply has to come before they can be sent.
        """
        if self.offset_ms is not None:
            return []
        state = self._counts.any_dirty()
        if state is None:
            return []
        command = Flush(state.charges, pull=True)
        return [OutgoingCommand(command, lambda reply, sent_at: self._on_clock_reply(reply))]

    def _on_clock_reply(self, reply: FleetCounts | Exception) -> None:
        if not isinstance(reply, FleetCounts):
            return
        now = self._monotonic()
        self.offset_ms = reply.now_ms - now * 1000
        for state in self._states.all():
            with self._states.state_lock:
                state.replace_clock_offset(self._states.counter_lock, self.offset_ms, now)
                self.recompute_permits_left(state, now)

    # -- windows ----------------------------------------------------------------------------------

    def recompute_permits_left(self, state: EventualKeyState, now: float) -> None:
        """Compute how many permits are left until the present bucket ends."""
        lock = self._states.counter_lock
        with self._states.state_lock:
            if not state.open_bucket(lock, now):
                state.close_bucket(lock)
            now_ms = state.now_ms(now)
            unacknowledged = (
                state.closed_buckets
                if state.in_flight is None
                else (*state.in_flight.buckets, *state.closed_buckets)
            )
            least, binding = None, state.binding_window
            for window in state.windows:
                left = window.permits_left(now_ms, unacknowledged)
                if least is None or left < least:
                    least, binding = left, window
            assert least is not None
            state.binding_window = binding
            state.reset_at = now + expires_in_ms(binding.limit, now_ms) / 1000
            charges = state.charges
            if state.bucket_start > now_ms:
                # The store's clock was set back, and calls are counted in a bucket that begins
                # after the store's time.
                widths = (charge.limit.bucket_ms for charge in charges)
                charges = with_bucket_starts(
                    charges, [state.bucket_start - state.bucket_start % width for width in widths]
                )
            elif charges[0].bucket_start_ms is not None:
                charges = tuple(charge._replace(bucket_start_ms=None) for charge in charges)
            with lock:
                state.charges = charges
                # `passed` is what other threads have admitted since the bucket was closed above.
                state.permits_left = least - state.passed
                state.permits_until = state.bucket_ends_at

    def before_flush(self, state: EventualKeyState) -> None:
        """Note that `state` was called, if it was."""
        if state.has_unacknowledged():
            now = self._monotonic()
            state.called_repeatedly = now - state.last_called_at < state.longest_window_ms / 1000
            state.last_called_at = now

    def on_fleet_counts(self, state: EventualKeyState, reply: FleetCounts) -> None:
        """Take in what all processes have counted."""
        self.offset_ms = state.offset_ms
        for window, passed in zip(state.windows, reply.passed, strict=True):
            window.set_fleet_counts(passed)

    def on_flush_ended(self, state: EventualKeyState, now: float) -> None:
        """Drop the refusal and compute the permits again, as the fleet's counts may now include
        those of the flush.
        """
        state.refused_until = 0.0
        self.recompute_permits_left(state, now)

    # -- polls ------------------------------------------------------------------------------------

    def wants_poll(self, state: EventualKeyState) -> bool:
        """True if `state` was called repeatedly and not long ago: its next call needs recent
        counts.
        """
        idle_s = self._monotonic() - state.last_called_at
        wanted = state.called_repeatedly and idle_s < min(
            POLL_FOR_S, state.longest_window_ms / 1000
        )
        return wanted and self.polls_enabled and self._states.get(state.key) is state

    def schedule_poll(self, state: EventualKeyState, now: float) -> bool:
        """Poll `state` later, the later the longer it was not called. False if it needs none."""
        if not self.wants_poll(state):
            return False
        if not state.poll_scheduled:
            state.poll_scheduled = True
            idle_s = now - state.last_called_at
            at = now + max(self._schedule.interval_s, idle_s / POLL_DELAY_DIVISOR)
            heapq.heappush(self._heap, (at, next(self._heap_order), state))
            self._schedule.flush_by(at)
        return True

    def collect(self, now: float, outgoing: list[OutgoingCommand], *, everything: bool) -> None:
        """Add the polls that are due to `outgoing`."""
        with self._states.state_lock:
            while self._heap and self._heap[0][0] <= now and len(outgoing) < _MAX_POLLS:
                state = heapq.heappop(self._heap)[2]
                state.poll_scheduled = False
                # The flush of a key with counts is a poll, too.
                if (
                    not state.dirty
                    and state.in_flight is None
                    and (pending := self._counts.flush_of(state))
                ):
                    outgoing.append(pending)

    def next_due_at(self, now: float) -> float:
        """Return when `collect` has something to add, monotonic seconds."""
        return max(self._heap[0][0], now + self._schedule.interval_s) if self._heap else NEVER
