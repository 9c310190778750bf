"""What all breakers share: checks of arguments, and what needs no store."""

from __future__ import annotations

from typing import Any, NamedTuple, NoReturn, get_args

from ..callables import function_name
from ..connect import ClockChoice, LimiterOptions, store_name
from ..consistency.breaker_source import SourceOptions
from ..consistency.breaker_states import OnBreakerStoreError
from ..core.clock import Clock, check_clock
from ..core.errors import ConfigurationError, closed_failure
from ..failure_types import ErrorTypes, FailureTypes
from ..protocol.keys import check_prefix
from ..store.base import AsyncStore, Store


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
    time: Clock


class BaseBreaker:
    """What all breakers share. They document the arguments."""

    _instead = "@breaker.protect(key), or enter breaker.call(key)"

    def __init__(self, store: Any, options: BreakerOptions) -> None:
        if options.on_store_error not in get_args(OnBreakerStoreError):
            raise ConfigurationError(
                f"on_store_error={options.on_store_error!r} is neither 'allow' nor 'deny'"
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
        self._prefix = check_prefix(options.prefix)
        self._timeout = float(options.timeout)
        self._store_name = store_name(store)
        self._name = f"breaker {options.prefix!r} at {self._store_name}"
        self._failure_types = FailureTypes(options.errors, options.ignore)
        self._on_store_error = options.on_store_error
        self._is_closed = False

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self._store_name!r}, {self._settings_text()})"

    def _settings_text(self) -> str:
        """Return the settings for `repr`."""
        raise NotImplementedError  # each kind of breaker has settings of its own

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        """Raise `TypeError` for `pickle` and `copy`."""
        raise TypeError(
            f"{type(self).__name__} cannot be pickled or copied, as it holds connections, locks "
            "and counts; make one in each process: all with the same store, prefix and rule share "
            "their breakers"
        )

    @property
    def prefix(self) -> str:
        """The beginning of the names of all breakers in the store."""
        return self._prefix

    def _check_open(self) -> None:
        if self._is_closed:
            raise closed_failure("circuit breaker")


def check_is_no_function(key: Any) -> None:
    """Raise `TypeError` for a function in the place of the key of `call`: it would never run."""
    if key.__class__ is not str and callable(key):
        name = function_name(key)
        raise TypeError(
            f"call takes the key of a service, and never runs {name}: write "
            f'`with breaker.call("key"): {name}()`, or @breaker.protect("key") above {name}'
        )


def source_options(options: BreakerOptions, store: Store | AsyncStore, name: str) -> SourceOptions:
    """Return what the states in this process are made with. `name` is that of the store."""
    return SourceOptions(
        options.prefix,
        store.clock,
        options.flush_interval,
        options.sync_interval,
        options.max_local_keys,
        store.source == "local",
        f"{name} {id(store)}" if store.source == "local" else name,
    )
