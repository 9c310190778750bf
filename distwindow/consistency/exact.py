"""Decisions by what the store has granted or refused, so never beyond the limit: the part that
`direct` and `leased` have in common.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

from ..core.charge import Charge, with_cost
from ..core.clock import Clock
from ..core.decision import Decision
from ..core.key import AnyKey, normalize_key
from ..operations.command_cache import CommandCache
from .base import CommandSource, LocalStrategy
from .flush_schedule import FlushSchedule
from .key_state import KeyState
from .key_state_cache import KeyStateCache
from .pending_counts import PendingCounts
from .refusals import Refusals

S = TypeVar("S", bound=KeyState)

_new_tuple = tuple.__new__


class ExactStrategy(LocalStrategy[S]):
    """Spends permits that the store has granted, and repeats refusals of the store."""

    def __init__(
        self,
        commands: CommandCache,
        clock: Clock,
        states: KeyStateCache[S],
        schedule: FlushSchedule,
        counts: PendingCounts[S],
        sources: Sequence[CommandSource],
        refusals: Refusals[S],
    ) -> None:
        super().__init__(commands, clock, states, schedule, counts, sources)
        self._refusals = refusals

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
                # `Decision(...)` takes nearly twice as long, and so does `int(...)` of the time.
                return _new_tuple(
                    Decision,
                    (
                        True, key, cost, state.limit, state.left_in_store + left, 0.0,
                        state.reset_at - now, 0.0, "ok", "lease",
                        (now * 1000 + state.offset_ms).__trunc__(), charges,
                    ),
                )  # fmt: skip
        if now < state.refused_until and state.refused_cost <= cost <= self._max_cost:
            refusal = state.refusal
            if refusal is not None:  # another thread may have dropped it since the line above
                if state.dirty and now < state.bucket_ends_at and not self._needs_lock:
                    state.blocked += cost  # no call since the checks
                else:
                    self._count_blocked(state, cost, now)
                return _new_tuple(
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
        """Count `cost` refused permits in the bucket of `now`, and have them flushed."""
        if now >= state.bucket_ends_at:
            self._open_bucket(state, now)
        with self._lock:
            state.blocked += cost
        if not state.dirty:
            self._counts.mark_dirty(state)

    def peek(self, key: AnyKey) -> Decision | None:
        """Return the decision of a call of cost 1 without counting it; None if the store has to
        decide.
        """
        return self._refusals.peek(key)

    def cache_refusal(self, key: AnyKey, decision: Decision, sent_at: float) -> Decision:
        """Keep a refusal of the store, to repeat it; see `Refusals.remember`."""
        return self._refusals.remember(key, decision, sent_at)

    def invalidate(self, key: AnyKey) -> None:
        """Have the store decide the next call of `key`, as its windows have changed."""
        self._refusals.forget(key)

    def _on_few_left(self, state: S, now: float) -> None:
        """Called when a call has left `prefetch_threshold` permits or fewer, which only a lease
        sets.
        """
