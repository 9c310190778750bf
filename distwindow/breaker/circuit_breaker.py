"""`CircuitBreaker`, for threads. `AsyncCircuitBreaker` has the same methods, for tasks."""

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
from .base import BreakerOptions
from .blocking import BlockingBreaker
from .with_rule import WithRule


class CircuitBreaker(WithRule, BlockingBreaker[BreakerKeyState, Admission]):
    """Circuit breakers that the whole fleet shares, one for each key. Safe to share between
    threads; survives `fork`.

        breaker = CircuitBreaker("redis://localhost:6379/0", ErrorRatio(0.5, open_for=5.0))
        with breaker.call("payments"):
            pay()

    `store` is what a `Limiter` takes: a URL, `memory://`, or a redis-py client that stays the
    caller's. `rule` is an `ErrorRatio`, a `SlowRatio` or an `ErrorCount`.

    A call is decided in this process, by the last known state. How calls ended is flushed every
    `flush_interval` seconds, and the states of the breakers in use are refreshed every
    `sync_interval` seconds, both by the background worker: when the fleet's calls reach the
    threshold, every process refuses within the sum of both and one round trip. The number of
    probes is the fleet's.

    `errors` are the exceptions that count as failures; `ignore` are those that say nothing about
    the service. Other exceptions count as successes, but a cancellation or `KeyboardInterrupt`
    says nothing.

    If the store does not answer, the last known state holds. Where that cannot decide (no state is
    known yet, or an open breaker's time has come), `on_store_error="allow"` lets calls through, an
    open breaker's one at a time as a probe of this process; `"deny"` refuses them.

    `timeout`, `clock`, `name`, `max_local_keys` and `time` are those of `Limiter`. Raises
    `ConfigurationError` for arguments that can never work; nothing is connected to before the first
    call.
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

    def state(self, key: AnyKey) -> BreakerState:
        """Return the breaker's state in the store: `"closed"`, `"open"` or `"half_open"`. An open
        breaker stays open until a call is let through as a probe. Raises `StoreError` if the store
        does not answer.
        """
        return self._refreshed(key).state
