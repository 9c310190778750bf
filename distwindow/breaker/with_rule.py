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
        """Call `listener(change)` at each change of state that this process learns of, once, with
        a `BreakerChange`. It is called in the thread of a call or of the worker, so it should
        return soon; what it raises is logged, also `SystemExit`.

        A process learns of the changes of a breaker by calling it. One that calls it at least once
        in each `sync_interval` hears each change, within that time and a round trip. One that is
        idle hears nothing; with its next call it hears the changes since it last asked, the newest
        eight at most. Nothing is heard of the time before its first call.
        """
        self._listeners.add(listener)
