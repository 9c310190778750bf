"""Permits bought from the store in blocks, and spent here.

    store   |--- bucket ----------------|--- bucket ----------------|
            ^ lease 40       ^ 30, ahead of need       ^ returned 3
    here     ############### ###########              |############

A lease is charged when it is granted, in the bucket of that moment, and may be spent until that
bucket ends on the store's clock: so what is spent counts in the bucket in which it happens, and no
window ever holds more than the limit. What is left at the end is given back.

The end is known as "so long after the moment the store was asked", and our clock may run slower
than the store's: chrony slews a clock by up to 8.3 %. So a lease ends `_MAX_DRIFT` of that time
before the bucket does, and goes on with the next reply from the same bucket:

    store's bucket   |-----------------------------------------|
    first reply      t1 ---------------------------------> ends t1 + 0.91 of what was left
    a later one                     t2 -----------------------> ends t2 + 0.91 of what was left then

How large: what is needed (`consistency/demand.py`) until the bucket ends or a quarter of a second
has passed, and never more than half of what the limit has left. So a key with little demand, or
near its limit, is asked about call by call, as in `direct`.
"""

from __future__ import annotations

import heapq
import itertools
from collections import deque
from collections.abc import Iterable
from typing import Any

from ..core.charge import Charge, charged_in, limits_in, with_cost
from ..core.clock import Clock
from ..core.decision import Decision
from ..core.errors import StoreError
from ..core.key import AnyKey
from ..operations.command_cache import CommandCache
from ..operations.completion import Completion
from ..operations.flush import send_all
from ..operations.steps import Fetch, Operation, Sleep, WaitFor
from ..operations.strategy import PendingCommand
from ..protocol.commands import Acquire, Lease, Refund
from ..protocol.decisions import decision_of
from ..protocol.replies import CountReply, LeaseReply
from .base import CLOCK_MARGIN_S, LocalStrategy
from .demand import Demand
from .key_state import KeyState

MAX_LEASE_S = 0.25
"""Seconds that a lease is to last at most: what a killed process takes with it."""
PREFETCH_LEAD_S = 0.02
"""Seconds before a lease is spent that the worker is told to get the next."""
_BUCKET_END_S = 0.005
"""Seconds before the end of a bucket that may be slept through, in which there can be no lease."""
_AFTER_END_S = 0.002
"""Seconds after the end of a lease in which the store comes to the next bucket, too."""
MAX_CLOCK_DRIFT = 0.1
"""How much faster than ours the store's clock may run before more than the limit can be admitted:
a part of 1. Beyond that, and where our machine was suspended so that its clock stood still, a
process may spend what its lease still holds after the bucket has ended.
"""


class LeasedKeyState(KeyState):
    """A key's lease, and the demand that sizes the next."""

    __slots__ = (
        "bucket_ms",
        "charged_ms",
        "demand",
        "extended_at",
        "in_review",
        "lease_ends_ms",
        "lease_fetch",
        "left_at_review",
        "left_at_sample",
        "no_lease_before",
    )  # fmt: skip

    def __init__(self, key: Any, charges: tuple[Charge, ...], offset_ms: float, now: float) -> None:
        super().__init__(key, charges, limits_in(charges), offset_ms)
        self.demand = Demand(now)
        self.lease_ends_ms = 0
        """When the bucket of the lease ends, on the store's clock: this names the bucket."""
        self.charged_ms = 0
        """A moment in it."""
        self.extended_at = 0.0
        """When the store was asked whose reply `until` is reckoned from, monotonic seconds."""
        self.no_lease_before = 0.0
        """No lease before then: the fate of one is unknown, and so it may be charged in vain."""
        self.left_at_sample = 0
        """What was left when the demand was last looked at."""
        self.left_at_review = -1
        self.lease_fetch: Completion | None = None
        """Closed while a lease is being fetched."""
        self.in_review = False
        self.bucket_ms = min(charge.limit.bucket_ms for charge in charges)

    def extend_lease(self, now_ms: int, sent_at: float) -> None:
        """The store's clock said `now_ms` after `sent_at`: until when the lease may be spent, as
        its bucket goes on. The newest estimate counts: clocks have had least time to drift apart.
        """
        left_ms = self.lease_ends_ms - now_ms
        if sent_at >= self.extended_at and 0 < left_ms <= self.bucket_ms:
            self.extended_at = sent_at
            self.permits_until = sent_at + left_ms / 1000 / (1 + MAX_CLOCK_DRIFT) - CLOCK_MARGIN_S

    def until_bucket_ends(self, now: float) -> float:
        """Seconds until the present bucket ends."""
        return (self.bucket_ms - (now * 1000 + self.offset_ms) % self.bucket_ms) / 1000


class Leased(LocalStrategy[LeasedKeyState]):
    """`consistency="leased"`."""

    leases = True

    def __init__(
        self,
        commands: CommandCache,
        clock: Clock,
        max_keys: int,
        interval: float,
        timeout: float = 0.25,
    ) -> None:
        """`patience`: seconds that a caller waits for a lease that another is fetching."""
        self._lease_wait_s = timeout
        self._heap_order = itertools.count()
        super().__init__(commands, clock, max_keys, interval)

    def after_fork(self) -> None:
        super().after_fork()
        self._lease_fetches: set[Completion] = set()
        """Of leases that calls and the worker are fetching."""
        self._prefetch_queue: deque[LeasedKeyState] = deque()
        self._review_queue: deque[LeasedKeyState] = deque()
        self._review_heap: list[tuple[float, int, LeasedKeyState]] = []
        self._refund_queue: deque[_LeaseRefund] = deque()

    # -- decisions --------------------------------------------------------------------------------

    def peek(self, key: AnyKey) -> Decision | None:
        state, now = self._get(key), self._monotonic()
        if state is not None and now < state.permits_until and (left := state.permits_left) > 0:
            return Decision(
                True, key, 1, state.limit, state.left_in_store + left, 0.0, state.reset_at - now,
                0.0, "ok", "lease", int(now * 1000 + state.offset_ms),
            )  # fmt: skip
        return super().peek(key)

    def acquire_remote(self, key: AnyKey, cost: int) -> Operation[Decision]:
        command = self._command_cache.acquire(key, cost)
        key = command.charges[0].key
        state = self._state_to_lease(key) if self._cacheable(key) else None
        if state is None:
            decision: Decision = yield command
            return decision
        came = self._monotonic()
        while (completion := state.lease_fetch) is not None:
            # Others would only ask for the same lease, each over a connection of its own.
            yield WaitFor(completion, came + self._lease_wait_s - self._monotonic())
            if not completion.is_complete:
                break
            if completion.failure is not None:
                raise _failure_for_waiter(completion.failure)
            nearby = self.decide_locally(key, cost)
            if nearby is not None:
                return nearby
        now = self._monotonic()
        self._observe_demand(state, now, cost)
        last = (state.lease_ends_ms - now * 1000 - state.offset_ms) / 1000
        if (
            state.permits_until <= now
            and 0 < last < _BUCKET_END_S
            and state.demand.permits_needed(now, MAX_LEASE_S)
        ):
            # The lease has ended, its bucket not quite: another would die at once, and call by call
            # all threads would connect and ask for these moments.
            yield Sleep(last)
            nearby = self.decide_locally(key, cost)
            if nearby is not None:
                return nearby
            now = self._monotonic()
        if 0 < state.permits_left < cost:
            decision = yield from self._acquire_without_lease(state, command)
            return decision if decision.allowed else self.remember_refusal(key, decision, now)
        extra = 0
        if state.lease_fetch is None and now >= state.no_lease_before:
            # Permits whose lease has ended before its bucket can be spent again with any reply.
            kept = state.permits_left if now * 1000 + state.offset_ms < state.lease_ends_ms else 0
            extra = (
                state.demand.permits_needed(now, min(MAX_LEASE_S, state.until_bucket_ends(now)))
                - kept
            )
        if extra < 1:
            decision = yield command
            with self._key_states.state_lock:
                state.update_clock_offset(decision.now_ms, now, self._monotonic())
                state.extend_lease(decision.now_ms, now)
            return decision if decision.allowed else self.remember_refusal(key, decision, now)
        return (yield from self._acquire_with_lease(state, command, extra, now))

    def _acquire_with_lease(
        self, state: LeasedKeyState, command: Acquire, extra: int, now: float
    ) -> Operation[Decision]:
        """Ask for a call, and for `more` permits to keep."""
        completion = state.lease_fetch = Completion()
        failure: StoreError | None = None
        try:
            self._lease_fetches.add(completion)
            if self._closed:  # `close` may not have seen the gate
                decision: Decision = yield command
                return decision
            lease = Lease(command.charges, extra=extra)
            lease_reply: LeaseReply = yield Fetch(
                lease, lambda late: self._on_late_lease(state, late, now)
            )
            reply = lease_reply.acquire_reply._replace(
                left=lease_reply.acquire_reply.left + lease_reply.extra
            )
            decision = decision_of(command, reply, "store")
            if not decision.allowed:
                return self.remember_refusal(state.key, decision, now)
            self._add_lease(state, lease_reply, lease_reply.extra, now)
            return decision
        except Exception as exc:  # a signal handler's, too
            if isinstance(exc, StoreError):
                failure = exc
            if failure is None or failure.charged is None:
                self._lease_may_be_lost(state)
            raise
        finally:
            if state.lease_fetch is completion:
                state.lease_fetch = None
            try:
                completion.complete(failure)
            finally:
                completion.complete(failure)  # a signal handler may have raised before the first
                self._lease_fetches.discard(completion)

    def _on_late_lease(
        self, state: LeasedKeyState, lease_reply: LeaseReply, sent_at: float
    ) -> None:
        """The permits to keep have come, though nobody waits for the call that they came with."""
        if lease_reply.acquire_reply.admitted:
            self._add_lease(state, lease_reply, lease_reply.extra, sent_at)

    def _lease_may_be_lost(self, state: LeasedKeyState) -> None:
        """A lease may have been charged that nobody has: at most one in a bucket."""
        now = self._monotonic()
        state.no_lease_before = now + state.until_bucket_ends(now)

    def _acquire_without_lease(
        self, state: LeasedKeyState, command: Acquire
    ) -> Operation[Decision]:
        """Ask for a call that costs more than the lease has left, which is given back before: it
        might be refused for want of these permits.
        """
        yield from send_all(self.before_multi_key([state.key]), self._monotonic)
        decision: Decision = yield command
        return decision

    def before_multi_key(self, keys: Iterable[AnyKey]) -> list[PendingCommand]:
        for key in keys:
            state = self._get(key)
            if state is not None and state.permits_left:
                self._take_unspent(state)
        returns: list[PendingCommand] = []
        self._collect_refunds(returns)
        return returns

    def lease_fetches(self, keys: Iterable[AnyKey] | None = None) -> list[WaitFor]:
        if keys is None:
            gates = list(self._lease_fetches)
        else:
            states = [state for key in keys if (state := self._get(key)) is not None]
            gates = [
                completion for state in states if (completion := state.lease_fetch) is not None
            ]
        return [WaitFor(completion, self._lease_wait_s) for completion in gates]

    def _on_reset(self, state: LeasedKeyState) -> None:
        with self._key_states.counter_lock:  # it was charged in windows that are no more
            state.permits_left = state.left_at_sample = 0
            state.refill_below = -1

    # -- leases -----------------------------------------------------------------------------------

    def _state_to_lease(self, key: AnyKey) -> LeasedKeyState:
        state = self._get(key)
        if state is None:
            charges, now = self._command_cache.acquire(key).charges, self._monotonic()
            offset = self._clock.now_ms() - now * 1000  # until the first reply
            state = self._key_states.add(key, lambda: self._new_state(key, charges, offset))
        return state

    def _new_state(self, key: Any, charges: tuple[Charge, ...], offset_ms: float) -> LeasedKeyState:
        return LeasedKeyState(key, charges, offset_ms, self._monotonic())

    def _observe_demand(self, state: LeasedKeyState, now: float, cost: int = 0) -> None:
        """Note the demand since the last time."""
        with self._key_states.state_lock:
            with self._key_states.counter_lock:
                spent = state.left_at_sample - state.permits_left
                state.left_at_sample = state.permits_left
            state.demand.observe(now, max(0, spent) + cost)

    def _add_lease(
        self, state: LeasedKeyState, lease_reply: LeaseReply, permits: int, sent_at: float
    ) -> None:
        """Put the permits of a grant with those of the same bucket."""
        now = self._monotonic()
        reply = lease_reply.acquire_reply
        ends_ms = reply.now_ms + lease_reply.ends_in_ms
        until = sent_at + lease_reply.ends_in_ms / 1000 / (1 + MAX_CLOCK_DRIFT) - CLOCK_MARGIN_S
        with self._key_states.state_lock:
            state.update_clock_offset(reply.now_ms, sent_at, now)
            state.limit = state.charges[reply.binding_ring].limit
            state.left_in_store = max(0, reply.left)
            state.reset_at = now + reply.reset_ms / 1000
            charged_ms = _charged_ms_of(lease_reply, state)
            widths = (charge.limit.bucket_ms for charge in state.charges)
            starts = reply.bucket_starts_ms or [charged_ms - charged_ms % width for width in widths]
            charges = charged_in(state.charges, starts)
            late = ends_ms < state.lease_ends_ms and not state.permits_until <= now < until
            if late or self._is_evicted(state):
                # A reply that came after that of a later bucket (where that bucket's lease has
                # ended first, the store's clock was set back), or for a cell that was evicted.
                self._refund_unspent(state, charges, permits, charged_ms)
                return
            if ends_ms != state.lease_ends_ms:
                if self._take_unspent(state):
                    self._wake_worker_at(now)
                state.permits_until = state.extended_at = 0.0
                state.charged_ms, state.lease_ends_ms = charged_ms, ends_ms
            rate = state.demand.rate(now)
            left = (
                state.permits_left + permits
            )  # never more than there is: only others' hits lower it
            low = (
                -1
                if left >= rate * max(0.0, until - now)
                else min(left // 2, int(rate * PREFETCH_LEAD_S))
            )
            with self._key_states.counter_lock:
                state.charges = charges
                state.permits_left += permits
                state.left_at_sample += permits
                state.refill_below = low
                if sent_at >= state.extended_at:  # see `estimate_end`
                    state.permits_until, state.extended_at = until, sent_at
            if not state.in_review:
                state.in_review = True
                self._review_queue.append(state)
            self._wake_worker_at(min(until + _AFTER_END_S, now + self._flush_interval))

    def _is_evicted(self, state: LeasedKeyState) -> bool:
        return self._closed or self._get(state.key) is not state

    def _take_unspent(self, state: LeasedKeyState) -> int:
        """Take what the lease has left, so that nobody can spend it any more, and have it given
        back; how many permits.
        """
        back = _LeaseRefund(state, state.charges, 0, state.charged_ms)
        self._refund_queue.append(back)
        with (
            self._key_states.counter_lock
        ):  # in one step, so that no signal handler comes before it is known there
            back.charges, back.charged_ms, back.permits = (
                state.charges,
                state.charged_ms,
                state.permits_left,
            )
            state.left_at_sample -= state.permits_left
            state.permits_left = 0
            state.refill_below = -1
        return back.permits

    def _refund_unspent(
        self, state: LeasedKeyState, charges: tuple[Charge, ...], permits: int, charged_ms: int
    ) -> None:
        if permits:
            self._refund_queue.append(_LeaseRefund(state, charges, permits, charged_ms))
            self._wake_worker_at(self._monotonic())

    def unreturned_permits(self) -> int:
        leases = sum([state.permits_left for state in self._key_states.all()])
        return leases + sum([back.permits for back in list(self._refund_queue)])

    def _collect_refunds(self, found: list[PendingCommand]) -> None:
        with self._key_states.state_lock:
            returns, self._refund_queue = self._refund_queue, deque()
            try:
                errands = [self._refund_of(back) for back in returns if back.permits]
            except BaseException:  # a signal handler's exception
                self._refund_queue.extend(returns)
                raise
            found.extend(errands)  # from here on, somebody settles them

    def _refill(self, state: LeasedKeyState, now: float) -> None:
        state.refill_below = -1
        self._prefetch_queue.append(state)
        self._wake_worker_at(now)

    def _on_evicted(self, state: LeasedKeyState) -> None:
        if self._take_unspent(state):
            self._wake_worker_at(self._monotonic())

    # -- errands ----------------------------------------------------------------------------------

    def pending_commands(
        self, now: float, found: list[PendingCommand], *, last: bool = False
    ) -> None:
        with self._key_states.state_lock:  # closing a limiter works beside the worker
            for _ in range(len(self._prefetch_queue)):
                state = self._prefetch_queue.popleft()
                if not last:
                    self._observe_demand(state, now)
                    self._prefetch_lease(state, now, state.permits_until - now, found)
            while self._review_queue:
                self._schedule_review(self._review_queue.popleft(), now)
            while self._review_heap and (last or self._review_heap[0][0] <= now):
                self._review_lease(heapq.heappop(self._review_heap)[2], now, found, last)
            if last:  # those, too, that a signal handler's exception has taken out of `_looks`
                for state in [*self._key_states.all(), *self._states_at_close]:
                    self._take_unspent(state)
            self._collect_refunds(found)
        super().pending_commands(now, found, last=last)

    def _find_next_due(self, now: float) -> None:
        super()._find_next_due(now)
        at = self.next_due_at
        if self._review_heap:
            at = min(at, self._review_heap[0][0])
        if self._refund_queue:
            at = min(at, now + self._flush_interval)
        if self._prefetch_queue or self._review_queue:
            at = min(at, now)
        self.next_due_at = min(at, self.next_due_at)

    def _schedule_review(self, state: LeasedKeyState, now: float) -> None:
        """Look at a lease once it has ended, and every now and then before."""
        at = state.permits_until + _AFTER_END_S
        if at <= now:  # its lease has ended, its bucket not yet
            at = now + max(_AFTER_END_S, state.until_bucket_ends(now))
        at = min(at, now + self._flush_interval)
        heapq.heappush(self._review_heap, (at, next(self._heap_order), state))

    def _review_lease(
        self, state: LeasedKeyState, now: float, found: list[PendingCommand], last: bool
    ) -> None:
        """Give back what a lease has too much; get the next one where it has ended."""
        before = state.left_at_sample
        self._observe_demand(state, now)
        idle = state.left_at_sample == before and state.left_at_review == before
        state.left_at_review = state.left_at_sample
        ended = now >= state.permits_until
        over = ended and now * 1000 + state.offset_ms >= state.lease_ends_ms - 1
        if last or idle or over:
            self._take_unspent(state)
        spent = idle and not state.permits_left  # and nobody wants more
        if last or self._is_evicted(state) or over or spent:
            state.in_review = False
        else:
            self._schedule_review(state, now)
        if ended and not last and not idle:
            self._prefetch_lease(state, now, state.until_bucket_ends(now), found)

    def _prefetch_lease(
        self, state: LeasedKeyState, now: float, seconds: float, found: list[PendingCommand]
    ) -> None:
        """Have the next lease fetched ahead of need, if there is a need."""
        extra = state.demand.permits_needed(now, min(MAX_LEASE_S, seconds)) - state.permits_left
        if (
            extra < 1
            or state.lease_fetch is not None
            or now < max(state.refused_until, state.no_lease_before)
        ):
            return
        completion, command = Completion(), Lease(state.charges, extra=extra - 1, prefetch=True)
        pending = PendingCommand(
            command, lambda reply, at: self._on_lease_reply(state, completion, reply, at)
        )
        self._lease_fetches.add(completion)
        if self._closed:  # `close` may not have seen the gate
            self._lease_fetches.discard(completion)
            return
        state.lease_fetch = completion
        found.append(pending)  # no signal handler can come before: somebody settles it

    def _on_lease_reply(
        self,
        state: LeasedKeyState,
        completion: Completion,
        reply: LeaseReply | Exception,
        sent_at: float,
    ) -> None:
        if completion.is_complete:  # a second time
            return
        if state.lease_fetch is completion:
            state.lease_fetch = None
        try:
            if isinstance(reply, LeaseReply):
                if reply.acquire_reply.admitted:
                    self._add_lease(state, reply, reply.extra + 1, sent_at)
                else:
                    plain = self._command_cache.acquire(state.key)
                    self.remember_refusal(
                        state.key, decision_of(plain, reply.acquire_reply, "store"), sent_at
                    )
            elif isinstance(reply, StoreError) and reply.charged is None:
                self._lease_may_be_lost(state)
        finally:
            completion.complete()  # after a failure, too: callers ask for themselves
            self._lease_fetches.discard(completion)

    def _refund_of(self, back: _LeaseRefund) -> PendingCommand:
        settled = False

        def settle(reply: CountReply | Exception, sent_at: float) -> None:
            nonlocal settled
            again, settled = settled, True
            # Sent again only where it surely was not executed: twice would be permits from nowhere.
            if not again and isinstance(reply, StoreError) and reply.charged is False:
                state, now = back.cell, self._monotonic()
                if now * 1000 + state.offset_ms - back.charged_ms < state.longest_ms:
                    self._refund_queue.append(back)

        charges = with_cost(back.charges, back.permits)
        return PendingCommand(Refund(charges, charged_ms=back.charged_ms), settle)


class _LeaseRefund:
    """Permits of a lease to give back."""

    __slots__ = ("cell", "charged_ms", "charges", "permits")

    def __init__(
        self, state: LeasedKeyState, charges: tuple[Charge, ...], permits: int, charged_ms: int
    ) -> None:
        self.cell = state
        self.charges = charges
        self.permits = permits
        self.charged_ms = charged_ms
        """A moment in the bucket that they were charged in."""


def _failure_for_waiter(failure: StoreError) -> StoreError:
    """Another caller's failure, for one who waited for it: nothing was sent on its behalf."""
    return type(failure)(str(failure), charged=False)


def _charged_ms_of(lease_reply: LeaseReply, state: LeasedKeyState) -> int:
    """A moment in the bucket of a grant. That is the present one, or where the store's clock is
    behind its newest bucket, that.
    """
    now = lease_reply.acquire_reply.now_ms
    return max(now, now + lease_reply.ends_in_ms - state.bucket_ms)
