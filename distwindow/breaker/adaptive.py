"""`AdaptiveBreaker` and `AsyncAdaptiveBreaker`: go-zero's adaptive breaker for the fleet."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

from ..errors import ConfigurationError
from ..ring.clock import SYSTEM, Clock
from ..ring.key import AnyKey
from ..ring.store import AsyncStore, Store
from ..runtime.options import ClockChoice, Options
from ..sentinel.google_breaker import MIN_K, checked_k
from ..support.failure_types import ErrorTypes, IgnoredErrors
from ..support.fork import register_after_fork
from .circuit_breaker import AsyncBreaker, BaseBreaker, BlockingBreaker
from .rules import MAX_BREAKER_BUCKETS, check_whole, milliseconds
from .states import AdaptiveAdmission, AdaptiveKeyState, AdaptiveOptions, AdaptiveStates


class _BaseAdaptiveBreaker(BaseBreaker):
    """Base class of both adaptive breakers."""

    def __init__(
        self,
        store: Any,
        k: float = 1.5,
        *,
        window: float = 10.0,
        buckets: int = 40,
        prefix: str = "distwindow",
        errors: ErrorTypes = Exception,
        ignore: IgnoredErrors = (),
        timeout: float = 0.25,
        clock: ClockChoice = "server",
        name: str | None = None,
        sync_interval: float = 0.25,
        flush_interval: float = 0.25,
        max_local_keys: int = 10_000,
        draw: Callable[[], float] | None = None,
        time: Clock = SYSTEM,
    ) -> None:
        self._algorithm = adaptive_options(k, window, buckets, draw)
        options = Options(
            prefix=prefix, errors=errors, ignore=ignore, on_store_error="allow", timeout=timeout,
            clock=clock, name=name, sync_interval=sync_interval, flush_interval=flush_interval,
            max_local_keys=max_local_keys, time=time,
        )  # fmt: skip
        super().__init__(store, options)

    def _open_states(self, store: Store | AsyncStore) -> AdaptiveStates:
        states = register_after_fork(
            AdaptiveStates(self._options, store, self._store_name, self._algorithm)
        )
        self._drop_probability = states.drop_probability
        return states

    def _settings_text(self) -> str:
        return settings_text(self._algorithm)


class AdaptiveBreaker(_BaseAdaptiveBreaker, BlockingBreaker[AdaptiveKeyState, AdaptiveAdmission]):
    """go-zero's adaptive breaker over the calls of the whole fleet. Safe to share between threads;
    survives `fork`.

        breaker = AdaptiveBreaker("redis://localhost:6379/0")
        with breaker.call("search"):
            search()

    It has no states. When the calls of the last `window` seconds (in `buckets` buckets) are many
    more than `k` times the successful ones, calls are dropped, with a probability that grows with
    the share of failures: (calls - 5 - k x successes) / (calls + 1), refined as in go-zero
    (`distwindow.sentinel.GoogleBreaker`). A dropped call raises `BreakerOpen`. While calls are
    dropped, one of the fleet is let through if none was for more than a second; `retry_after` is
    when that is due.

    Each process decides in memory, on what the fleet had counted at the last sync (every
    `sync_interval` seconds) and what it has counted itself since. If the store does not answer, it
    goes on with that. `draw` returns a number in [0, 1), by default `random.random`. The other
    arguments are those of `CircuitBreaker`. Raises `ConfigurationError` for arguments that can
    never work.
    """

    def drop_probability(self, key: AnyKey) -> float:
        """Return the probability with which a call of `key` is dropped now, by what the store has
        counted. Raises `StoreError` if it does not answer.
        """
        return self._drop_probability(self._refreshed(key))


class AsyncAdaptiveBreaker(_BaseAdaptiveBreaker, AsyncBreaker[AdaptiveKeyState, AdaptiveAdmission]):
    """`AdaptiveBreaker` for tasks: the same names and signatures, awaited where there is I/O."""

    async def drop_probability(self, key: AnyKey) -> float:
        """See `AdaptiveBreaker.drop_probability`."""
        return self._drop_probability(await self._refreshed(key))


def adaptive_options(
    k: Any, window: Any, buckets: Any, draw: Callable[[], float] | None
) -> AdaptiveOptions:
    """Return the checked settings of the algorithm."""
    checked_k(k, MIN_K)
    check_whole("buckets", buckets, MAX_BREAKER_BUCKETS)
    width, rest = divmod(milliseconds("window", window), buckets)
    if rest:
        raise ConfigurationError(
            f"window={window!r} cannot be divided evenly into buckets={buckets!r} of whole ms"
        )
    if draw is None:
        draw = random.random
    if not callable(draw):
        raise ConfigurationError(f"draw={draw!r} is not a function")
    return AdaptiveOptions(k, width, buckets, draw)


def settings_text(algorithm: AdaptiveOptions) -> str:
    """Return the settings for `repr`."""
    window = algorithm.bucket_ms * algorithm.buckets / 1000
    return f"k={algorithm.k!r}, window={window!r}, buckets={algorithm.buckets!r}"
