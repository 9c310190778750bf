"""Every lease is looked at when it has ended, and every flush interval before that: what nobody
spends is given back, and where there is demand the next lease is fetched.
"""

from __future__ import annotations

import heapq
import itertools

from ..operations.strategy import PendingCommand
from .flush_schedule import FlushSchedule
from .key_state_cache import KeyStateCache
from .lease_prefetches import LeasePrefetches
from .lease_refunds import LeaseRefunds
from .leased_key_state import LeasedKeyState
from .leases import AFTER_END_S, Leases


class LeaseReviews:
    """The worker's part of leasing: reviews, and after them the commands that they lead to."""

    def __init__(
        self,
        states: KeyStateCache[LeasedKeyState],
        schedule: FlushSchedule,
        leases: Leases,
        prefetches: LeasePrefetches,
        refunds: LeaseRefunds,
    ) -> None:
        self._states = states
        self._schedule = schedule
        self._leases = leases
        self._prefetches = prefetches
        self._refunds = refunds
        self._heap_order = itertools.count()
        self.after_fork()

    def after_fork(self) -> None:
        """Start empty, all that belongs to leases included."""
        self._heap: list[tuple[float, int, LeasedKeyState]] = []
        """When to review which lease. The number in between only keeps key states from being
        compared."""
        self._leases.after_fork()
        self._prefetches.after_fork()
        self._refunds.after_fork()

    def collect(self, now: float, found: list[PendingCommand], *, last: bool) -> None:
        """Add the fetches and refunds that are due to `found`; with `last`, refunds of all leases
        and no fetches.
        """
        with self._states.state_lock:  # closing a limiter may do this beside the worker
            self._prefetches.collect(now, found, last=last)
            while self._leases.to_review:
                self._schedule_review(self._leases.to_review.popleft(), now)
            while self._heap and (last or self._heap[0][0] <= now):
                self._review(heapq.heappop(self._heap)[2], now, found, last)
            if last:
                # All key states: a signal handler may have raised after one had left the heap.
                for state in self._states.all_and_closed():
                    self._refunds.take_unspent(state)
            self._refunds.collect(found)

    def next_due_at(self, now: float) -> float:
        """Return when `collect` has something to add, monotonic seconds."""
        at = min(self._refunds.next_due_at(now), self._prefetches.next_due_at(now))
        if self._heap:
            at = min(at, self._heap[0][0])
        if self._leases.to_review:
            at = min(at, now)
        return at

    def _schedule_review(self, state: LeasedKeyState, now: float) -> None:
        at = state.permits_until + AFTER_END_S
        if at <= now:  # the lease has ended, and its bucket has not
            at = now + max(AFTER_END_S, state.until_bucket_ends(now))
        at = min(at, now + self._schedule.interval_s)
        heapq.heappush(self._heap, (at, next(self._heap_order), state))

    def _review(
        self, state: LeasedKeyState, now: float, found: list[PendingCommand], last: bool
    ) -> None:
        """Give back what is not needed, and fetch the next lease where this one has ended."""
        before = state.left_at_sample
        self._leases.observe_demand(state, now)
        idle = state.left_at_sample == before and state.left_at_review == before
        state.left_at_review = state.left_at_sample
        lease_ended = now >= state.permits_until
        bucket_ended = lease_ended and now * 1000 + state.offset_ms >= state.lease_ends_ms - 1
        if last or idle or bucket_ended:
            self._refunds.take_unspent(state)
        nothing_to_do = idle and not state.permits_left
        if last or bucket_ended or nothing_to_do or not self._states.is_current(state):
            state.in_review = False
        else:
            self._schedule_review(state, now)
        if lease_ended and not last and not idle:
            self._prefetches.add(state, now, state.until_bucket_ends(now), found)
