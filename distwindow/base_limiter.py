"""What `Limiter` and `AsyncLimiter` share: checks of arguments, and what needs no store."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Literal, NoReturn

from ._fork import register_after_fork
from .connect import Consistency, LimiterOptions, make_strategy, make_views, store_name
from .core.clock import Clock, check_clock
from .core.decision import Decision
from .core.errors import ConfigurationError
from .core.key import AnyKey
from .core.limit import Limit, LimitSpec
from .entry import EntrySettings
from .operations.borrow import Borrowing
from .operations.shaped_command_cache import make_command_cache
from .operations.steps import Operation
from .operations.turns import Turns
from .operations.wait_queue import WaitQueues
from .protocol.commands import Acquire
from .store.base import AsyncStore, Store

OnStoreError = Literal["raise"]


class BaseLimiter:
    """What `Limiter` and `AsyncLimiter` share. They document the arguments."""

    _instead = "limiter.try_acquire(key), or enter limiter.entry(key)"

    def __init__(
        self,
        limits: LimitSpec,
        prefix: str,
        on_store_error: str,
        time: Clock,
        store: Any,
        consistency: Consistency,
    ) -> None:
        if on_store_error != "raise":
            raise ConfigurationError(
                f'on_store_error={on_store_error!r}: this version has "raise" only'
            )
        self._command_cache = make_command_cache(prefix, limits)
        self._wait_queues = register_after_fork(WaitQueues(check_clock(time)))
        self._consistency = consistency
        self._store_name = store_name(store)
        self._name = f"limiter {prefix!r} at {self._store_name}"

    def _open_strategy(
        self,
        options: LimiterOptions,
        store: Store | AsyncStore,
        attempt: Callable[[Acquire], Decision] | None,
        max_origins: int,
    ) -> None:
        """Make what decides and counts in this process. `attempt` decides for a store that is in
        this process, too.
        """
        self._timeout = options.timeout
        self._strategy = make_strategy(options, self._command_cache, store, attempt)
        self._borrowing = Borrowing(
            self._command_cache, self._strategy, store.source, options.max_wait,
            options.borrow_share,
        )  # fmt: skip
        self._turns = Turns(self._command_cache, self._strategy, store.source, store.clock)
        self._views = make_views(self._strategy, self.prefix, max_origins, store)
        self._entry_settings = EntrySettings(self._views, store.clock, self._name)

    def _special_attempt(
        self, key: AnyKey, cost: int, priority: object, enqueue: object
    ) -> Operation[Decision]:
        """Return the operation of a call with `priority` or `enqueue`. Raises what `try_acquire`
        raises for its arguments.
        """
        if enqueue:
            return self._turns.attempt(key, cost, enqueue, priority)
        return self._borrowing.call(key, cost, priority).attempt()

    def __repr__(self) -> str:
        limits = "; ".join(map(str, self.limits))
        return (
            f"{type(self).__name__}({self._store_name!r}, {limits!r}, prefix={self.prefix!r}, "
            f"consistency={self._consistency!r})"
        )

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        """Raise `TypeError` for `pickle` and `copy`."""
        raise TypeError(
            f"{type(self).__name__} cannot be pickled or copied, as it holds connections, locks "
            "and counts; make one in each process (at the top of a module, or first thing in the "
            "child): all with the same store, prefix and limits share their windows"
        )

    @property
    def limits(self) -> tuple[Limit, ...]:
        """The limits, shortest interval first."""
        return self._command_cache.limits

    @property
    def prefix(self) -> str:
        """The beginning of the names of all rings."""
        return self._command_cache.prefix


def check_timeout(timeout: float | None) -> float | None:
    """Return the timeout of `acquire` as a float; None where there is none."""
    if timeout is None:
        return None
    if isinstance(timeout, bool) or not isinstance(timeout, (int, float)) or not timeout >= 0:
        raise ValueError(f"timeout={timeout!r} is not a number of seconds of at least 0, or None")
    return None if math.isinf(timeout) else float(timeout)
