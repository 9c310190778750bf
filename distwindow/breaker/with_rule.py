"""What breakers with a rule and states have beyond others: listeners."""

from __future__ import annotations

from typing import Any

from .._fork import register_after_fork
from ..consistency.breaker_source import SourceOptions
from ..consistency.breaker_states import BreakerStates, OnBreakerStoreError
from ..core.breaker_rules import BreakerRule
from ..core.errors import ConfigurationError, short_repr
from .listeners import Listener, Listeners


class WithRule:
    """A breaker with a rule."""

    _rule: BreakerRule
    _listeners: Listeners

    def _set_rule(self, rule: Any) -> None:
        if not isinstance(rule, BreakerRule) or type(rule) is BreakerRule:
            raise ConfigurationError(
                f"{short_repr(rule)} is no rule of a circuit breaker; give an ErrorRatio, a "
                "SlowRatio or an ErrorCount"
            )
        self._rule = rule

    def _make_states(
        self, options: SourceOptions, on_store_error: OnBreakerStoreError, name: str
    ) -> BreakerStates:
        """Return the states, whose changes the listeners hear. `name` is that of log lines. Raises
        `ConfigurationError` for an `open_for` that ends before all processes have heard of it.
        """
        flush_s = min(options.flush_interval, options.sync_interval)
        heard_after_s = flush_s + options.sync_interval
        if self._rule.open_for < heard_after_s and not options.in_process:
            raise ConfigurationError(
                f"open_for={self._rule.open_for!r} is shorter than a flush and a sync "
                f"({flush_s:g} + {options.sync_interval:g} s): processes that have not heard of it "
                f"would let calls through while the breaker is half-open; give at least "
                f"{heard_after_s:g}, or a shorter sync_interval"
            )
        self._listeners = register_after_fork(Listeners(name))
        states = BreakerStates(options, self._rule, on_store_error, self._listeners.tell)
        return register_after_fork(states)

    def _settings_text(self) -> str:
        return repr(self._rule)

    @property
    def rule(self) -> BreakerRule:
        """The rule."""
        return self._rule

    def on_change(self, listener: Listener) -> None:
        """Call `listener(change)`, with a `BreakerChange`, when this process finds a breaker in
        another state than it found it in before. It is called in the thread of a call or of the
        worker, so it should return soon; what it raises is logged, also `SystemExit`.

        A process looks at a breaker by calling it: then it hears of a state within `sync_interval`
        and a round trip. States that have passed between two looks are not heard, as a probe of
        another process that has just closed it: closed then follows open. One that is idle hears
        nothing, and the first look of a process tells nothing.
        """
        self._listeners.add(listener)
