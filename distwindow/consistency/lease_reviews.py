"""Every lease is reviewed when it has ended, and every flush interval before that: permits that
nobody spends are given back, and where there is demand the next lease is fetched.
"""

from __future__ import annotations

import heapq
import itertools

from ..operations.strategy import OutgoingCommand
from .flush_schedule import FlushSchedule
from .key_state_cache import KeyStateCache
from .lease_prefetches import LeasePrefetches
from .lease_refunds import LeaseRefunds
from .leased_key_state import LeasedKeyState
from .leases import REVIEW_DELAY_S, Leases


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

    def collect(self, now: float, outgoing: list[OutgoingCommand], *, everything: bool) -> None:
        """Add the fetches and refunds that are due to `outgoing`; with `everything`, refunds of all
        leases and no fetches.
        """
        with self._states.state_lock:  # closing a limiter may do this beside the worker
            self._prefetches.collect(now, outgoing, everything=everything)
            while self._leases.new_reviews:
                self._schedule_review(self._leases.new_reviews.popleft(), now)
            while self._heap and (everything or self._heap[0][0] <= now):
                self._review(heapq.heappop(self._heap)[2], now, outgoing, everything)
            if everything:
                # All key states: one may have left the heap in a flush that was interrupted.
                for state in self._states.all_including_cleared():
                    self._refunds.queue_unspent(state)
            self._refunds.collect(outgoing)

    def next_due_at(self, now: float) -> float:
        """Return when `collect` has something to add, monotonic seconds."""
        at = min(self._refunds.next_due_at(now), self._prefetches.next_due_at(now))
        if self._heap:
            at = min(at, self._heap[0][0])
        if self._leases.new_reviews:
            at = min(at, now)
        return at

    def _schedule_review(self, state: LeasedKeyState, now: float) -> None:
        at = state.permits_until + REVIEW_DELAY_S
        if at <= now:  # the lease has ended, and its bucket has not
            at = now + max(REVIEW_DELAY_S, state.seconds_to_bucket_end(now))
        at = min(at, now + self._schedule.interval_s)
        heapq.heappush(self._heap, (at, next(self._heap_order), state))

    def _review(
        self, state: LeasedKeyState, now: float, outgoing: list[OutgoingCommand], everything: bool
    ) -> None:
        """Give back what is not needed, and fetch the next lease where this one has ended."""
        before = state.left_at_observation
        self._leases.observe_demand(state, now)
        idle = state.left_at_observation == before and state.left_at_review == before
        state.left_at_review = state.left_at_observation
        lease_ended = now >= state.permits_until
        bucket_ended = (
            lease_ended and now * 1000 + state.offset_ms >= state.lease_bucket_ends_ms - 1
        )
        if everything or idle or bucket_ended:
            self._refunds.queue_unspent(state)
        nothing_to_do = idle and not state.permits_left
        if everything or bucket_ended or nothing_to_do or not self._states.is_current(state):
            state.has_review = False
        else:
            self._schedule_review(state, now)
        if lease_ended and not everything and not idle:
            self._prefetches.add_if_needed(state, now, state.seconds_to_bucket_end(now), outgoing)
