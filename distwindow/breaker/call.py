"""`with breaker.call(key)`: one call of a service, let through or refused, and how it ended."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from types import TracebackType
from typing import TYPE_CHECKING, Generic, TypeVar

from .. import _fork
from ..async_use import EnteredBlock, only_async_with
from ..failure_types import FailureTypes

if TYPE_CHECKING:
    from typing_extensions import Self


A = TypeVar("A")  # a call that was let through


class _BaseBreakerCall(EnteredBlock, Generic[A]):
    """A call that was admitted, and whether the caller has said how it ended."""

    def __init__(self, failure_types: FailureTypes, restarted: Callable[[A], A]) -> None:
        self._failure_types = failure_types
        self._restarted = restarted
        self._admission: A | None = None
        self._is_entered = False
        self._forks = 0
        """That of the process that has entered it: what a forked child leaves is a copy."""
        self._marked_failed = False

    def fail(self) -> None:
        """Count this call as failed, whatever its block raises: an HTTP status of 503, for
        example.
        """
        self._marked_failed = True

    @property
    def is_under_way(self) -> bool:
        """True from the moment at which it was let through until it ends."""
        return self._admission is not None

    def restart(self) -> None:
        """Begin the response time now: something else has held the call back."""
        if self._admission is not None:
            self._admission = self._restarted(self._admission)

    def _begin(self) -> None:
        if self._is_entered:
            raise RuntimeError(
                "this call of a circuit breaker was entered before; write `breaker.call(key)` anew "
                "for each block"
            )
        self._is_entered = True
        self._forks = _fork.forks

    def _end(self, exc: BaseException | None) -> tuple[A, bool | None]:
        """Return what was admitted, and whether it failed. It ends once."""
        admission, self._admission = self._admission, None
        if admission is None:
            raise RuntimeError("this call of a circuit breaker has not been entered, or has ended")
        failed = self._failure_types.failed(exc)
        return admission, True if self._marked_failed else failed


class BreakerCall(_BaseBreakerCall[A]):
    """`with breaker.call(key) as call:`. Raises `BreakerOpen` where the block would begin."""

    _written = "`with breaker.call(key):`, which raises `BreakerOpen` if refused"

    def __init__(
        self,
        failure_types: FailureTypes,
        admit: Callable[[], A],
        finish: Callable[[A, bool | None], object],
        restarted: Callable[[A], A],
    ) -> None:
        super().__init__(failure_types, restarted)
        self._admit = admit
        self._finish = finish

    def __enter__(self) -> Self:
        self._begin()
        self._admission = self._admit()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        exc: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        admission, failed = self._end(exc)
        if self._forks == _fork.forks:
            self._finish(admission, failed)

    def withdraw(self) -> None:
        """End a call that was let through, if it was, and is not made: nothing is counted, and a
        probe goes to another call.
        """
        admission, self._admission = self._admission, None
        if admission is not None and self._forks == _fork.forks:
            self._finish(admission, None)


@only_async_with
class AsyncBreakerCall(_BaseBreakerCall[A]):
    """`async with breaker.call(key) as call:`, the same for tasks."""

    _written = "`async with breaker.call(key):`, which raises `BreakerOpen` if refused"

    def __init__(
        self,
        failure_types: FailureTypes,
        admit: Callable[[], Awaitable[A]],
        finish: Callable[[A, bool | None], Awaitable[object]],
        restarted: Callable[[A], A],
    ) -> None:
        super().__init__(failure_types, restarted)
        self._admit = admit
        self._finish = finish

    async def __aenter__(self) -> Self:
        self._begin()
        self._admission = await self._admit()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        exc: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        admission, failed = self._end(exc)
        if self._forks == _fork.forks:
            await self._finish(admission, failed)

    async def withdraw(self) -> None:
        """See `BreakerCall.withdraw`."""
        admission, self._admission = self._admission, None
        if admission is not None and self._forks == _fork.forks:
            await self._finish(admission, None)
