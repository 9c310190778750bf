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
        """Return the states, whose changes the listeners hear. `name` is that of log lines."""
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
        """Call `listener(change)` at each change of state that this process learns of, once, with
        a `BreakerChange`. It is called in the thread of a call or of the worker, so it should
        return soon; what it raises is logged.

        A process learns of changes of the breakers that it has called in the last ten seconds;
        at its next call of another one it learns of up to eight changes that it has missed.
        """
        self._listeners.add(listener)
