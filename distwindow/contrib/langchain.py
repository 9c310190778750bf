"""One limit of a provider's account for all chat models, as their `rate_limiter`."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any, NoReturn

from .. import AsyncLimiter, ConfigurationError, Decision, Limit, Limiter, StoreUnavailable
from ..away.outages import RETRY_AFTER_S
from ..away.policy import OnStoreError
from ..errors import DistwindowError, RateLimitExceeded, StoreError, short_repr
from ..lifecycle.connect import open_store, store_name
from ..ring.clock import SYSTEM, Clock
from ..ring.key import AnyKey
from ..ring.limit import LimitSpec
from ..runtime.options import ClockChoice, Consistency, Options
from . import needs

with needs("langchain"):
    from langchain_core.exceptions import LangChainException
    from langchain_core.rate_limiters import BaseRateLimiter
if TYPE_CHECKING:
    from langchain_core.exceptions import ModelRateLimitError
else:
    try:
        from langchain_core.exceptions import ModelRateLimitError
    except ImportError:  # older versions have no error for this
        ModelRateLimitError = LangChainException

__all__ = ["RateLimited", "RateLimiter", "RateLimiterStoreError"]


class RateLimited(RateLimitExceeded, ModelRateLimitError):
    """The model was not called: there is no room within `max_wait`, or `on_store_error` is "deny".
    Also a `ModelRateLimitError` of LangChain, before it had that a `LangChainException`.
    """

    def __str__(self) -> str:
        refused = self.decision
        if refused.reason == "store_down":
            return f"the model was not called: the store of {short_repr(refused.key)} is away"
        return f"the model was not called: {super().__str__()}"


class RateLimiterStoreError(StoreUnavailable, LangChainException):
    """The store gave no answer, and `on_store_error` is "raise"; also a `LangChainException`."""


class RateLimiter(BaseRateLimiter):
    """One limit for the calls of all models and processes that name the same store, prefix, limits
    and `key` (such as "openai:acct1"). Safe to share between threads, tasks and event loops;
    survives `fork`.

    A call waits for its turn for at most `max_wait` seconds (None: without end); where that is too
    short, it raises `RateLimited`. Calls are counted, and not tokens, of which LangChain says
    nothing. `store` is a URL. `on_store_error` is what a call gets that the store does not decide
    within `timeout` seconds: "allow" (the model is called), "deny" (`RateLimited`), "raise"
    (`RateLimiterStoreError`), "local" (the `share` of this process, for threads and tasks each), or
    a function, which is asked again each second if it denies. The other options are those of
    `Limiter`. Raises `ConfigurationError` for what can never work.
    """

    def __init__(
        self, store: str, limits: LimitSpec, *, key: AnyKey, max_wait: float | None = None,
        on_store_error: OnStoreError = "allow", share: float | None = None, timeout: float = 1.0,
        prefix: str = "distwindow", consistency: Consistency = "direct",
        clock: ClockChoice = "server", name: str | None = None, time: Clock = SYSTEM,
    ) -> None:  # fmt: skip
        if not isinstance(store, str):
            raise ConfigurationError(
                f"{type(store).__name__} is no URL; write one, such as 'redis://localhost:6379/0', "
                "as threads and tasks have connections of their own here"
            )
        checked = Options(time=time, max_wait=0.0 if max_wait is None else max_wait)
        self._key, self._max_wait, self._shown_name = key, max_wait, store_name(store)

        def deny(key: AnyKey, cost: int, limits: tuple[Limit, ...], error: StoreError) -> NoReturn:
            """End a call that waits, which with "deny" would ask again until the store is back."""
            refused = False, key, cost, limits[0], 0, RETRY_AFTER_S, 0.0, 0.0
            raise RateLimited(Decision(*refused, "store_down", "policy", time.now_ms(), None))

        options: Any = {
            "on_store_error": deny if on_store_error == "deny" else on_store_error,
            "share": share, "timeout": timeout, "prefix": prefix, "consistency": consistency,
            "clock": clock, "name": name, "time": time,
        }  # fmt: skip
        opened = open_store(store, checked) if store == "memory://" else store  # one for both
        self._of_threads = Limiter(opened, limits, **options)
        self._of_tasks = AsyncLimiter(opened, limits, **options)
        self._of_threads.decider.commands.acquire_command(key, 1)  # raises for what is no key

    def acquire(self, *, blocking: bool = True) -> bool:
        """Count a call when it is its turn; without `blocking`, return at once whether it may be
        sent. Raises `RateLimited` and `RateLimiterStoreError`.
        """
        try:
            if blocking:
                return self._of_threads.acquire(self._key, timeout=self._max_wait).allowed
            return self._of_threads.try_acquire(self._key).allowed
        except (RateLimitExceeded, StoreError) as exc:
            return _refused(exc, blocking=blocking)

    async def aacquire(self, *, blocking: bool = True) -> bool:
        """See `acquire`."""
        try:
            if blocking:
                return (await self._of_tasks.acquire(self._key, timeout=self._max_wait)).allowed
            return (await self._of_tasks.try_acquire(self._key)).allowed
        except (RateLimitExceeded, StoreError) as exc:
            return _refused(exc, blocking=blocking)

    def close(self) -> None:
        """Close the connections of threads; their later calls raise `ConfigurationError`."""
        self._of_threads.close()

    async def aclose(self) -> None:
        """Close the connections of tasks, and those of threads."""
        await self._of_tasks.aclose()
        await asyncio.to_thread(self.close)

    def __repr__(self) -> str:  # traces have that of the model
        limits = "; ".join(map(str, self._of_threads.limits))
        return f"{type(self).__name__}({self._shown_name!r}, {limits!r}, key={self._key!r})"


def _refused(error: DistwindowError, *, blocking: bool) -> bool:
    """Raise what is an error of LangChain, too; return False for a refusal without `blocking`."""
    if isinstance(error, StoreError):
        raise RateLimiterStoreError(str(error), charged=error.charged) from error
    assert isinstance(error, RateLimitExceeded)
    if blocking:
        raise RateLimited(error.decision) from None
    return False
