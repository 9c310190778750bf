"""`AsyncCircuitBreaker`, for tasks: the methods of `CircuitBreaker`, awaited where there is I/O."""

from __future__ import annotations

from typing import Any

from ..connect import ClockChoice
from ..consistency.breaker_key_state import BreakerKeyState
from ..consistency.breaker_source import SourceOptions
from ..consistency.breaker_states import Admission, BreakerStates, OnBreakerStoreError
from ..core.breaker_rules import BreakerRule
from ..core.breaker_state import BreakerState
from ..core.clock import SYSTEM, Clock
from ..core.key import AnyKey
from ..failure_types import ErrorTypes
from .awaited import AwaitedBreaker
from .base import BreakerOptions
from .with_rule import WithRule


class AsyncCircuitBreaker(WithRule, AwaitedBreaker[BreakerKeyState, Admission]):
    """`CircuitBreaker` for tasks: the same names and signatures, awaited where there is I/O. Safe
    to share between tasks, and between event loops.
    """

    def __init__(
        self,
        store: Any,
        rule: BreakerRule,
        *,
        prefix: str = "distwindow",
        errors: ErrorTypes = Exception,
        ignore: ErrorTypes = (),
        on_store_error: OnBreakerStoreError = "allow",
        timeout: float = 0.25,
        clock: ClockChoice = "server",
        name: str | None = None,
        sync_interval: float = 0.25,
        flush_interval: float = 0.25,
        max_local_keys: int = 10_000,
        time: Clock = SYSTEM,
    ) -> None:
        options = BreakerOptions(
            prefix, errors, ignore, on_store_error, timeout, clock, sync_interval, flush_interval,
            max_local_keys, time,
        )  # fmt: skip
        self._set_rule(rule)
        super().__init__(store, options, name)

    def _open_states(self, options: SourceOptions) -> BreakerStates:
        return self._make_states(options, self._on_store_error, self._name)

    async def state(self, key: AnyKey) -> BreakerState:
        """See `CircuitBreaker.state`."""
        return (await self._refreshed(key)).state
