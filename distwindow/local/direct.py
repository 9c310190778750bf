"""`consistency="direct"`: the store decides every call, and a refusal is repeated here."""

from __future__ import annotations

from ..ring.decision import Charge, Decision, limits_in
from ..ring.key import AnyKey
from ..runtime.steps import Operation
from .base import ExactStrategy
from .key_state import KeyState, StateName


class Direct(ExactStrategy[KeyState]):
    """Asks the store for each decision that no cached refusal makes."""

    def acquire_remote(self, key: AnyKey, cost: int) -> Operation[Decision]:
        """Send the call to the store, which decides."""
        sent_at = self._monotonic()
        decision: Decision = yield self._command_cache.acquire_command(key, cost)
        return decision if decision.allowed else self.cache_refusal(key, decision, sent_at)

    def _new_state(
        self, name: StateName, charges: tuple[Charge, ...], offset_ms: float
    ) -> KeyState:
        return KeyState(name, charges, limits_in(charges), offset_ms)
