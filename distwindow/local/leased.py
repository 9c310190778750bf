"""`consistency="leased"`: permits are leased from the store in blocks and spent here.

    store   |--- bucket ----------------|--- bucket ----------------|
            ^ lease 40       ^ 30, prefetched   ^ refund of 3
    here     ############### ###########              |############

A lease is charged when it is granted, in the bucket of that moment, and may be spent until that
bucket ends on the store's clock. So what is spent counts in the bucket in which it is spent, and no
window ever holds more than the limit. What is left at the end is given back.

A lease has as many permits as will be needed (`Demand`) until the bucket ends, for a quarter of
a second at most, and never more than half of what the limit has left. For a key with little demand,
or near its limit, the store decides each call, as in `direct`.

    from      event                                        to
    none      a call that the store decides, with demand   fetching
    none      a prefetch                                   fetching
    fetching  a grant                                      held
    fetching  a grant for a caller that has given up       held
    fetching  a grant, overtaken by a later bucket's       refunded
    fetching  a grant, and the key was evicted             refunded
    fetching  a grant, and the key was reset               none
    fetching  a refusal                                    none
    fetching  an error, and it was surely not executed     none
    fetching  an error, and its outcome is unknown         none, and no lease in this bucket
    held      a call                                       held, with fewer permits
    held      any reply from the same bucket               held, extended
    held      its time is over before its bucket's         ended
    ended     any reply from the same bucket               held, extended
    held      a review after two intervals without calls   refunded
    ended     a review after the bucket's end              refunded
    held      its key is evicted                           refunded
    held      the limiter is closed                        refunded
    held      a call that costs more than is left          refunded, before the store decides
    held      its key is reset                             none

Its parts are in `leases.py`.
"""

from __future__ import annotations

from collections.abc import Iterable

from ..errors import StoreError
from ..ring.clock import Clock
from ..ring.commands import Acquire, Lease
from ..ring.decision import Charge, Decision
from ..ring.decisions import decision_of
from ..ring.key import AnyKey, key_length
from ..ring.replies import LeaseReply
from ..runtime.command_cache import CommandCache
from ..runtime.flush import OutgoingCommand, send_all
from ..runtime.options import Options
from ..runtime.steps import Completion, Fetch, Operation, Sleep, WaitFor
from ..support.first_use import FirstUse
from .base import MAX_CACHED_KEY_LENGTH, ExactStrategy
from .key_state import StateName, peeked_admission
from .leases import (
    MAX_LEASE_S,
    LeasedKeyState,
    LeasePrefetches,
    LeaseRefunds,
    LeaseReviews,
    Leases,
    take_demand,
    worth_lease,
)

_NO_LEASE_NEAR_END_S = 0.005
"""Seconds before its last bucket's end in which nothing is leased: a call may sleep instead."""


class Leased(ExactStrategy[LeasedKeyState]):
    """Spends leased permits, and leases more where there is demand."""

    uses_leases = True
    _parts = ("_reviews", *ExactStrategy._parts)

    def __init__(self, commands: CommandCache, clock: Clock, options: Options) -> None:
        super().__init__(commands, clock, options)
        self._lease_wait_s = options.timeout  # for a lease that another call is fetching

    @FirstUse
    def _reviews(self) -> LeaseReviews:
        states, schedule, monotonic = self._key_states, self._schedule, self._monotonic
        refunds = LeaseRefunds(states, schedule, monotonic)
        states.on_evicted = refunds.queue_unspent_and_wake
        leases = Leases(states, schedule, refunds, monotonic)
        prefetches = LeasePrefetches(
            self._command_cache, states, schedule, leases, self.cache_refusal
        )
        return LeaseReviews(states, schedule, leases, prefetches, refunds)

    @property
    def _leases(self) -> Leases:
        return self._reviews.leases

    @property
    def _prefetches(self) -> LeasePrefetches:
        return self._reviews.prefetches

    @property
    def _refunds(self) -> LeaseRefunds:
        return self._reviews.refunds

    def peek(self, key: AnyKey) -> Decision | None:
        state, now = self._get(key), self._monotonic()
        if state is not None and now < state.permits_until and (left := state.permits_left) > 0:
            return peeked_admission(
                state, key, state.limit, state.left_in_store + left, now, "lease"
            )
        return super().peek(key)

    def store_command(self, key: AnyKey, cost: int) -> Acquire | None:
        """Return the command of a call on a key called too seldom to have a state; else None."""
        command = self._command_cache.acquire_command(key, cost)
        if key.__class__ is not str:
            key = command.charges[0].key
        if self._get(key) is not None:
            return None
        if command.write_limit or key_length(key) > MAX_CACHED_KEY_LENGTH:
            return command  # the first call of this key and cost, or a key that gets no state
        return None if worth_lease(command, self._monotonic(), MAX_LEASE_S) else command

    def acquire_remote(self, key: AnyKey, cost: int) -> Operation[Decision]:
        """Send the call to the store, and lease more where there is demand."""
        command = self._command_cache.acquire_command(key, cost)
        key = command.charges[0].key
        state = self._state_or_new(command) if self._cacheable(key) else None
        if state is None:
            decision: Decision = yield command
            return decision
        called_at = self._monotonic()
        while (completion := state.lease_fetch) is not None:
            # Wait for it: otherwise every thread would fetch the lease, over its own connection.
            with self._key_states.state_lock:
                state.waiting_permits += cost
            try:
                yield WaitFor(completion, called_at + self._lease_wait_s - self._monotonic())
            finally:
                with self._key_states.state_lock:
                    state.waiting_permits -= cost
            if not completion.is_complete:
                break
            if completion.failure is not None:
                raise _failure_for_waiter(completion.failure)
            local = self.decide_locally(key, cost)
            if local is not None:
                return local
        now = self._monotonic()
        self._leases.observe_demand(state, now, cost)
        bucket_left_s = (state.lease_bucket_ends_ms - now * 1000 - state.offset_ms) / 1000
        if (
            state.permits_until <= now
            and 0 < bucket_left_s < _NO_LEASE_NEAR_END_S
            and state.demand.permits_needed(now, MAX_LEASE_S)
        ):
            # The lease has ended, and its bucket ends in a few ms. Sleep until then: a lease
            # granted now would expire at once, and every thread would open a connection to ask.
            yield Sleep(bucket_left_s)
            local = self.decide_locally(key, cost)
            if local is not None:
                return local
            now = self._monotonic()
        if 0 < state.permits_left < cost:
            decision = yield from self._acquire_without_lease(state, command)
            return decision if decision.allowed else self.cache_refusal(key, decision, now)
        extra = 0
        if state.lease_fetch is None and now >= state.no_lease_until:
            # What is left of a lease that has ended before its bucket can be spent again with any
            # reply from the same bucket.
            is_in_bucket = now * 1000 + state.offset_ms < state.lease_bucket_ends_ms
            unspent = state.permits_left if is_in_bucket else 0
            seconds = min(MAX_LEASE_S, state.seconds_to_bucket_end(now))
            extra = state.demand.permits_needed(now, seconds) - unspent
            # All that wait are woken at once, and those for whom it does not do wait again.
            extra = max(extra, state.waiting_permits)
        if extra < 1:
            decision = yield command
            with self._key_states.state_lock:
                state.update_clock_offset(decision.now_ms, now, self._monotonic())
                state.extend_lease(decision.now_ms, now)
            return decision if decision.allowed else self.cache_refusal(key, decision, now)
        return (yield from self._acquire_with_lease(state, command, extra, now))

    def _acquire_with_lease(
        self, state: LeasedKeyState, command: Acquire, extra: int, now: float
    ) -> Operation[Decision]:
        """Send the call of `command` to the store, and lease `extra` permits with it."""
        completion = state.lease_fetch = Completion()
        failure: StoreError | None = None
        try:
            self._leases.fetches.add(completion)
            if self._key_states.closed:
                # `close` may not have seen this fetch, and then does not wait for it.
                decision: Decision = yield command
                return decision
            lease = Lease(command.charges, extra=extra)
            # Of a call that was cancelled the permits go on as leased ones, too; those of one that
            # has failed may be in use.
            lease_reply: LeaseReply = yield Fetch(
                lease,
                lambda late: self._on_late_reply(
                    state, late, now, 0 if failure else command.charges[0].cost
                ),
            )
            reply = lease_reply.acquire_reply._replace(
                left=lease_reply.acquire_reply.left + lease_reply.extra
            )
            decision = decision_of(command, reply, "store")
            if not decision.allowed:
                return self.cache_refusal(command.charges[0].key, decision, now)
            self._leases.add_granted(state, lease_reply, lease_reply.extra, now)
            return decision
        except Exception as exc:  # raised by a signal handler, too
            if isinstance(exc, StoreError):
                failure = exc
            if failure is None or failure.charged is None:
                self._leases.on_outcome_unknown(state)
            raise
        finally:
            if state.lease_fetch is completion:
                state.lease_fetch = None
            completion.complete(failure)
            self._leases.fetches.discard(completion)

    def _on_late_reply(
        self, state: LeasedKeyState, lease_reply: LeaseReply, sent_at: float, unused: int
    ) -> None:
        """Keep the leased permits of a call whose caller has given up, and `unused` of its own."""
        if lease_reply.acquire_reply.admitted:
            self._leases.add_granted(state, lease_reply, lease_reply.extra + unused, sent_at)

    def _acquire_without_lease(
        self, state: LeasedKeyState, command: Acquire
    ) -> Operation[Decision]:
        """Give the lease back first, as the store might refuse the call for lack of its permits."""
        yield from send_all(self.before_multi_key([command.charges[0].key]), self._monotonic)
        decision: Decision = yield command
        return decision

    def before_multi_key(self, keys: Iterable[AnyKey]) -> list[OutgoingCommand]:
        """Return the refunds of leases of `keys`: the store decides a call over several keys."""
        for key in keys:
            state = self._get(key)
            if state is not None and state.permits_left:
                self._refunds.queue_unspent(state)
        refunds: list[OutgoingCommand] = []
        self._refunds.collect(refunds)
        return refunds

    def lease_fetch_waits(self, keys: Iterable[AnyKey] | None = None) -> list[WaitFor]:
        if keys is None:
            fetches = list(self._leases.fetches)
        else:
            states = [state for key in keys if (state := self._get(key)) is not None]
            fetches = [fetch for state in states if (fetch := state.lease_fetch) is not None]
        return [WaitFor(fetch, self._lease_wait_s) for fetch in fetches]

    def unreturned_permits(self) -> int:
        return self._refunds.unreturned()

    def _on_few_left(self, state: LeasedKeyState, now: float) -> None:
        self._prefetches.request(state, now)

    def _after_reset(self, state: LeasedKeyState) -> None:
        # Its buckets have been emptied, so there is nothing to give back, also of what is queued or
        # still being fetched.
        state.was_reset = True
        state.observe_demand(self._key_states.counter_lock, self._monotonic())
        with self._key_states.counter_lock:
            state.permits_left = state.left_at_observation = 0
            state.prefetch_threshold = -1

    def _state_or_new(self, command: Acquire) -> LeasedKeyState:
        key = command.charges[0].key
        state = self._get(key)
        if state is None:
            charges, now = self._command_cache.acquire_command(key).charges, self._monotonic()
            # This machine's wall clock, until the first reply of the store corrects the offset.
            offset_ms = self._clock.now_ms() - now * 1000
            state = self._key_states.get_or_add(
                key, lambda: self._new_state(key, charges, offset_ms)
            )
            state.demand = take_demand(command, now)
        return state

    def _new_state(
        self, name: StateName, charges: tuple[Charge, ...], offset_ms: float
    ) -> LeasedKeyState:
        return LeasedKeyState(name, charges, offset_ms, self._monotonic())


def _failure_for_waiter(failure: StoreError) -> StoreError:
    """Return another call's failure for one that has waited for it, and has not sent anything."""
    text = (
        f"the call that was fetching a lease failed ({failure}); this call was surely not executed"
    )
    return type(failure)(text, charged=False)
