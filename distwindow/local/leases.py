"""Permits bought in blocks: how many are asked for, how they are spent, fetched and given back."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable
from math import exp, sqrt
from threading import Lock
from typing import NamedTuple

from ..errors import StoreError
from ..ring.clock import NEVER
from ..ring.commands import Acquire, Lease, Refund
from ..ring.decision import Charge, Decision, limits_in, with_bucket_starts, with_cost
from ..ring.decisions import decision_of
from ..ring.key import AnyKey
from ..ring.replies import CountReply, LeaseReply
from ..runtime.command_cache import CommandCache
from ..runtime.flush import FlushSchedule, OutgoingCommand
from ..runtime.steps import Completion
from .key_state import CLOCK_MARGIN_S, KeyState, KeyStateCache, StateName

PREFETCH_LEAD_S = 0.02
"""Seconds before a lease will be spent in which the worker fetches the next one."""
REVIEW_DELAY_S = 0.002
"""Seconds from the end of a lease to its review: by then the store's bucket may have ended, too."""


class Leases:
    """Adds the permits that the store grants to the leases of their keys."""

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
        self.fetches: set[Completion] = set()
        """Completed when the leases arrive that calls and the worker are fetching."""
        self.new_reviews: list[LeasedKeyState] = []
        """Leases that are new to `LeaseReviews`."""

    def observe_demand(self, state: LeasedKeyState, now: float, cost: int = 0) -> None:
        """Record what has been spent since the last observation, and a call of `cost`."""
        with self._states.state_lock:
            state.observe_demand(self._states.counter_lock, now, cost)

    def add_granted(
        self, state: LeasedKeyState, lease_reply: LeaseReply, permits: int, sent_at: float
    ) -> None:
        """Add granted `permits` to those of their bucket; an earlier bucket's are given back."""
        now = self._monotonic()
        reply = lease_reply.acquire_reply
        ends_ms = reply.now_ms + lease_reply.ends_in_ms
        until = lease_end(sent_at, lease_reply.ends_in_ms)
        with self._states.state_lock:
            state.update_clock_offset(reply.now_ms, sent_at, now)
            if state.tell is not None:
                self.observe_demand(state, now)
            state.limit = state.charges[reply.binding_index].limit
            state.left_in_store = max(0, reply.left)
            state.reset_at = now + reply.reset_ms / 1000
            # In the bucket of `now_ms`, or the ring's newest one, if the clock is behind that.
            charged_ms = max(reply.now_ms, ends_ms - state.bucket_ms)
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


class LeasedKeyState(KeyState):
    """A key's lease, permits that were charged in one bucket and until when they may be spent, and
    the demand that sizes the next one.

    A reply has the time that its bucket had left, and this machine's clock may be slower than the
    store's: chrony slews a clock by up to 8.3 %. So a lease ends before its bucket, by the part
    `MAX_CLOCK_DRIFT` of that time, and each later grant or admission from the same bucket extends
    it:

    store's bucket   |-----------------------------------------|
    first reply      t1 ---------------------------------> ends t1 + 0.91 of what was left
    a later one                     t2 -----------------------> ends t2 + 0.91 of what was left then
    """

    __slots__ = (
        "bucket_ms", "charged_ms", "demand", "extended_at", "has_review", "lease_bucket_ends_ms",
        "lease_fetch", "left_at_observation", "left_at_review", "no_lease_until", "waiting_permits",
        "was_reset",
    )  # fmt: skip

    def __init__(
        self, name: StateName, charges: tuple[Charge, ...], offset_ms: float, now: float
    ) -> None:
        super().__init__(name, charges, limits_in(charges), offset_ms)
        self.demand = Demand(now)
        self.lease_bucket_ends_ms = 0
        """When the bucket of the lease ends, on the store's clock: this identifies the bucket."""
        self.charged_ms = 0
        """A moment in that bucket, on the store's clock."""
        self.extended_at = 0.0
        """When the request was sent whose reply `permits_until` comes from, monotonic seconds."""
        self.no_lease_until = 0.0
        """When leasing may go on (monotonic seconds): see `Leases.on_outcome_unknown`."""
        self.left_at_observation = 0
        """Permits that were left when the demand was last observed."""
        self.left_at_review = -1
        """Permits that were left at the last review."""
        self.waiting_permits = 0
        """What the calls cost that wait for a lease which another one is fetching."""
        self.lease_fetch: Completion | None = None
        """Completed when the lease arrives that is being fetched; None if none is."""
        self.has_review = False
        """It is in the queue or the heap of `LeaseReviews`."""
        self.was_reset = False
        """Its windows have been emptied by this process: what was leased before is not in them."""
        self.bucket_ms = min(charge.limit.bucket_ms for charge in charges)

    def observe_demand(self, counter_lock: Lock, now: float, cost: int = 0) -> None:
        """See `Leases.observe_demand`. Under `state_lock`."""
        with counter_lock:
            spent = self.left_at_observation - self.permits_left
            self.left_at_observation = self.permits_left
            surplus, self.surplus_passed = self.surplus_passed, 0
        self.demand.observe(now, max(0, spent) + cost)
        if self.tell is not None and (spent or surplus):
            self.tell(self.charges[0].key, self.limit, True, "lease", spent - surplus, spent)

    def extend_lease(self, now_ms: int, sent_at: float) -> None:
        """Record that the store's clock showed `now_ms` after `sent_at`. The reply to the latest
        request counts, as the clocks have had the least time to drift apart since.
        """
        left_ms = self.lease_bucket_ends_ms - now_ms
        if sent_at >= self.extended_at and 0 < left_ms <= self.bucket_ms:
            self.extended_at = sent_at
            self.permits_until = lease_end(sent_at, left_ms)

    def seconds_to_bucket_end(self, now: float) -> float:
        return (self.bucket_ms - (now * 1000 + self.offset_ms) % self.bucket_ms) / 1000


MAX_CLOCK_DRIFT = 0.1
"""How much faster than this machine's clock the store's may run, as a part of 1, before more than
the limit can be admitted. Beyond that, and where this machine was suspended so that its clock stood
still, a process may spend what its lease still holds after the bucket has ended.
"""


def lease_end(sent_at: float, left_ms: int) -> float:
    """Return until when a lease may be spent (monotonic seconds) whose bucket had `left_ms` left by
    the reply to a request that was sent at `sent_at`.
    """
    return sent_at + left_ms / 1000 / (1 + MAX_CLOCK_DRIFT) - CLOCK_MARGIN_S


MAX_LEASE_S = 0.25
"""Seconds for which a lease is to last at most: what a killed process has leased is lost."""


class LeasePrefetches:
    """The queue of key states that need a lease soon, and the commands that fetch it."""

    def __init__(
        self,
        commands: CommandCache,
        states: KeyStateCache[LeasedKeyState],
        schedule: FlushSchedule,
        leases: Leases,
        cache_refusal: Callable[[AnyKey, Decision, float], object],
    ) -> None:
        self._command_cache = commands
        self._states = states
        self._schedule = schedule
        self._leases = leases
        self._cache_refusal = cache_refusal
        self.after_fork()

    def after_fork(self) -> None:
        self._queue: list[LeasedKeyState] = []

    def request(self, state: LeasedKeyState, now: float) -> None:
        """Request the next lease of `state` from the worker, as few permits are left."""
        state.prefetch_threshold = -1
        self._queue.append(state)
        self._schedule.flush_by(now)

    def collect(self, now: float, outgoing: list[OutgoingCommand], *, everything: bool) -> None:
        """Add the requested fetches to `outgoing`; `everything`: drop them. Under `state_lock`."""
        for _ in range(len(self._queue)):
            state = self._queue.pop()
            if not everything:
                self._leases.observe_demand(state, now)
                self.add_if_needed(state, now, state.permits_until - now, outgoing)

    def next_due_at(self, now: float) -> float:
        return now if self._queue else NEVER

    def add_if_needed(
        self, state: LeasedKeyState, now: float, seconds: float, outgoing: list[OutgoingCommand]
    ) -> None:
        """Add a fetch to `outgoing` if more is needed within `seconds` than `state` has left."""
        extra = state.demand.permits_needed(now, min(MAX_LEASE_S, seconds)) - state.permits_left
        if (
            extra < 1
            or state.lease_fetch is not None
            or now < max(state.refused_until, state.no_lease_until)
        ):
            return
        completion, command = Completion(), Lease(state.charges, extra=extra - 1, prefetch=True)
        pending = OutgoingCommand(
            command, lambda reply, sent_at: self._on_reply(state, completion, reply, sent_at)
        )
        self._leases.fetches.add(completion)
        if self._states.closed:  # `close` may not have seen this fetch, and then does not wait
            self._leases.fetches.discard(completion)
            return
        state.lease_fetch = completion
        outgoing.append(pending)  # whose `on_reply`, which is called in any case, completes it

    def _on_reply(
        self,
        state: LeasedKeyState,
        completion: Completion,
        reply: LeaseReply | Exception,
        sent_at: float,
    ) -> None:
        if completion.is_complete:  # called a second time
            return
        if state.lease_fetch is completion:
            state.lease_fetch = None
        try:
            if isinstance(reply, LeaseReply):
                if reply.acquire_reply.admitted:
                    self._leases.add_granted(state, reply, reply.extra + 1, sent_at)
                else:
                    key = state.charges[0].key
                    refused = decision_of(
                        self._command_cache.acquire_command(key), reply.acquire_reply, "store"
                    )
                    self._cache_refusal(key, refused, sent_at)
            elif isinstance(reply, StoreError) and reply.charged is None:
                self._leases.on_outcome_unknown(state)
        finally:
            completion.complete()  # after an error, too: callers then ask the store themselves
            self._leases.fetches.discard(completion)


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
        self.leases = leases
        self.prefetches = prefetches
        self.refunds = refunds
        self._heap_order = itertools.count()
        self.after_fork()

    def after_fork(self) -> None:
        self._heap: list[tuple[float, int, LeasedKeyState]] = []
        """When to review which lease. The number in between only keeps key states from being
        compared."""
        self.leases.after_fork()
        self.prefetches.after_fork()
        self.refunds.after_fork()

    def collect(self, now: float, outgoing: list[OutgoingCommand], *, everything: bool) -> None:
        """Add what is due to `outgoing`; with `everything`, refunds of all leases, no fetches."""
        with self._states.state_lock:  # closing a limiter may do this beside the worker
            self.prefetches.collect(now, outgoing, everything=everything)
            while self.leases.new_reviews:
                self._schedule_review(self.leases.new_reviews.pop(), now)
            if self._states.tell is not None:
                for _, _, state in self._heap:
                    if state.permits_left != state.left_at_observation:
                        self.leases.observe_demand(state, now)
            while self._heap and (everything or self._heap[0][0] <= now):
                self._review(heapq.heappop(self._heap)[2], now, outgoing, everything)
            if everything:
                # All key states: one may have left the heap in a flush that was interrupted.
                for state in self._states.all_including_cleared():
                    self.refunds.queue_unspent(state)
            self.refunds.collect(outgoing)

    def next_due_at(self, now: float) -> float:
        at = min(self.refunds.next_due_at(now), self.prefetches.next_due_at(now))
        if self._heap:
            at = min(at, self._heap[0][0])
        if self.leases.new_reviews:
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
        self.leases.observe_demand(state, now)
        idle = state.left_at_observation == before and state.left_at_review == before
        state.left_at_review = state.left_at_observation
        lease_ended = now >= state.permits_until
        bucket_ended = (
            lease_ended and now * 1000 + state.offset_ms >= state.lease_bucket_ends_ms - 1
        )
        if everything or idle or bucket_ended:
            self.refunds.queue_unspent(state)
        nothing_to_do = idle and not state.permits_left
        if everything or bucket_ended or nothing_to_do or not self._states.is_current(state):
            state.has_review = False
        else:
            self._schedule_review(state, now)
        if lease_ended and not everything and not idle:
            self.prefetches.add_if_needed(state, now, state.seconds_to_bucket_end(now), outgoing)


class LeaseRefunds:
    """Leased permits that nobody spends, to be given back to the bucket they were charged in.

      from     event                                                        to
      leased   its bucket has ended, its key is idle or evicted, the        queued
               limiter is closed, or a call over several keys needs them
      queued   the worker comes, or a call needs them                       sent
      queued   its key was reset                                            dropped
      sent     a reply                                                      refunded
      sent     an error, and it was surely not executed                     queued
      sent     an error, and it was surely not executed, after the window   expired
      sent     an error, and its outcome is unknown                         expired
      sent     any other error, which another attempt would meet again      expired

    A refund whose outcome is unknown is not sent again: a second one would create permits that
    nobody has paid for. Permits that expire count as used until their bucket leaves the window.
    """

    def __init__(
        self,
        states: KeyStateCache[LeasedKeyState],
        schedule: FlushSchedule,
        monotonic: Callable[[], float],
    ) -> None:
        self._states = states
        self._schedule = schedule
        self._monotonic = monotonic
        self.after_fork()

    def after_fork(self) -> None:
        self._queue: list[LeaseRefund] = []

    def queue_unspent(self, state: LeasedKeyState) -> int:
        """Queue the permits that `state` has left, so that no call spends them. Return how many."""
        with self._states.counter_lock:
            charges, charged_ms, permits = state.charges, state.charged_ms, state.permits_left
            state.left_at_observation -= permits
            state.permits_left = 0
            state.prefetch_threshold = -1
        if state.tell is not None:
            with self._states.state_lock:
                state.observe_demand(self._states.counter_lock, self._monotonic())
        if permits:
            self._queue.append(LeaseRefund(state, charges, permits, charged_ms))
        return permits

    def queue_unspent_and_wake(self, state: LeasedKeyState) -> None:
        if self.queue_unspent(state):
            self._schedule.flush_by(self._monotonic())

    def queue_refund(
        self, state: LeasedKeyState, charges: tuple[Charge, ...], permits: int, charged_ms: int
    ) -> None:
        """Give back permits of a lease that are not in `state`."""
        if permits:
            self._queue.append(LeaseRefund(state, charges, permits, charged_ms))
            self._schedule.flush_by(self._monotonic())

    def collect(self, outgoing: list[OutgoingCommand]) -> None:
        """Add the queued refunds, but not of reset keys, whose permits are those of later calls."""
        with self._states.state_lock:
            while self._queue:
                refund = self._queue.pop()
                if not refund.state.was_reset:
                    outgoing.append(self._command_of(refund))

    def next_due_at(self, now: float) -> float:
        return now + self._schedule.interval_s if self._queue else NEVER

    def unreturned(self) -> int:
        held = sum([state.permits_left for state in self._states.all()])
        return held + sum([refund.permits for refund in list(self._queue)])

    def _command_of(self, refund: LeaseRefund) -> OutgoingCommand:
        replied = False

        def on_reply(reply: CountReply | Exception, sent_at: float) -> None:
            nonlocal replied
            again, replied = replied, True
            if not again and isinstance(reply, StoreError) and reply.charged is False:
                now = self._monotonic()
                if now * 1000 + refund.state.offset_ms - refund.charged_ms < (
                    refund.state.longest_window_ms
                ):
                    self._queue.append(refund)

        charges = with_cost(refund.charges, refund.permits)
        return OutgoingCommand(Refund(charges, charged_ms=refund.charged_ms), on_reply)


class LeaseRefund(NamedTuple):
    """Permits of one lease to give back."""

    state: LeasedKeyState
    charges: tuple[Charge, ...]
    permits: int
    charged_ms: int
    """A moment in the bucket that they were charged in, ms of the store's clock."""


_DECAY_TIME_S = 0.25
"""Seconds after which an observation weighs 1/e."""
_INITIAL_OBSERVED_S = 0.01
"""Seconds without a call assumed before the first: two calls at once need not mean many more."""
_MIN_LEASE_PERMITS = 2
"""A lease of fewer permits saves no command: fetching it and refunding the rest are two commands.
"""
_MIN_PERMITS = 2
"""Permits asked for lately, faded, below which no key gets its first lease. Most keys may be called
two or three times only, and `permits_needed` takes a tenth of the processor time of such a call.
"""
_FAR_APART_S = _DECAY_TIME_S / 4
"""Calls of cost 1 that are farther apart never add up to the demand for `_MIN_LEASE_PERMITS`: with
`permits` at 4, needed are 4 * (1 - 1 / sqrt(4)) = 2.
"""


class Demand:
    """How many permits a process will need of a key, which sizes its leases.

    Two sums decay exponentially with the time constant `_DECAY_TIME_S`: the permits that were asked
    for, and the seconds that were observed. Their quotient is a rate, and the rate gives what will
    be needed until a moment. An estimate that is a little too high costs little: what a lease has
    left when its bucket ends is given back, and other processes can use it as long as the bucket
    counts.
    """

    __slots__ = ("observed_at", "observed_s", "permits")

    def __init__(self, now: float) -> None:
        self.permits = 0.0
        """Permits that were asked for, faded."""
        self.observed_s = _INITIAL_OBSERVED_S
        """Seconds in which they were, faded."""
        self.observed_at = now
        """Monotonic seconds."""

    def observe(self, now: float, permits: int) -> None:
        """Record that `permits` were asked for since the last observation."""
        elapsed_s = now - self.observed_at
        if elapsed_s > 0:
            fade = exp(-elapsed_s / _DECAY_TIME_S)
            self.permits *= fade
            self.observed_s = self.observed_s * fade + _DECAY_TIME_S * (1 - fade)
            self.observed_at = now
        self.permits += permits

    def rate(self, now: float) -> float:
        fade = exp(-max(0.0, now - self.observed_at) / _DECAY_TIME_S)
        return self.permits * fade / (self.observed_s * fade + _DECAY_TIME_S * (1 - fade))

    def permits_needed(self, now: float, seconds: float) -> int:
        """Return the permits that will be needed within `seconds`, less the standard error of the
        rate; 0 if a lease of them would save no command.
        """
        if self.permits <= 1:
            return 0
        needed = int(self.rate(now) * seconds * (1 - 1 / sqrt(self.permits)))
        return needed if needed >= _MIN_LEASE_PERMITS else 0


def worth_lease(command: Acquire, now: float, seconds: float) -> bool:
    """True if a lease for `seconds` would save commands, for a key without a key state. If not,
    note a call of `command`.

    Most keys may be called too seldom for a lease, and their calls are to cost no more than in
    `direct`. So the demand of such a key is kept in its command, and as long as its calls are far
    apart that is only the time of the last one. (Threads share it without a lock: an observation
    that is lost delays a lease by one call.)
    """
    demand = command.unleased_demand
    cost = command.charges[0].cost
    if demand.__class__ is not Demand:
        if cost == 1 and now - demand > _FAR_APART_S:
            command.unleased_demand = now
            return False
        called_at = demand
        demand = Demand(called_at or now)
        if called_at:
            demand.observe(called_at, cost)
        command.unleased_demand = demand
    if demand.permits >= _MIN_PERMITS and demand.permits_needed(now, seconds):
        return True
    demand.observe(now, cost)
    return False


def take_demand(command: Acquire, now: float) -> Demand:
    """Return the demand of a key that gets a state now, as `worth_lease` kept it, or a new one."""
    demand, command.unleased_demand = command.unleased_demand, 0.0
    return demand if isinstance(demand, Demand) else Demand(now)
