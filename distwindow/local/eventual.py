"""`consistency="eventual"`: this process decides, and exchanges counts with the store periodically.

    here     .#.##..#.|.##.#....|..#.##...        counts, by bucket
    store   --^---------^---------^-------        every `sync_interval`: own counts there, the
                                                  fleet's back

A key's window is what all processes had admitted at the last sync, by bucket, and what was admitted
here since. No call waits for the store. So all processes together exceed the limit by at most what
they admit within two syncs and the round trips, and no process alone admits more than the limit.

    a flush                                            calls until the next one
    the store has answered                             are decided here
    no store has answered (an outage)                  are decided here
    the store has refused a key (of another type)      of this key raise, until it takes it
    the store has refused all keys for configuration   raise, of all keys, until it answers one
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Iterable
from dataclasses import replace
from threading import Lock

from ..errors import ConfigurationError
from ..ring.clock import NEVER, Clock
from ..ring.commands import Flush
from ..ring.decision import Charge, Decision, limits_in, with_bucket_starts, with_cost
from ..ring.key import AnyKey, key_length, normalize_key
from ..ring.limit import Limit, expires_in_ms
from ..ring.replies import FleetCounts
from ..ring.stats import Bucket
from ..runtime.command_cache import CommandCache
from ..runtime.flush import FlushSchedule, OutgoingCommand
from ..runtime.options import Options
from ..support.first_use import FirstUse
from .base import MAX_CACHED_KEY_LENGTH, LocalStrategy, new_tuple
from .key_state import (
    CachedRefusal,
    KeyState,
    KeyStateCache,
    StateName,
    peeked_admission,
    refusal_decision,
)
from .pending_counts import PendingCounts


class EventualKeyState(KeyState):
    """A key's windows, one for each limit, and how often it is called."""

    refused_by = "local"

    __slots__ = (
        "binding_window", "called_repeatedly", "debts", "failure", "last_called_at",
        "poll_scheduled", "windows",
    )  # fmt: skip

    def __init__(
        self, name: StateName, charges: tuple[Charge, ...], offset_ms: float, share: float
    ) -> None:
        super().__init__(name, charges, limits_in(charges), offset_ms)
        self.windows = tuple(FleetWindow(charge.limit, share) for charge in charges)
        self.max_cost = min([window.process_limit for window in self.windows])
        self.binding_window = self.windows[0]
        """The window with the least permits left."""
        self.last_called_at = -NEVER
        """When it was called, monotonic seconds. Updated when its counts are flushed only."""
        self.debts = 0
        """Permits of `passed` that no call was admitted for, of what was not told yet."""
        self.called_repeatedly = False
        """It was called at two flushes within its longest window."""
        self.poll_scheduled = False
        self.failure: ConfigurationError | None = None
        """What the store has refused its last flush with."""

    def on_bucket_closed(self, start: int, passed: int) -> None:
        for window in self.windows:
            window.count_own(start, passed)

    def tell_counted(self, counter_lock: Lock, passed: int, blocked: int) -> None:
        super().tell_counted(counter_lock, passed, blocked)
        if passed and self.tell is not None:
            with counter_lock:
                surplus, self.surplus_passed = self.surplus_passed, 0
                debts, self.debts = self.debts, 0
            limit, permits = self.binding_window.limit, passed - debts
            name = self.charges[0].key
            self.tell(name, limit, True, "local", permits - surplus, permits)

    def replace_clock_offset(self, counter_lock: Lock, offset_ms: float, now: float) -> None:
        shift_ms = round(offset_ms - self.offset_ms)
        super().replace_clock_offset(counter_lock, offset_ms, now)
        for window in self.windows:
            window.shift_own(shift_ms)


class Eventual(LocalStrategy[EventualKeyState]):
    """Decides by the windows that `FleetSync` keeps."""

    can_borrow = False
    _parts = ("_sync", *LocalStrategy._parts)

    def __init__(self, commands: CommandCache, clock: Clock, options: Options) -> None:
        super().__init__(commands, clock, options)
        self._schedule.interval_s = options.sync_interval
        self._share = options.share or 1.0

    @FirstUse
    def _sync(self) -> FleetSync:
        sync = FleetSync(self._key_states, self._schedule, self._counts, self._clock)
        self._counts.flush_hooks = sync
        return sync

    def max_cost(self, limits: Iterable[Limit]) -> int:
        return min([share_of(limit, self._share) for limit in limits])

    def decide_locally(self, key: AnyKey, cost: int) -> Decision:
        """Decide the call. Raises `ValueError` or `TypeError` for an invalid key or cost."""
        try:
            state = self._get(key)
            if state is None and key.__class__ is not str:
                key = normalize_key(key)
                state = self._get(key)
            if state is not None:
                self._touch(key)
        except (TypeError, KeyError):  # not a key, or it was evicted in between
            state = None
        # A memoryview is equal to the bytes in it, but is not a key.
        is_key = key.__class__ is not memoryview  # type: ignore[comparison-overlap]  # as in base.py
        if state is None or not is_key or type(cost) is not int or not 1 <= cost <= state.max_cost:
            state = self._checked_state(key, cost)
        now = self._monotonic()
        if now >= state.permits_until:
            self._sync.prepare_call(state, now)
        if state.dirty and not self._needs_lock:  # no call from here to the counts
            left = state.permits_left - cost
            if left >= 0:
                state.permits_left = left
                state.passed += cost
                if cost != 1:
                    state.surplus_passed += cost - 1
            charges = state.charges
        else:
            left, charges = self._count(state, cost)
        if left < 0:
            return self._refuse(state, key, cost, now)
        if cost != 1:
            charges = with_cost(charges, cost)
        # `Decision(...)` takes nearly twice as long, and so does `int(...)` of the time.
        return new_tuple(
            Decision,
            (
                True, key, cost, state.binding_window.limit, left, 0.0, state.reset_at - now, 0.0,
                "ok", "local", (now * 1000 + state.offset_ms).__trunc__(), charges,
            ),
        )  # fmt: skip

    def _count(self, state: EventualKeyState, cost: int) -> tuple[int, tuple[Charge, ...]]:
        """Count a call of `cost` if there are as many permits left, and have it flushed. Return how
        many are left afterwards (below 0: there were too few), and where it is charged.
        """
        with self._lock:
            left = state.permits_left - cost
            if left >= 0:
                state.permits_left = left
                state.passed += cost
                state.surplus_passed += cost - 1
            charges = state.charges
        if left >= 0 and not state.dirty:
            self._counts.mark_dirty(state)
        return left, charges

    def peek(self, key: AnyKey) -> Decision:
        state, now = self._get(key) or self._checked_state(key, 1), self._monotonic()
        if now >= state.permits_until:
            self._sync.prepare_call(state, now)
        if state.permits_left < 1:
            return self._refuse(state, key, 1, now, counted=False)
        limit = state.binding_window.limit
        return peeked_admission(state, key, limit, state.permits_left, now, "local")

    def before_multi_key(self, keys: Iterable[AnyKey]) -> list[OutgoingCommand]:
        """Return the flushes of `keys`, as the store decides a call over several keys."""
        found = [self._get(name) for name in dict.fromkeys(map(self._name_of, keys))]
        flushes = [self._counts.flush_of(state) for state in found if state is not None]
        return [flush for flush in flushes if flush is not None]

    def invalidate(self, key: AnyKey) -> None:
        """Flush `key` soon, as its windows have changed in the store."""
        state = self._get(self._name_of(key))
        if state is not None:
            state.called_repeatedly, state.last_called_at = True, self._monotonic()
            if not state.dirty:
                self._counts.mark_dirty(state)

    def _add_debt(self, state: EventualKeyState, permits: int) -> None:
        with self._lock:
            state.passed += permits
            state.debts += permits
            state.permits_left -= permits
            state.refused_until = 0.0  # there is room later than was computed

    def take_back(self, charges: tuple[Charge, ...], permits: int, charged_ms: int) -> int:
        """Take permits out of what is counted here. The store gives those back that were sent."""
        state = self._find_state(charges)
        if state is None:
            return 0
        start = charged_ms - charged_ms % state.count_bucket_ms
        with self._key_states.state_lock:
            state.close_bucket(self._key_states.counter_lock)
            left, kept = permits, []
            for counted in state.closed_buckets:
                taken = min(left, counted.passed) if counted.start == start else 0
                left -= taken
                kept.append(replace(counted, passed=counted.passed - taken) if taken else counted)
            state.closed_buckets = tuple(kept)
            for window in state.windows:
                window.count_own(start, -permits)
            state.refused_until = 0.0
            self._sync.recompute_permits_left(state, self._monotonic())
        return permits - left

    def is_in_flight(self, charges: tuple[Charge, ...], charged_ms: int) -> bool:
        state = self._find_state(charges)
        batch = None if state is None else state.in_flight
        if state is None or batch is None:
            return False
        start = charged_ms - charged_ms % state.count_bucket_ms
        return any(counted.passed and counted.start >= start for counted in batch.buckets)

    def charged_ms(self, decision: Decision, decided_at: float) -> int:
        """See `Strategy`. The offset of the store's clock may have been corrected since. Of the two
        times it is the earlier: a permit that is given back out of too late a bucket would be
        missing in a window for too long.
        """
        state = self._find_state(decision.charged or ())
        offset_ms = self._sync.known_offset_ms() if state is None else state.offset_ms
        return min(decision.now_ms, int(decided_at * 1000 + offset_ms))

    def _name_of(self, key: AnyKey) -> StateName:
        if key_length(key) <= MAX_CACHED_KEY_LENGTH:
            return key
        return self._command_cache.acquire_command(key).charges[0].ring

    def _checked_state(self, key: AnyKey, cost: int) -> EventualKeyState:
        """Check a call that is invalid or whose key has no state; return the state, or raise."""
        self._key_states.check_open()
        charges = self._command_cache.acquire_command(key, cost).charges
        most = self.max_cost(limits_in(charges))
        if cost > most:
            raise ValueError(
                f"cost={cost} can never be admitted: the share of one process is {most}"
            )
        name = self._name_of(key)
        state = self._get(name)
        if state is not None:
            return state
        plain, offset_ms = with_cost(charges, 1), self._sync.known_offset_ms()
        return self._key_states.get_or_add(name, lambda: self._new_state(name, plain, offset_ms))

    def _new_state(
        self, name: StateName, charges: tuple[Charge, ...], offset_ms: float
    ) -> EventualKeyState:
        return EventualKeyState(name, charges, offset_ms, self._share)

    def _refuse(
        self, state: EventualKeyState, key: AnyKey, cost: int, now: float, *, counted: bool = True
    ) -> Decision:
        refusal = state.refusal
        if refusal is None or now >= state.refused_until or cost != state.refused_cost:
            with self._key_states.state_lock:
                refusal = state.refusal = self._new_refusal(state, cost, now)
                state.refused_cost, state.refused_until = cost, state.permits_until
        if counted:
            with self._lock:
                state.blocked += cost
                state.surplus_blocked += cost - 1
            if not state.dirty:
                self._counts.mark_dirty(state)
        return refusal_decision(state, refusal, key, cost, now, "local")

    def _new_refusal(self, state: EventualKeyState, cost: int, now: float) -> CachedRefusal:
        # The windows were last computed with the counts of that moment. Counts that were flushed
        # since are not in `state.passed` any more, so compute the windows again.
        self._sync.recompute_permits_left(state, now)
        now_ms = state.now_ms(now)
        longest_retry_ms, binding = -1, state.binding_window
        for window in state.windows:
            retry_ms = window.retry_ms(now_ms, cost, state.passed)
            if retry_ms > longest_retry_ms:
                longest_retry_ms, binding = retry_ms, window
        retry_ms = max(1, longest_retry_ms)
        reset_ms = max(retry_ms, binding.reset_ms(now_ms, state.passed))
        return CachedRefusal(
            binding.limit, max(0, state.permits_left), now + retry_ms / 1000, now + reset_ms / 1000
        )

    def reschedule(self, now: float) -> None:
        self._sync.on_flush_finished()
        super().reschedule(now)

    def clock_probe(self) -> list[OutgoingCommand]:
        return self._sync.clock_probe()

    def collect_commands(
        self, now: float, outgoing: list[OutgoingCommand], *, everything: bool = False
    ) -> None:
        self._sync.polls_enabled = not everything
        # Before the store's time is known, counts are kept for a later flush. With `everything`
        # there may be none, so they are sent all the same.
        if self._sync.offset_ms is not None or everything:
            super().collect_commands(now, outgoing, everything=everything)


POLL_FOR_S = 60.0
"""Seconds after its last call for which a key is polled. Never for longer than its window."""
POLL_DELAY_DIVISOR = 8
"""A key is polled after its idle time divided by this: what is known of it is not older."""
_MAX_POLLS = 1000
"""The most polls in one flush."""


class FleetSync:
    """Recomputes how many permits are left, and polls: the `flush_hooks` of `PendingCounts`.

    Every flush of a key returns the fleet's counts of it. A key that is not called any more has
    nothing to flush, and is polled instead, ever more slowly:

      calls    . ..  .   |
      flushes  ^   ^   ^ |
      polls              |    ^     ^       ^          ^               ^     until POLL_FOR_S
                         0    each after 1/8 of the time since the last call

    A key that was called at one flush only is not polled, because there may be very many such keys.
    """

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
        self._failure: ConfigurationError | None = None
        """What the last flush has failed with, which calls of all keys raise."""
        self._refused: ConfigurationError | None = None
        """What the store has refused since the last flush has ended, other than a single key."""
        self._is_answered = False
        """True if it has answered anything since then."""
        self._heap: list[tuple[float, int, EventualKeyState]] = []
        """When to poll which key. The number in between only keeps key states from being
        compared."""

    def known_offset_ms(self) -> float:
        """Return the offset to the store's time; before its first reply, the local wall clock's."""
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
        return [OutgoingCommand(command, lambda reply, sent_at: self._on_clock_reply(state, reply))]

    def _on_clock_reply(self, state: EventualKeyState, reply: FleetCounts | Exception) -> None:
        self._note_outcome(state, reply)
        if not isinstance(reply, FleetCounts):
            return
        now = self._monotonic()
        self.offset_ms = reply.now_ms - now * 1000
        for state in self._states.all():
            with self._states.state_lock:
                state.replace_clock_offset(self._states.counter_lock, self.offset_ms, now)
                self.recompute_permits_left(state, now)

    def _note_outcome(self, state: EventualKeyState, reply: FleetCounts | Exception) -> None:
        """Note whether the store has refused a command of `state` for its configuration."""
        if isinstance(reply, FleetCounts):
            state.failure, self._is_answered = None, True
        elif isinstance(reply, ConfigurationError):
            state.failure, state.permits_until = reply, 0.0
            if not reply.is_of_key:
                self._refused = reply

    def on_flush_finished(self) -> None:
        """Have calls of all keys raise if the store has refused the whole flush, until it answers.
        Where one node of a cluster does so, and others answer, only the keys of that node raise.
        """
        refused, answered = self._refused, self._is_answered
        self._refused, self._is_answered = None, False
        failure = None if answered else refused or self._failure
        with self._states.state_lock:
            ends_now, begins_now = failure is None, self._failure is None
            self._failure = failure
            if ends_now != begins_now:
                for state in self._states.all():
                    state.permits_until = 0.0
                    if ends_now and state.failure is not None and not state.failure.is_of_key:
                        state.failure = None

    def prepare_call(self, state: EventualKeyState, now: float) -> None:
        """Compute how many permits are left; raise `ConfigurationError` if flushes fail with that.
        Then the key is flushed, though the call is not counted: only that shows when it ends.
        """
        failure = state.failure or self._failure
        if failure is not None:
            state.called_repeatedly, state.last_called_at = True, now
            if not state.dirty:
                self._counts.mark_dirty(state)
            raise ConfigurationError(*failure.args)
        self.recompute_permits_left(state, now)

    def recompute_permits_left(self, state: EventualKeyState, now: float) -> None:
        """Compute how many permits are left until the present bucket ends."""
        lock = self._states.counter_lock
        with self._states.state_lock:
            if not state.open_bucket(lock, now):
                state.close_bucket(lock)
            now_ms = state.now_ms(now)
            sent = () if state.in_flight is None else state.in_flight.buckets
            unacknowledged = (*sent, *state.closed_buckets)
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
                # The store's clock was set back, and calls count in a bucket after its time.
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
                state.permits_until = (
                    state.bucket_ends_at if (state.failure or self._failure) is None else 0.0
                )

    def before_flush(self, state: EventualKeyState) -> None:
        """Note that `state` was called, if it was."""
        if state.has_unacknowledged():
            now = self._monotonic()
            state.called_repeatedly = now - state.last_called_at < state.longest_window_ms / 1000
            state.last_called_at = now

    def on_reply(self, state: EventualKeyState, reply: FleetCounts | Exception) -> None:
        """Apply what all processes have counted."""
        self._note_outcome(state, reply)
        if isinstance(reply, FleetCounts):
            self.offset_ms = state.offset_ms
            for window, passed in zip(state.windows, reply.passed, strict=True):
                window.set_fleet_counts(passed)

    def on_flush_ended(self, state: EventualKeyState, now: float) -> None:
        """Drop the refusal and compute the permits again: the fleet's may include the flush now."""
        state.refused_until = 0.0
        self.recompute_permits_left(state, now)

    def wants_poll(self, state: EventualKeyState) -> bool:
        """True if `state` was called repeatedly and lately: its next call needs recent counts."""
        idle_s = self._monotonic() - state.last_called_at
        is_refused = (state.failure or self._failure) is not None  # with no counts to flush
        longest_s = NEVER if is_refused else state.longest_window_ms / 1000
        wanted = state.called_repeatedly and idle_s < min(POLL_FOR_S, longest_s)
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
        return max(self._heap[0][0], now + self._schedule.interval_s) if self._heap else NEVER


class FleetWindow:
    """One limit of one key as all processes have counted it, by what this process has received. Its
    owner holds a lock. Bucket starts are ms of the store's clock.

        fleet               | 10 | 20 |  5 |  0 |      all processes, by the store's last reply
        unacknowledged                |  2 |  4 |      counted here, sent or not, not in that reply
        own                 |  4 |  9 |  3 |  4 |      all that was counted here, if a share caps it

    Counts are kept by bucket, so that they leave the window in time.
    """

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
        """Return the permits left at `now_ms`. `unacknowledged`: own counts not in the fleet's."""
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
        """Return the ms until enough of `counts` has left for `excess` plus the rest to be 0."""
        need = sum(counts.values()) + excess
        if need <= 0:
            return 0
        for start in sorted(counts):
            need -= counts[start]
            if need <= 0:
                return max(1, self._expires_at_ms(start) - now_ms)
        return max(1, self._expires_at_ms(now_ms - now_ms % self.limit.bucket_ms) - now_ms)

    def _expires_at_ms(self, start: int) -> int:
        return start + self.limit.span * self.limit.bucket_ms


def share_of(limit: Limit, share: float) -> int:
    return max(1, int(limit.amount * share + 1e-9))  # 0.29 * 100 is less than 29
