"""What `CircuitBreaker` and `AsyncCircuitBreaker` share: checks of arguments, and what needs no
store.
"""

from __future__ import annotations

from typing import Any, NamedTuple, NoReturn, get_args

from .._fork import register_after_fork
from ..connect import ClockChoice, LimiterOptions, store_name
from ..consistency.breaker_states import Admission, BreakerStates, OnBreakerStoreError
from ..core.breaker_rules import BreakerRule
from ..core.clock import Clock, check_clock
from ..core.errors import ConfigurationError, short_repr
from ..core.key import normalize_key
from ..protocol.breaker_commands import breaker_name
from ..protocol.keys import check_prefix
from .listeners import Listener, Listeners
from .outcomes import ErrorTypes, FailureTypes


class BreakerOptions(NamedTuple):
    """The arguments of a breaker beyond store and rule. Intervals are seconds."""

    prefix: str
    errors: ErrorTypes
    ignore: ErrorTypes
    on_store_error: OnBreakerStoreError
    timeout: float
    clock: ClockChoice
    sync_interval: float
    flush_interval: float
    max_local_keys: int
    handle_sigterm: bool
    time: Clock


class BaseBreaker:
    """What both breakers share. They document the arguments."""

    def __init__(self, store: Any, rule: BreakerRule, options: BreakerOptions) -> None:
        if not isinstance(rule, BreakerRule) or type(rule) is BreakerRule:
            raise ConfigurationError(
                f"{short_repr(rule)} is no rule of a circuit breaker; give an ErrorRatio, a "
                "SlowRatio or an ErrorCount"
            )
        if options.on_store_error not in get_args(OnBreakerStoreError):
            raise ConfigurationError(
                f"on_store_error={options.on_store_error!r} is neither 'allow' nor 'deny'"
            )
        if not isinstance(options.handle_sigterm, bool):
            raise ConfigurationError(
                f"handle_sigterm={options.handle_sigterm!r} is neither True nor False"
            )
        check_clock(options.time)
        LimiterOptions(
            "direct",
            options.clock,
            options.sync_interval,
            None,
            options.flush_interval,
            options.max_local_keys,
            options.timeout,
        )
        self._rule = rule
        self._prefix = check_prefix(options.prefix)
        self._timeout = float(options.timeout)
        self._store_name = store_name(store)
        self._name = f"breaker {options.prefix!r} at {self._store_name}"
        self._failure_types = FailureTypes(options.errors, options.ignore)
        self._listeners = register_after_fork(Listeners(self._name))
        self._is_closed = False

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self._store_name!r}, {self._rule!r})"

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        """Raise `TypeError` for `pickle` and `copy`."""
        raise TypeError(
            f"{type(self).__name__} cannot be pickled or copied, as it holds connections, locks "
            "and counts; make one in each process: all with the same store, prefix and rule share "
            "their breakers"
        )

    @property
    def rule(self) -> BreakerRule:
        """The rule."""
        return self._rule

    @property
    def prefix(self) -> str:
        """The beginning of the names of all breakers in the store."""
        return self._prefix

    def on_change(self, listener: Listener) -> None:
        """Call `listener(change)` at each change of state that this process learns of, once, with
        a `BreakerChange`. It is called in the thread of a call or of the worker, so it should
        return soon; what it raises is logged.

        A process learns of changes of the breakers that it has called in the last ten seconds;
        at its next call of another one it learns of up to eight changes that it has missed.
        """
        self._listeners.add(listener)

    def _make_states(self, options: BreakerOptions, clock: Clock, source: str) -> BreakerStates:
        return register_after_fork(
            BreakerStates(
                self._prefix,
                self._rule,
                clock,
                flush_interval=options.flush_interval,
                sync_interval=options.sync_interval,
                max_keys=options.max_local_keys,
                on_store_error=options.on_store_error,
                in_process=source == "local",
                on_changes=self._listeners.tell,
            )
        )

    def _check_open(self) -> None:
        if self._is_closed:
            raise ConfigurationError("this circuit breaker is closed; make a new one")

    def _check_key(self, key: Any) -> None:
        """Raise `ConfigurationError` for a key of `protect` that no call could ever have."""
        if callable(key):
            return
        try:
            breaker_name(self._prefix, normalize_key(key), self._rule)
        except (TypeError, ValueError) as exc:
            raise ConfigurationError(
                f"protect({short_repr(key)}): {exc}; the key is text, bytes, a Key, or a function "
                "of the protected function's arguments that returns one"
            ) from exc


def needs_store(states: BreakerStates, admission: Admission) -> bool:
    """True if the end of this call is sent at once: that of a probe decides, and a store in this
    process is told of every end.
    """
    return states.in_process or bool(admission.probe_id)
