"""Refusals of the store that are repeated here.

A refusal names the moment at which the same call would be admitted. Until then the store would
refuse every call of that cost or more, unless permits are refunded or the limit is raised. A
process does not learn of these, so a refusal is repeated for one bucket at most.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, TypeVar

from ..ring.decision import Decision
from ..ring.key import AnyKey
from .key_state import CachedRefusal, KeyState, KeyStateCache, refusal_decision

S = TypeVar("S", bound=KeyState)

CLOCK_MARGIN_S = 0.001
"""Moments in replies are whole ms of the store's clock, so they may be this much too late."""


class Refusals(Generic[S]):
    """The refusals in the key states of one limiter."""

    def __init__(
        self,
        states: KeyStateCache[S],
        state_of: Callable[[AnyKey, float], S | None],
        monotonic: Callable[[], float],
    ) -> None:
        """`state_of(key, offset_ms)` returns the key state of a key, or None if it has none and
        gets none; `offset_ms` is the clock offset of a new one.
        """
        self._states = states
        self._state_of = state_of
        self._monotonic = monotonic

    def remember(self, key: AnyKey, decision: Decision, sent_at: float) -> Decision:
        """Keep the refusal `decision` of a call that was sent at `sent_at` (monotonic seconds), and
        return it.
        """
        if decision.limit.warmup_ms is not None:
            return decision  # what others are admitted warms it up, so there may be room earlier
        now = self._monotonic()
        bucket_s = decision.limit.bucket_ms / 1000
        until = sent_at + min(decision.retry_after, bucket_s) - CLOCK_MARGIN_S
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
            with self._states.state_lock:
                # The one with the least cost is kept, as it also refuses all higher costs.
                if now >= state.refused_until or decision.cost <= state.refused_cost:
                    state.refusal = refusal
                    state.refused_cost, state.refused_until = decision.cost, until
        return decision

    def peek(self, key: AnyKey) -> Decision | None:
        """Return the refusal of a call of cost 1 without counting it; None if there is none."""
        state = self._states.get(key)
        now = self._monotonic()
        if (
            state is None
            or now >= state.refused_until
            or state.refused_cost > 1
            or state.refusal is None
        ):
            return None
        return refusal_decision(state, state.refusal, key, 1, now, "deny_cache")

    def invalidate(self, key: AnyKey) -> None:
        """Drop the refusal of `key`, as its windows have changed."""
        with self._states.state_lock:
            state = self._states.get(key)
            if state is not None:
                state.refused_until, state.refusal = 0.0, None
