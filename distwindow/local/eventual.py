"""`consistency="eventual"`: this process decides, and exchanges counts with the store periodically.

    here     .#.##..#.|.##.#....|..#.##...        counts, by bucket
    store   --^---------^---------^-------        every `sync_interval`: own counts there, the
                                                  fleet's back

A key's window is what all processes had admitted at the last sync, by bucket, and what was admitted
here since. No call waits for the store. So all processes together exceed the limit by at most what
they admit within two syncs and the round trips, and no process alone admits more than the limit.
"""

from __future__ import annotations

from collections.abc import Iterable

from ..options import Options
from ..ring.clock import Clock
from ..ring.decision import Charge, Decision, with_cost
from ..ring.key import AnyKey, key_length, normalize_key
from ..runtime.command_cache import CommandCache
from ..runtime.flush import FlushSchedule
from ..runtime.steps import Operation
from ..runtime.strategy import OutgoingCommand
from .base import MAX_CACHED_KEY_LENGTH, LocalStrategy
from .fleet_sync import EventualKeyState, FleetSync, share_of
from .key_state import CachedRefusal, KeyStateCache, StateName, peeked_admission, refusal_decision
from .pending_counts import PendingCounts

_new_tuple = tuple.__new__


class Eventual(LocalStrategy[EventualKeyState]):
    """Decides by the windows that `FleetSync` keeps."""

    can_borrow = False

    def __init__(self, commands: CommandCache, clock: Clock, options: Options) -> None:
        self._share = share = options.share or 1.0
        states: KeyStateCache[EventualKeyState] = KeyStateCache(options.max_local_keys)
        schedule = FlushSchedule(options.sync_interval)
        counts = PendingCounts(states, schedule, clock.monotonic)
        counts.flush_hooks = self._sync = FleetSync(states, schedule, counts, clock)
        super().__init__(commands, clock, states, schedule, counts, [self._sync, counts])
        cap = min(share_of(limit, share) for limit in commands.limits)
        self._max_cost = min(self._max_cost, cap)

    # -- decisions --------------------------------------------------------------------------------

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
        if state is None or not is_key or type(cost) is not int or not 1 <= cost <= self._max_cost:
            state = self._checked_state(key, cost)
        now = self._monotonic()
        if now >= state.permits_until:
            self._sync.recompute_permits_left(state, now)
        if state.dirty and not self._needs_lock:  # no call from here to the counts
            left = state.permits_left - cost
            if left >= 0:
                state.permits_left = left
                state.passed += cost
            charges = state.charges
        else:
            left, charges = self._count(state, cost)
        if left < 0:
            return self._refuse(state, key, cost, now)
        if cost != 1:
            charges = with_cost(charges, cost)
        # `Decision(...)` takes nearly twice as long, and so does `int(...)` of the time.
        return _new_tuple(
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
            charges = state.charges
        if left >= 0 and not state.dirty:
            self._counts.mark_dirty(state)
        return left, charges

    def acquire_remote(self, key: AnyKey, cost: int) -> Operation[Decision]:
        raise AssertionError("every call is decided locally")
        yield

    def peek(self, key: AnyKey) -> Decision:
        """Return the decision of a call of cost 1 without counting it."""
        state, now = self._get(key) or self._checked_state(key, 1), self._monotonic()
        if now >= state.permits_until:
            self._sync.recompute_permits_left(state, now)
        if state.permits_left < 1:
            return self._refuse(state, key, 1, now, counted=False)
        limit = state.binding_window.limit
        return peeked_admission(state, key, limit, state.permits_left, now, "local")

    def cache_refusal(self, key: AnyKey, decision: Decision, sent_at: float) -> Decision:
        """Return `decision`: the windows here repeat it by themselves."""
        return decision

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

    def _name_of(self, key: AnyKey) -> StateName:
        if key_length(key) <= MAX_CACHED_KEY_LENGTH:
            return key
        return self._command_cache.acquire_command(key).charges[0].ring

    def _checked_state(self, key: AnyKey, cost: int) -> EventualKeyState:
        """Return the key state of a key that has none, or for a call that is not valid: check it.
        Raises what `try_acquire` raises.
        """
        self._key_states.check_open()
        charges = self._command_cache.acquire_command(key, cost).charges
        if cost > self._max_cost:
            raise ValueError(
                f"cost={cost} can never be admitted: the share of one process is {self._max_cost}"
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

    # -- refusals ---------------------------------------------------------------------------------

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

    # -- the worker -------------------------------------------------------------------------------

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
