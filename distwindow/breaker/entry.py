"""`with limiter.entry(key, breaker=breaker)`: a limit and a circuit breaker around one block.

The breaker is asked first: by what the process knows while it is closed, and without a permit where
it refuses. A refusal by the limit says nothing of the service: it is no failure, and a probe goes
to another call.

    from     event                        to
    made     the breaker refuses          ended, BreakerOpen; 0 permits; breaker: nothing
    made     the limit refuses            ended, RateLimitExceeded; 0 permits; breaker: no end
    made     acquiring fails              ended, StoreTimeout; 0 permits; breaker: no end
    made     is left                      made, RuntimeError; 0 permits; breaker: nothing
    entered  the block returns            ended; 1 permit, 1 success; breaker: success
    entered  fail, and the block returns  ended; 1 permit, 1 error; breaker: failure
    entered  the block raises an error    ended, OSError; 1 permit, 1 error; breaker: failure
    entered  ... that is ignored          ended, EOFError; 1 permit, 1 error; breaker: no end
    entered  is entered                   entered, RuntimeError; 1 permit; breaker: nothing
    entered  is left in another thread    entered, RuntimeError; 1 permit; breaker: nothing
    ended    is left                      ended, RuntimeError; 1 permit, 1 success; breaker: success

The breaker counts "nothing" as long as it was told of no end; it is told of "no end" where a call
that it let through was not made, or says nothing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeAlias

from ..errors import ConfigurationError, short_repr
from ..limiter.entry import AsyncEntry, BaseEntry, Entry
from ..ring.key import AnyKey
from .call import AsyncBreakerCall, BreakerCall
from .circuit_breaker import AsyncBreaker, BlockingBreaker

if TYPE_CHECKING:
    from typing_extensions import Self


EntryBreaker: TypeAlias = "BlockingBreaker[Any, Any] | BreakerCall[Any]"
"""A breaker, which is asked for the key of the entry; or `breaker.call(key)`, for another key."""
AsyncEntryBreaker: TypeAlias = "AsyncBreaker[Any, Any] | AsyncBreakerCall[Any]"


class _EntryWithCall(BaseEntry):
    """An entry with the call of a breaker."""

    def __init__(self, call: Any, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._call = call

    def fail(self) -> None:
        """See `Entry.fail`; the breaker counts a failure, too."""
        super().fail()
        self._call.fail()


class BreakerEntry(_EntryWithCall, Entry):
    """`with limiter.entry(key, breaker=...) as entry:`. `call` is that of the breaker."""

    def __enter__(self) -> Self:
        self._begin()
        self._call.__enter__()
        try:
            self._start(self._settings.admit(self._key, self._cost))
        except BaseException:
            self._call.withdraw()
            raise
        self._call.restart()
        return self

    def __exit__(self, *exc: Any) -> None:
        try:
            super().__exit__(*exc)
        finally:
            # Neither after an exit that was refused, nor a second time, nor in a forked process.
            if self._has_ended and self._is_own and self._call.is_under_way:
                self._call.__exit__(*exc)


class AsyncBreakerEntry(_EntryWithCall, AsyncEntry):
    """`async with limiter.entry(key, breaker=...) as entry:`, the same for tasks."""

    async def __aenter__(self) -> Self:
        self._begin()
        await self._call.__aenter__()
        try:
            self._start(await self._settings.admit(self._key, self._cost))
        except BaseException:
            await self._call.withdraw()
            raise
        self._call.restart()
        return self

    async def __aexit__(self, *exc: Any) -> None:
        try:
            await super().__aexit__(*exc)
        finally:
            if self._has_ended and self._is_own and self._call.is_under_way:
                await self._call.__aexit__(*exc)


def call_of(breaker: Any, key: AnyKey, in_tasks: bool = False) -> Any:
    """Return the call of `breaker` in one entry. Raises `ConfigurationError` for what is none."""
    if isinstance(breaker, AsyncBreaker if in_tasks else BlockingBreaker):
        return breaker.call(key)
    if isinstance(breaker, AsyncBreakerCall if in_tasks else BreakerCall):
        return breaker
    kinds, limiter = "a CircuitBreaker or an AdaptiveBreaker", "Limiter"
    if in_tasks:
        kinds, limiter = "an AsyncCircuitBreaker or an AsyncAdaptiveBreaker", "AsyncLimiter"
    raise ConfigurationError(
        f"breaker={short_repr(breaker)}: an entry of {limiter} takes {kinds}, or what its "
        "call(key) returns"
    )
