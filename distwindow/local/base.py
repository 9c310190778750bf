"""Base classes of strategies that keep something in this process."""

from __future__ import annotations

from collections.abc import Callable
from threading import Lock
from typing import Any, ClassVar, Generic, TypeVar

from ..minute.operations import EntryViews
from ..observer import Tally
from ..ring.clock import NEVER, Clock
from ..ring.commands import Acquire, Flush
from ..ring.decision import Charge, Decision, with_cost
from ..ring.key import AnyKey, key_length, normalize_key
from ..runtime.command_cache import CommandCache
from ..runtime.flush import FlushSchedule, OutgoingCommand
from ..runtime.options import Options
from ..runtime.strategy import Strategy
from ..support.first_use import FirstUse, if_made
from ..support.fork import register_after_fork
from ..support.locks import SWITCHES_ONLY_AT_CALLS
from .key_state import (
    CLOCK_MARGIN_S,
    CachedRefusal,
    KeyState,
    KeyStateCache,
    StateName,
    Tell,
    refusal_decision,
)
from .pending_counts import PendingCounts

S = TypeVar("S", bound=KeyState)
MAX_CACHED_KEY_LENGTH = 256
"""Of longer keys nothing is kept under the key itself, which bounds the memory: the store decides
each of their calls, and `eventual` keeps their state under the name of their ring.
"""
_NO_STATES: dict[StateName, Any] = {}
_FIND_NO_STATE = _NO_STATES.get  # bound once, for all limiters


class LocalStrategy(Strategy, Generic[S]):
    """What the strategies with a store elsewhere have in common: they keep a state for each key,
    count calls in it, and send these counts later. What it takes to keep them is made with the
    first one.

    A strategy is put together from objects that do one thing each:

      KeyStateCache    the key states, bounded             key_state.py
      PendingCounts    counts on their way to the store    pending_counts.py
      FlushSchedule    when the worker has to flush        runtime/flush.py
      Leases, ...      permits that are held here          leases.py                leased
      FleetSync        what all processes have counted     eventual.py              eventual
      EntryViews       what entries did, for minute views  minute/operations.py

    `LocalStrategy` connects them to the methods that `runtime/strategy.py` lists. How a call is
    decided differs: `ExactStrategy` for `direct` and `leased`, which also repeats refusals, and
    `eventual.py`.
    """

    _parts: ClassVar[tuple[str, ...]] = ("_counts", "_views")
    """The attributes with parts that have commands to send, in the order of sending: `collect` adds
    what is due, as `collect_commands`, and `next_due_at` says when that is (monotonic seconds).
    """
    _get: Callable[[StateName], S | None]
    """That of `KeyStateCache`, as the next two."""
    _touch: Callable[[StateName], None]
    _lock: Lock | _ClosedLock
    """Taken by calls that count. `close` replaces it; flushes go on taking `counter_lock`."""

    def __init__(self, commands: CommandCache, clock: Clock, options: Options) -> None:
        self._command_cache = commands
        self._monotonic = clock.monotonic
        self._clock = clock
        self._schedule = FlushSchedule(options.flush_interval)
        self._views: EntryViews | None = None
        self._max_keys = options.max_local_keys
        self._get = _FIND_NO_STATE
        self._tell: Tell | None = None
        self._needs_lock = not SWITCHES_ONLY_AT_CALLS
        """False if a call may be counted without `_lock`, by lines that make no call."""

    @FirstUse
    def _key_states(self) -> KeyStateCache[S]:
        register_after_fork(self)
        states: KeyStateCache[S] = KeyStateCache(self._max_keys)
        states.tell = self._tell
        self._bind_hot_path(states)
        return states

    @FirstUse
    def _counts(self) -> PendingCounts[S]:
        return PendingCounts(self._key_states, self._schedule, self._monotonic)

    @property
    def _sources(self) -> list[Any]:
        """The parts that are made."""
        parts = [if_made(self, name) for name in self._parts]
        return [part for part in parts if part is not None]

    def _bind_hot_path(self, states: KeyStateCache[S]) -> None:
        """Look up once what every call uses, which saves some 2 % of a call."""
        self._touch, self._lock = states.touch, states.counter_lock
        if states.closed:
            self._close_lock()
        self._get = states.get  # last: who finds a key state uses the others

    def _close_lock(self) -> None:
        """Refuse to count: every call that is about to raises."""
        self._lock = _ClosedLock(self._key_states)
        self._needs_lock = True

    def after_fork(self) -> None:
        """Start empty: what is counted and leased here is sent and spent by the parent."""
        if if_made(self, "_key_states") is not None:
            self._key_states.after_fork()
            self._bind_hot_path(self._key_states)
        for source in self._sources:
            source.after_fork()
        self._schedule.next_due_at = NEVER

    def add_views(self, options: Options) -> EntryViews:
        register_after_fork(self)
        self._views = EntryViews(options, self._schedule, self._monotonic)
        return self._views

    def tell(self, tally: Tally) -> None:
        self._tell = tally.counted_in_state

    def reset(self, key: AnyKey) -> None:
        state = self._key_states.invalidate(self._name_of(key))
        if state is not None:
            with self._key_states.state_lock:
                self._counts.reset(state)
                self._after_reset(state)

    def _after_reset(self, state: S) -> None:
        """Drop what the subclass keeps of the windows of `state`. Under `state_lock`."""

    def record(self, decision: Decision, failed: bool, rt_ms: int) -> Flush | None:
        """Count the end of an admitted call, to be sent later."""
        now = self._monotonic()
        # `now_ms` is the store's time when the call began, so this is its offset now, or less.
        offset_ms = decision.now_ms + rt_ms - now * 1000
        # An admitted decision has charges.
        state = self._state_to_count_in(decision.charged or (), offset_ms, now)
        with self._lock:
            if state.success + state.error == 0 or rt_ms < state.rt_min_ms:
                state.rt_min_ms = rt_ms
            if failed:
                state.error += 1
            else:
                state.success += 1
            state.rt_sum_ms += rt_ms
        if not state.dirty:
            self._counts.mark_dirty(state)
        return None

    def count_debt(
        self, charges: tuple[Charge, ...], permits: int, offset_ms: float
    ) -> Flush | None:
        """Count permits used beyond what was admitted, to be sent once, and within their window."""
        state = self._state_to_count_in(charges, offset_ms, self._monotonic())
        self._add_debt(state, permits)
        if not state.dirty:
            self._counts.mark_dirty(state)
        return None

    def _add_debt(self, state: S, permits: int) -> None:
        with self._lock:
            state.passed += permits

    def flush_command(self, key: AnyKey) -> OutgoingCommand | None:
        state = self._get(self._name_of(key))
        return None if state is None else self._counts.flush_of(state)

    def flush_of(self, charges: tuple[Charge, ...]) -> OutgoingCommand | None:
        state = self._find_state(charges)
        return None if state is None else self._counts.flush_of(state)

    @property
    def dropped(self) -> int:  # type: ignore[override]  # others add them up
        """The number of dropped counts, by causes: see pending_counts.py, minute/operations.py."""
        return self._counts.dropped + (0 if self._views is None else self._views.dropped)

    def keys_to_flush(self) -> int:
        return self._counts.keys_to_flush()

    def collect_commands(
        self, now: float, outgoing: list[OutgoingCommand], *, everything: bool = False
    ) -> None:
        for source in self._sources:
            source.collect(now, outgoing, everything=everything)

    def reschedule(self, now: float) -> None:
        self._schedule.recompute(now, [source.next_due_at for source in self._sources])

    def close(self) -> None:
        self._key_states.closed = True
        if self._views is not None:
            self._views.close()
        # Every call that is about to count raises from here on, as nobody would send its count.
        self._close_lock()
        # A call that holds `counter_lock` already has counted once it can be taken here.
        with self._key_states.counter_lock:
            pass
        self._key_states.clear()

    def pause_calls(self, hold: Callable[[], object]) -> None:
        self._key_states.pause(hold)
        self._get = self._key_states.get

    def unacknowledged_counts(self) -> int:
        """Return how many counts the store has not acknowledged: of windows, and where all of these
        are, of minute views. An entry is counted in both, and would be two lost counts to a user.
        """
        of_windows = self._counts.unacknowledged()
        if of_windows or self._views is None:
            return of_windows
        return self._views.unacknowledged()

    def _new_state(self, name: StateName, charges: tuple[Charge, ...], offset_ms: float) -> S:
        raise NotImplementedError  # each strategy has key states of its own

    def _open_bucket(self, state: S, now: float) -> None:
        with self._key_states.state_lock:
            state.open_bucket(self._key_states.counter_lock, now)

    def _name_of(self, key: AnyKey) -> StateName:
        """Return the name that the key state of `key` has, if it has one."""
        return key

    def _cacheable(self, key: AnyKey) -> bool:
        return not self._key_states.closed and key_length(key) <= MAX_CACHED_KEY_LENGTH

    def _state_of(self, key: AnyKey, offset_ms: float) -> S | None:
        """Return the key state of `key`, or a new one with `offset_ms`; None if it gets none."""
        if not self._cacheable(key):
            return None
        state = self._get(key)
        if state is None:
            charges = self._command_cache.acquire_command(key).charges
            state = self._key_states.get_or_add(
                key, lambda: self._new_state(key, charges, offset_ms)
            )
        return state

    def _state_to_count_in(self, charges: tuple[Charge, ...], offset_ms: float, now: float) -> S:
        """Return the key state that counts in the rings of `charges`, with the bucket of `now`
        open. It is that of their key, unless they are of a call over several keys or under other
        limits. `offset_ms`: from monotonic time to the store's, or less.
        """
        if self._key_states.closed:
            self._key_states.check_open()
        state = self._get(self._name_of(charges[0].key))
        if state is None or (state.charges is not charges and not _has_rings(state, charges)):
            state = self._add_state(charges, offset_ms)
        if offset_ms > state.offset_ms:
            state.offset_ms = offset_ms
        if now >= state.bucket_ends_at:
            self._open_bucket(state, now)
        return state

    def _find_state(self, charges: tuple[Charge, ...]) -> S | None:
        """Return the key state that counts in the rings of `charges`; None if there is none."""
        state = self._key_states.find(self._name_of(charges[0].key))
        if state is None or not _has_rings(state, charges):
            state = self._key_states.find(tuple([charge.ring for charge in charges]))
        return state

    def _add_state(self, charges: tuple[Charge, ...], offset_ms: float) -> S:
        """Add the key state that counts in the rings of `charges`, if it is not there."""
        key, rings = charges[0].key, tuple([charge.ring for charge in charges])
        own = self._command_cache.acquire_command(key).charges
        is_own = self._cacheable(key) and rings == tuple([charge.ring for charge in own])
        name: StateName = self._name_of(key) if is_own else rings
        plain = tuple(charge._replace(cost=1, bucket_start_ms=None) for charge in charges)
        if plain == charges:
            plain = charges  # so that the next end of a call is found to be of this state at once
        return self._key_states.get_or_add(name, lambda: self._new_state(name, plain, offset_ms))


REFUSAL_S = 1.0
"""For so long a refusal is repeated at most: another process may give permits back meanwhile."""
new_tuple = tuple.__new__


class ExactStrategy(LocalStrategy[S]):
    """Spends permits that the store has granted, and repeats refusals of the store.

    A refusal names the moment at which the same call would be admitted. Until then the store would
    refuse every call of that cost or more, unless permits are refunded or the limit is raised. A
    process does not learn of these, so a refusal is repeated for one bucket at most.
    """

    def store_command(self, key: AnyKey, cost: int) -> Acquire | None:
        return self._command_cache.acquire_command(key, cost)

    def decide_locally(self, key: AnyKey, cost: int) -> Decision | None:
        """Decide by a permit that is held here or a refusal that still holds; None if the store has
        to decide.

        One function for both strategies: this is the whole cost of a call on a hot key. With a
        function for the permits and one for the refusal, a leased hit took 6.5 % more time, and a
        repeated refusal 4.4 % (docs/decisions/0004-decision-is-a-tuple.md).
        """
        try:
            state = self._get(key)
            if state is None:
                if key.__class__ is str:
                    return None
                key = normalize_key(key)
                state = self._get(key)
                if state is None:
                    return None
            self._touch(key)
        except (TypeError, KeyError):  # not a key, or it was evicted in between
            return None
        if cost.__class__ is not int or cost < 1:
            return None
        # A memoryview is equal to the bytes in it, but is not a key.
        if key.__class__ is memoryview:  # type: ignore[comparison-overlap]  # callers may be untyped
            return None
        now = self._monotonic()
        if now < state.permits_until:
            if self._needs_lock:
                left, charges = self._spend_locked(state, cost)
            else:
                # No call in these lines: see `SWITCHES_ONLY_AT_CALLS`.
                left = state.permits_left - cost
                if left >= 0:
                    state.permits_left = left
                # Read with the permits: those of the next lease are charged in another bucket.
                charges = state.charges
            if left >= 0:
                if left <= state.prefetch_threshold:
                    self._on_few_left(state, now)
                if cost != 1:
                    charges = with_cost(charges, cost)
                    if not self._needs_lock:
                        state.surplus_passed += cost - 1
                # `Decision(...)` takes nearly twice as long, and so does `int(...)` of the time.
                return new_tuple(
                    Decision,
                    (
                        True, key, cost, state.limit, state.left_in_store + left, 0.0,
                        state.reset_at - now, 0.0, "ok", "lease",
                        (now * 1000 + state.offset_ms).__trunc__(), charges,
                    ),
                )  # fmt: skip
        if now < state.refused_until and state.refused_cost <= cost <= state.max_cost:
            refusal = state.refusal
            if refusal is not None:  # another thread may have dropped it since the line above
                if state.dirty and now < state.bucket_ends_at and not self._needs_lock:
                    state.blocked += cost  # no call since the checks
                    if cost != 1:
                        state.surplus_blocked += cost - 1
                else:
                    self._count_blocked(state, cost, now)
                return new_tuple(
                    Decision,
                    (
                        False, key, cost, refusal.limit, refusal.remaining, refusal.retry_at - now,
                        refusal.reset_at - now, 0.0, "over_limit", "deny_cache",
                        (now * 1000 + state.offset_ms).__trunc__(), None,
                    ),
                )  # fmt: skip
        return None

    def _spend_locked(self, state: S, cost: int) -> tuple[int, tuple[Charge, ...]]:
        """Take `cost` permits of `state`, if it has as many. Return how many are left afterwards
        (below 0: it had too few), and where they were charged.
        """
        with self._lock:
            left = state.permits_left - cost
            if left >= 0:
                state.permits_left = left
                state.surplus_passed += cost - 1
            return left, state.charges

    def spend_leased(self, key: AnyKey, cost: int) -> Decision | None:
        """Decide a call with `enqueue` by permits that are held here; None if they are too few. It
        is apart from `decide_locally`, because such a call is not refused by a cached refusal.
        """
        key = normalize_key(key)
        state, now = self._get(key), self._monotonic()
        if state is None or now >= state.permits_until:
            return None
        left, charges = self._spend_locked(state, cost)
        if left < 0:
            return None
        if left <= state.prefetch_threshold:
            self._on_few_left(state, now)
        return Decision(
            True, key, cost, state.limit, state.left_in_store + left, 0.0, state.reset_at - now,
            0.0, "ok", "lease", state.now_ms(now), with_cost(charges, cost),
        )  # fmt: skip

    def _count_blocked(self, state: S, cost: int, now: float) -> None:
        if now >= state.bucket_ends_at:
            self._open_bucket(state, now)
        with self._lock:
            state.blocked += cost
            state.surplus_blocked += cost - 1
        if not state.dirty:
            self._counts.mark_dirty(state)

    def peek(self, key: AnyKey) -> Decision | None:
        """Return the refusal of a call of cost 1 without counting it; None if there is none."""
        state, now = self._get(key), self._monotonic()
        if (
            state is None
            or now >= state.refused_until
            or state.refused_cost > 1
            or state.refusal is None
        ):
            return None
        return refusal_decision(state, state.refusal, key, 1, now, "deny_cache")

    def cache_refusal(self, key: AnyKey, decision: Decision, sent_at: float) -> Decision:
        """Keep the refusal of a call sent at `sent_at` (monotonic seconds), and return it."""
        if decision.limit.warmup_ms is not None:
            return decision  # what others are admitted warms it up, so there may be room earlier
        now = self._monotonic()
        bucket_s = decision.limit.bucket_ms / 1000
        until = sent_at + min(decision.retry_after, bucket_s, REFUSAL_S) - CLOCK_MARGIN_S
        if until <= now:
            return decision
        state = self._state_of(key, decision.now_ms - now * 1000)
        if state is not None:
            state.update_clock_offset(decision.now_ms, sent_at, now)
            refusal = CachedRefusal(
                decision.limit,
                decision.remaining,
                now + decision.retry_after,
                now + max(decision.retry_after, decision.reset_after),
            )
            with self._key_states.state_lock:
                # The one with the least cost is kept, as it also refuses all higher costs.
                if now >= state.refused_until or decision.cost <= state.refused_cost:
                    if state.blocked and state.tell is not None:  # by the limit that has refused
                        state.close_bucket(self._key_states.counter_lock)
                    state.refusal = refusal
                    state.refused_cost, state.refused_until = decision.cost, until
        return decision

    def invalidate(self, key: AnyKey) -> None:
        """Drop the refusal of `key`, as its windows have changed: the store decides next."""
        with self._key_states.state_lock:
            state = self._get(key)
            if state is not None:
                state.refused_until, state.refusal = 0.0, None

    def _on_few_left(self, state: S, now: float) -> None:
        """Called when a call leaves `prefetch_threshold` permits or fewer; only a lease sets it."""


class _ClosedLock:
    """Replaces the lock of a closed limiter, and raises, so that no call has to check for that."""

    def __init__(self, states: KeyStateCache[Any]) -> None:
        self._states = states

    def __enter__(self) -> None:
        self._states.check_open()

    def __exit__(self, *exc: object) -> None: ...


def _has_rings(state: KeyState, charges: tuple[Charge, ...]) -> bool:
    return state.charges is charges or (
        [charge.ring for charge in state.charges] == [charge.ring for charge in charges]
    )
