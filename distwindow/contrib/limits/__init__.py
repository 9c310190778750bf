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

from collections.abc import Coroutine
from typing import TYPE_CHECKING, Any, ClassVar

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


class _OfWindows:
    """What both storages have: each method is a step over the windows. A storage for threads takes
    it to its end, and one for tasks returns it, to be awaited.
    """

    _pool_type: ClassVar[type[LimiterPool] | type[AsyncLimiterPool]]

    def __init__(
        self, uri: str | None = None, wrap_exceptions: bool = False, **options: Any
    ) -> None:
        super().__init__(uri, wrap_exceptions=wrap_exceptions)  # type: ignore[call-arg]  # of limits
        self._windows = Windows(self._pool_type, uri, options)
        self.storage = self._windows.store_name  # shown by `flask limiter config`

    @staticmethod
    def _run(steps: Coroutine[Any, Any, Any]) -> Any:
        return steps

    @property
    def base_exceptions(self) -> type[Exception] | tuple[type[Exception], ...]:
        """What `wrap_exceptions` wraps."""
        return (StoreError, ConfigurationError)

    def incr(self, key: str, expiry: int, amount: int = 1, elastic_expiry: bool = False) -> Any:
        """See `limits.storage.Storage`. `elastic_expiry` is of limits below 5."""
        if elastic_expiry:
            raise ConfigurationError(
                "the strategy fixed-window-elastic-expiry, which limits 5 has no more, is not "
                'there; "moving-window" is'
            )
        return self._run(self._windows.add(key, expiry, amount))

    def get(self, key: str) -> Any:
        return self._run(self._windows.total(key))

    def get_expiry(self, key: str) -> Any:
        return self._run(self._windows.ends_at(key))

    def check(self) -> Any:
        """Return whether the store answers, within `timeout`."""
        return self._run(self._windows.check())

    def reset(self) -> Any:
        """Delete what is under the prefix, and return how many windows that were."""
        return self._run(self._windows.reset())

    def clear(self, key: str) -> Any:
        return self._run(self._windows.clear(key))

    def acquire_entry(self, key: str, limit: int, expiry: int, amount: int = 1) -> Any:
        item = LimitsItem(limit, expiry)
        return self._run(self._windows.acquire(key, item, strict_limit, amount))

    def get_moving_window(self, key: str, limit: int, expiry: int) -> Any:
        return self._run(self._windows.moving_window(key, LimitsItem(limit, expiry)))

    def acquire_sliding_window_entry(
        self, key: str, limit: int, expiry: int, amount: int = 1
    ) -> Any:
        item = LimitsItem(limit, expiry)
        return self._run(self._windows.acquire(key, item, leap_limit, amount))

    def get_sliding_window(self, key: str, expiry: int) -> Any:
        return self._run(self._windows.sliding_window(key, expiry))

    def clear_sliding_window(self, key: str, expiry: int) -> Any:
        return self.clear(key)


class DistwindowStorage(_OfWindows, base.Storage, base.MovingWindowSupport, SlidingWindowSupport):
    """The storage of `distwindow+redis://...` and the other URLs of `Limiter`.

    Options, in the URL or beside it: `timeout` (seconds), `prefix` ("limits"), `consistency`,
    `buckets`, and `reset`: "seconds", so that `Retry-After` is never too early, or "exact", for
    who sleeps until `reset_time`. Others are those of redis-py. Raises `ConfigurationError` for
    what can never work; calls raise `StoreError`.
    """

    STORAGE_SCHEME: list[str] | None = STORAGE_SCHEMES
    _pool_type = LimiterPool
    _run = staticmethod(run_at_once)

    def close(self) -> None:
        """Send what was counted, and close the connections. At the end of a process that is done by
        itself.
        """
        run_at_once(self._windows.close())


class AsyncDistwindowStorage(
    _OfWindows, aio_base.Storage, aio_base.MovingWindowSupport, AsyncSlidingWindowSupport
):
    """`DistwindowStorage` for `limits.aio`: `async+distwindow+redis://...`."""

    STORAGE_SCHEME: list[str] | None = ASYNC_STORAGE_SCHEMES
    _pool_type = AsyncLimiterPool

    async def aclose(self) -> None:
        """See `DistwindowStorage.close`. A loop that ends does not do it by itself."""
        await self._windows.close()
