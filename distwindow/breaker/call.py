"""`with breaker.call(key)`: one call of a service, let through or refused, and how it ended."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from types import TracebackType
from typing import TYPE_CHECKING, Generic, TypeVar

from ..failure_types import FailureTypes

if TYPE_CHECKING:
    from typing_extensions import Self

A = TypeVar("A")  # a call that was let through


class _BaseCall(Generic[A]):
    """What was admitted, and whether the caller has said how it ended."""

    def __init__(self, failure_types: FailureTypes) -> None:
        self._failure_types = failure_types
        self._admission: A | None = None
        self._is_entered = False
        self._marked_failed = False

    def fail(self) -> None:
        """Count this call as failed, though its block raises nothing: an HTTP status of 503, for
        example.
        """
        self._marked_failed = True

    def _begin(self) -> None:
        if self._is_entered:
            raise RuntimeError(
                "this call of a circuit breaker was entered before; write `breaker.call(key)` anew "
                "for each block"
            )
        self._is_entered = True

    def _end(self, exc: BaseException | None) -> tuple[A, bool | None]:
        """Return what was admitted, and whether it failed. It ends once."""
        admission, self._admission = self._admission, None
        if admission is None:
            raise RuntimeError("this call of a circuit breaker has not been entered, or has ended")
        failed = self._failure_types.failed(exc)
        return admission, True if self._marked_failed and exc is None else failed


class Call(_BaseCall[A]):
    """`with breaker.call(key) as call:`. Raises `BreakerOpen` where the block would begin."""

    def __init__(
        self,
        failure_types: FailureTypes,
        admit: Callable[[], A],
        finish: Callable[[A, bool | None], object],
    ) -> None:
        super().__init__(failure_types)
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
        self._finish(*self._end(exc))


class AsyncCall(_BaseCall[A]):
    """`async with breaker.call(key) as call:`, the same for tasks."""

    def __init__(
        self,
        failure_types: FailureTypes,
        admit: Callable[[], Awaitable[A]],
        finish: Callable[[A, bool | None], Awaitable[object]],
    ) -> None:
        super().__init__(failure_types)
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
        await self._finish(*self._end(exc))
