"""The fleet as `eventual` knows it: the counts of all processes at the last sync, and its own
since.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Iterable
from threading import Lock

from ..ring.clock import NEVER, Clock
from ..ring.commands import Flush
from ..ring.decision import Charge, limits_in, with_bucket_starts
from ..ring.limit import Limit, expires_in_ms
from ..ring.replies import FleetCounts
from ..ring.stats import Bucket
from ..runtime.flush import FlushSchedule
from ..runtime.strategy import OutgoingCommand
from .key_state import KeyState, KeyStateCache, StateName
from .pending_counts import PendingCounts

# --------------------------------------------------------------------------------------------------
#
# One limit as all processes have counted it, by what this process has received.
#
#     fleet               | 10 | 20 |  5 |  0 |      all processes, by the store's last reply
#     unacknowledged                |  2 |  4 |      counted here, sent or not, not in that reply
#     own                 |  4 |  9 |  3 |  4 |      all that was counted here, if a share caps it
#
# Counts are kept by bucket, so that they leave the window in time.


def share_of(limit: Limit, share: float) -> int:
    """Return how many permits one process may admit in a window."""
    return max(1, int(limit.amount * share + 1e-9))  # 0.29 * 100 is less than 29


class FleetWindow:
    """One limit of one key. Its owner holds a lock. Bucket starts are ms of the store's clock."""

    __slots__ = ("_fleet", "_known_counts", "_own", "limit", "process_limit")

    def __init__(self, limit: Limit, share: float) -> None:
        self.limit = limit
        self.process_limit = share_of(limit, share)
        """The most permits that this process admits in a window."""
        self._fleet: dict[int, int] = {}
        self._own: dict[int, int] = {}
        self._known_counts: dict[int, int] = {}
        """The sums of fleet and unacknowledged, as `permits_left` has last computed them."""

    def count_own(self, start: int, permits: int) -> None:
        """Add permits that this process has admitted in the bucket of `start`."""
        if self.process_limit < self.limit.amount:
            start -= start % self.limit.bucket_ms
            self._own[start] = self._own.get(start, 0) + permits

    def shift_own(self, ms: int) -> None:
        """Move what `count_own` has counted by `ms`, as the clock offset was wrong by that. Each
        count goes into the later of the two buckets that it may belong to, so that it does not
        leave the window too early.
        """
        own, self._own = self._own, {}
        for start, permits in own.items():
            self.count_own(start + ms + self.limit.bucket_ms - 1, permits)

    def set_fleet_counts(self, fleet: dict[int, int]) -> None:
        """Replace what all processes have admitted, by bucket start."""
        self._fleet = fleet

    def permits_left(self, now_ms: int, unacknowledged: Iterable[Bucket]) -> int:
        """Return the permits left at `now_ms`. `unacknowledged` is what this process has counted
        and the fleet's counts do not include.
        """
        bucket_ms, span = self.limit.bucket_ms, self.limit.span
        newest = now_ms - now_ms % bucket_ms
        oldest = newest - (span - 1) * bucket_ms
        self._fleet = {start: n for start, n in self._fleet.items() if start >= oldest}
        self._own = {start: n for start, n in self._own.items() if start >= oldest}
        sums = dict(self._fleet)
        for counted in unacknowledged:
            start = counted.start - counted.start % bucket_ms
            if counted.passed and start >= oldest:
                sums[start] = sums.get(start, 0) + counted.passed
        self._known_counts = sums
        return min(
            self.limit.amount - sum(sums.values()), self.process_limit - sum(self._own.values())
        )

    def retry_ms(self, now_ms: int, cost: int, spent: int) -> int:
        """Return the ms until `cost` would be admitted if nobody else called. `spent` permits have
        been admitted here since `permits_left` was called, in the present bucket.
        """
        return max(
            self._ms_until_room(now_ms, self._known_counts, cost + spent - self.limit.amount),
            self._ms_until_room(now_ms, self._own, cost + spent - self.process_limit),
        )

    def reset_ms(self, now_ms: int, spent: int) -> int:
        """Return the ms until the window is empty if nobody calls; `spent` as in `retry_ms`."""
        newest = max((start for start, n in self._known_counts.items() if n), default=None)
        if spent:
            newest = now_ms - now_ms % self.limit.bucket_ms
        return 0 if newest is None else max(0, self._expires_at_ms(newest) - now_ms)

    def _ms_until_room(self, now_ms: int, counts: dict[int, int], excess: int) -> int:
        """Return the ms until so many of `counts` have left the window that `excess` plus the rest
        is at most 0.
        """
        need = sum(counts.values()) + excess
        if need <= 0:
            return 0
        for start in sorted(counts):
            need -= counts[start]
            if need <= 0:
                return max(1, self._expires_at_ms(start) - now_ms)
        return max(1, self._expires_at_ms(now_ms - now_ms % self.limit.bucket_ms) - now_ms)

    def _expires_at_ms(self, start: int) -> int:
        """Return when the bucket of `start` leaves the window."""
        return start + self.limit.span * self.limit.bucket_ms


class EventualKeyState(KeyState):
    """A key's windows, one for each limit, and how often it is called."""

    __slots__ = (
        "binding_window",
        "called_repeatedly",
        "last_called_at",
        "poll_scheduled",
        "windows",
    )

    def __init__(
        self, name: StateName, charges: tuple[Charge, ...], offset_ms: float, share: float
    ) -> None:
        super().__init__(name, charges, limits_in(charges), offset_ms)
        self.windows = tuple(FleetWindow(charge.limit, share) for charge in charges)
        self.binding_window = self.windows[0]
        """The window with the least permits left."""
        self.last_called_at = -NEVER
        """When it was called, monotonic seconds. Updated when its counts are flushed only."""
        self.called_repeatedly = False
        """It was called at two flushes within its longest window."""
        self.poll_scheduled = False

    def on_bucket_closed(self, start: int, passed: int) -> None:
        for window in self.windows:
            window.count_own(start, passed)

    def replace_clock_offset(self, counter_lock: Lock, offset_ms: float, now: float) -> None:
        shift_ms = round(offset_ms - self.offset_ms)
        super().replace_clock_offset(counter_lock, offset_ms, now)
        for window in self.windows:
            window.shift_own(shift_ms)


# --------------------------------------------------------------------------------------------------
#
# Updates the windows of this process with what all processes count.
#
# Every flush of a key returns the fleet's counts of it. A key that is not called any more has
# nothing to flush, and is polled instead, ever more slowly:
#
#   calls    . ..  .   |
#   flushes  ^   ^   ^ |
#   polls              |    ^     ^       ^          ^               ^     until POLL_FOR_S
#                      0    each after 1/8 of the time since the last call
#
# A key that was called at one flush only is not polled, because there may be very many such keys.

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
        """Apply what all processes have counted."""
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
