"""`consistency="direct"`: the store decides every call, and a refusal is repeated here."""

from __future__ import annotations

from ..core.charge import Charge, limits_in
from ..core.clock import Clock
from ..core.decision import Decision
from ..core.key import AnyKey
from ..operations.command_cache import CommandCache
from ..operations.steps import Operation
from ..protocol.commands import Acquire
from .exact import ExactStrategy
from .flush_schedule import FlushSchedule
from .key_state import KeyState, StateName
from .key_state_cache import KeyStateCache
from .pending_counts import PendingCounts
from .refusals import Refusals


class Direct(ExactStrategy[KeyState]):
    """Has every call decided by the store, unless a cached refusal decides it."""

    def __init__(
        self, commands: CommandCache, clock: Clock, max_keys: int, flush_interval: float
    ) -> None:
        """`flush_interval`: seconds from a count to the flush that sends it."""
        states: KeyStateCache[KeyState] = KeyStateCache(max_keys)
        schedule = FlushSchedule(flush_interval)
        counts = PendingCounts(states, schedule, clock.monotonic)
        refusals = Refusals(states, self._state_of, clock.monotonic)
        super().__init__(commands, clock, states, schedule, counts, [counts], refusals)

    def store_command(self, key: AnyKey, cost: int) -> Acquire:
        return self._command_cache.acquire_command(key, cost)

    def acquire_remote(self, key: AnyKey, cost: int) -> Operation[Decision]:
        """Have the store decide."""
        sent_at = self._monotonic()
        decision: Decision = yield self._command_cache.acquire_command(key, cost)
        return decision if decision.allowed else self.cache_refusal(key, decision, sent_at)

    def _new_state(
        self, name: StateName, charges: tuple[Charge, ...], offset_ms: float
    ) -> KeyState:
        return KeyState(name, charges, limits_in(charges), offset_ms)
