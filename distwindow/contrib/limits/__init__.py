"""A storage for the library `limits`, and so for Flask-Limiter and slowapi: import this module, and
write `distwindow+` before the URL of the store.

    strategy of `limits`         is counted by
    moving-window                Limit(amount, per=expiry, bound="strict")
    sliding-window-counter       Limit(amount, per=expiry)
    fixed-window                 one bucket, which begins by the clock, counted without a condition

Each hit is one script of the store, so it is exact for the whole fleet. What is asked about a
window is answered by `peek`. Where no amount or interval is given, they are read in the end of the
key, which is `.../100/1/minute` in all that `limits` writes, or else are those of the last hit.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ...errors import ConfigurationError, StoreError
from ...support.async_use import run_at_once
from .. import needs
from ..limiter_pool import AsyncLimiterPool, LimiterPool

with needs("limits"):
    from limits.aio.storage import base as aio_base
    from limits.storage import base

from .items import LimitsItem, leap_limit, strict_limit
from .settings import ASYNC_STORAGE_SCHEMES, STORAGE_SCHEMES
from .windows import Windows

if TYPE_CHECKING or hasattr(base, "SlidingWindowCounterSupport"):
    from limits.aio.storage.base import SlidingWindowCounterSupport as AsyncSlidingWindowSupport
    from limits.storage.base import SlidingWindowCounterSupport as SlidingWindowSupport
else:  # of limits below 4.1
    AsyncSlidingWindowSupport = SlidingWindowSupport = object


class DistwindowStorage(base.Storage, base.MovingWindowSupport, SlidingWindowSupport):
    """The storage of `distwindow+redis://...` and the other URLs of `Limiter`.

    Options, in the URL or beside it: `timeout` (seconds), `prefix` ("limits"), `consistency`,
    `buckets`, and `reset`: "seconds", so that `Retry-After` is never too early, or "exact", for
    who sleeps until `reset_time`. Others are those of redis-py. Raises `ConfigurationError` for
    what can never work; calls raise `StoreError`.
    """

    STORAGE_SCHEME: list[str] | None = STORAGE_SCHEMES

    def __init__(
        self, uri: str | None = None, wrap_exceptions: bool = False, **options: Any
    ) -> None:
        super().__init__(uri, wrap_exceptions=wrap_exceptions)
        self._windows = Windows(LimiterPool, uri, options)
        self.storage = self._windows.store_name  # shown by `flask limiter config`

    @property
    def base_exceptions(self) -> type[Exception] | tuple[type[Exception], ...]:
        """What `wrap_exceptions` wraps."""
        return (StoreError, ConfigurationError)

    def incr(self, key: str, expiry: int, amount: int = 1, elastic_expiry: bool = False) -> int:
        """See `limits.storage.Storage`. `elastic_expiry` is of limits below 5."""
        _check_elastic(elastic_expiry)
        return run_at_once(self._windows.add(key, expiry, amount))

    def get(self, key: str) -> int:
        return run_at_once(self._windows.total(key))

    def get_expiry(self, key: str) -> float:
        return run_at_once(self._windows.ends_at(key))

    def check(self) -> bool:
        """Return whether the store answers, within `timeout`."""
        return run_at_once(self._windows.check())

    def reset(self) -> int:
        """Delete what is under the prefix, and return how many windows that were."""
        return run_at_once(self._windows.reset())

    def close(self) -> None:
        """Send what was counted, and close the connections. At the end of a process that is done by
        itself.
        """
        run_at_once(self._windows.close())

    def clear(self, key: str) -> None:
        run_at_once(self._windows.clear(key))

    def acquire_entry(self, key: str, limit: int, expiry: int, amount: int = 1) -> bool:
        return run_at_once(
            self._windows.acquire(key, LimitsItem(limit, expiry), strict_limit, amount)
        )

    def get_moving_window(self, key: str, limit: int, expiry: int) -> tuple[float, int]:
        return run_at_once(self._windows.moving_window(key, LimitsItem(limit, expiry)))

    def acquire_sliding_window_entry(
        self, key: str, limit: int, expiry: int, amount: int = 1
    ) -> bool:
        return run_at_once(
            self._windows.acquire(key, LimitsItem(limit, expiry), leap_limit, amount)
        )

    def get_sliding_window(self, key: str, expiry: int) -> tuple[int, float, int, float]:
        return run_at_once(self._windows.sliding_window(key, expiry))

    def clear_sliding_window(self, key: str, expiry: int) -> None:
        self.clear(key)


class AsyncDistwindowStorage(
    aio_base.Storage,
    aio_base.MovingWindowSupport,
    AsyncSlidingWindowSupport,
):
    """`DistwindowStorage` for `limits.aio`: `async+distwindow+redis://...`."""

    STORAGE_SCHEME: list[str] | None = ASYNC_STORAGE_SCHEMES

    def __init__(
        self, uri: str | None = None, wrap_exceptions: bool = False, **options: Any
    ) -> None:
        super().__init__(uri, wrap_exceptions=wrap_exceptions)
        self._windows = Windows(AsyncLimiterPool, uri, options)
        self.storage = self._windows.store_name

    @property
    def base_exceptions(self) -> type[Exception] | tuple[type[Exception], ...]:
        """What `wrap_exceptions` wraps."""
        return (StoreError, ConfigurationError)

    async def incr(
        self, key: str, expiry: int, amount: int = 1, elastic_expiry: bool = False
    ) -> int:
        _check_elastic(elastic_expiry)
        return await self._windows.add(key, expiry, amount)

    async def get(self, key: str) -> int:
        return await self._windows.total(key)

    async def get_expiry(self, key: str) -> float:
        return await self._windows.ends_at(key)

    async def check(self) -> bool:
        return await self._windows.check()

    async def reset(self) -> int:
        return await self._windows.reset()

    async def aclose(self) -> None:
        """See `DistwindowStorage.close`. A loop that ends does not do it by itself."""
        await self._windows.close()

    async def clear(self, key: str) -> None:
        await self._windows.clear(key)

    async def acquire_entry(self, key: str, limit: int, expiry: int, amount: int = 1) -> bool:
        return await self._windows.acquire(key, LimitsItem(limit, expiry), strict_limit, amount)

    async def get_moving_window(self, key: str, limit: int, expiry: int) -> tuple[float, int]:
        return await self._windows.moving_window(key, LimitsItem(limit, expiry))

    async def acquire_sliding_window_entry(
        self, key: str, limit: int, expiry: int, amount: int = 1
    ) -> bool:
        return await self._windows.acquire(key, LimitsItem(limit, expiry), leap_limit, amount)

    async def get_sliding_window(self, key: str, expiry: int) -> tuple[int, float, int, float]:
        return await self._windows.sliding_window(key, expiry)

    async def clear_sliding_window(self, key: str, expiry: int) -> None:
        await self.clear(key)


def _check_elastic(elastic_expiry: bool) -> None:
    if elastic_expiry:
        raise ConfigurationError(
            "the strategy fixed-window-elastic-expiry, which limits 5 has no more, is not there; "
            '"moving-window" is'
        )
