"""The slot of circuit breakers (Sentinel `DegradeSlot`)."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from ..core.breaker_state import BreakerState
from .circuit_breakers import CircuitBreakerBase
from .rules import DegradeRule, breaker_of

BreakerObserver = Callable[[DegradeRule, BreakerState, BreakerState, float | None], object]
"""Called with the rule, the previous state, the new one, and the value that opened it or None."""


class DegradeSlot:
    """One circuit breaker for each degrade rule, asked in the given order. Not locked."""

    __slots__ = ("_breakers", "_observers")

    def __init__(self, rules: Iterable[DegradeRule]) -> None:
        self._observers: list[BreakerObserver] = []
        self._breakers: dict[str, list[tuple[DegradeRule, CircuitBreakerBase]]] = {}
        for rule in rules:
            breaker = breaker_of(rule)
            breaker.add_observer(self._notify_of(rule))
            self._breakers.setdefault(rule.resource, []).append((rule, breaker))

    def add_observer(self, observer: BreakerObserver) -> None:
        """Call `observer` at each change of state of any breaker."""
        self._observers.append(observer)

    def check(self, resource: str, now: int) -> DegradeRule | None:
        """Return the rule whose breaker refuses a call at `now` (ms); None if all let it pass.

        If one refuses, the breakers that had made the call their probe are open again.
        """
        probed: list[CircuitBreakerBase] = []
        for rule, breaker in self._breakers.get(resource, ()):
            if not breaker.try_pass(now):
                for earlier in probed:
                    earlier.on_probe_blocked()
                return rule
            # A half-open breaker lets no other call pass than the probe.
            if breaker.state == "half_open":
                probed.append(breaker)
        return None

    def complete(self, resource: str, now: int, rt_ms: int, error: bool) -> None:
        """Note in every breaker of `resource` that a call ended at `now` (ms)."""
        for _, breaker in self._breakers.get(resource, ()):
            breaker.on_request_complete(now, rt_ms=rt_ms, error=error)

    def _notify_of(
        self, rule: DegradeRule
    ) -> Callable[[BreakerState, BreakerState, float | None], None]:
        def notify(previous: BreakerState, new: BreakerState, value: float | None) -> None:
            for observer in self._observers:
                observer(rule, previous, new, value)

        return notify
