"""The leases of one process: what the store has granted, until it is spent or given back."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from ..core.charge import with_bucket_starts
from ..operations.completion import Completion
from ..protocol.replies import LeaseReply
from .flush_schedule import FlushSchedule
from .key_state_cache import KeyStateCache
from .lease_refunds import LeaseRefunds
from .leased_key_state import LeasedKeyState, lease_end

PREFETCH_LEAD_S = 0.02
"""Seconds before a lease will be spent in which the worker fetches the next one."""
REVIEW_DELAY_S = 0.002
"""Seconds from the end of a lease to its review: by then the store's bucket may have ended, too."""


class Leases:
    """Takes in what the store grants."""

    def __init__(
        self,
        states: KeyStateCache[LeasedKeyState],
        schedule: FlushSchedule,
        refunds: LeaseRefunds,
        monotonic: Callable[[], float],
    ) -> None:
        self._states = states
        self._schedule = schedule
        self._refunds = refunds
        self._monotonic = monotonic
        self.after_fork()

    def after_fork(self) -> None:
        """Start empty: the parent spends what it has leased."""
        self.fetches: set[Completion] = set()
        """Completed when the leases arrive that calls and the worker are fetching."""
        self.new_reviews: deque[LeasedKeyState] = deque()
        """Leases that are new to `LeaseReviews`."""

    def observe_demand(self, state: LeasedKeyState, now: float, cost: int = 0) -> None:
        """Take in what has been spent since the last observation, and a call of `cost`."""
        with self._states.state_lock:
            with self._states.counter_lock:
                spent = state.left_at_observation - state.permits_left
                state.left_at_observation = state.permits_left
            state.demand.observe(now, max(0, spent) + cost)

    def add_granted(
        self, state: LeasedKeyState, lease_reply: LeaseReply, permits: int, sent_at: float
    ) -> None:
        """Add `permits` that the store has granted to those of the same bucket. Those of an earlier
        bucket are given back.
        """
        now = self._monotonic()
        reply = lease_reply.acquire_reply
        ends_ms = reply.now_ms + lease_reply.ends_in_ms
        until = lease_end(sent_at, lease_reply.ends_in_ms)
        with self._states.state_lock:
            state.update_clock_offset(reply.now_ms, sent_at, now)
            state.limit = state.charges[reply.binding_index].limit
            state.left_in_store = max(0, reply.left)
            state.reset_at = now + reply.reset_ms / 1000
            charged_ms = _charged_ms_of(lease_reply, state)
            widths = (charge.limit.bucket_ms for charge in state.charges)
            starts = reply.bucket_starts_ms or [charged_ms - charged_ms % width for width in widths]
            charges = with_bucket_starts(state.charges, starts)
            # A reply that was overtaken by one from a later bucket can not be spent. (Where the
            # lease of that later bucket has ended first, the store's clock was set back, and this
            # reply is the newer one.) Nor can one for a key that was evicted meanwhile.
            overtaken = (
                ends_ms < state.lease_bucket_ends_ms and not state.permits_until <= now < until
            )
            if overtaken or not self._states.is_current(state):
                self._refunds.queue_refund(state, charges, permits, charged_ms)
                return
            if ends_ms != state.lease_bucket_ends_ms:
                if self._refunds.queue_unspent(state):
                    self._schedule.flush_by(now)
                state.permits_until = state.extended_at = 0.0
                state.charged_ms, state.lease_bucket_ends_ms = charged_ms, ends_ms
            rate = state.demand.rate(now)
            # Read without `counter_lock`: other threads can only lower it meanwhile.
            left = state.permits_left + permits
            enough = left >= rate * max(0.0, until - now)
            prefetch_at = -1 if enough else min(left // 2, int(rate * PREFETCH_LEAD_S))
            with self._states.counter_lock:
                state.charges = charges
                state.permits_left += permits
                state.left_at_observation += permits
                state.prefetch_threshold = prefetch_at
                if sent_at >= state.extended_at:  # see `LeasedKeyState.extend_lease`
                    state.permits_until, state.extended_at = until, sent_at
            if not state.has_review:
                state.has_review = True
                self.new_reviews.append(state)
            self._schedule.flush_by(min(until + REVIEW_DELAY_S, now + self._schedule.interval_s))

    def on_outcome_unknown(self, state: LeasedKeyState) -> None:
        """Lease nothing more until the bucket ends, so that at most one lease is lost in a bucket:
        this one may have been charged, and nobody has its permits.
        """
        now = self._monotonic()
        state.no_lease_until = now + state.seconds_to_bucket_end(now)


def _charged_ms_of(lease_reply: LeaseReply, state: LeasedKeyState) -> int:
    """Return a moment in the bucket that a lease was charged in. That is the bucket of `now_ms`, or
    the ring's newest one, if the store's clock is behind that.
    """
    now_ms = lease_reply.acquire_reply.now_ms
    return max(now_ms, now_ms + lease_reply.ends_in_ms - state.bucket_ms)
