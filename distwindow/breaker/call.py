"""`with breaker.call(key)`: one call of a service, let through or refused, and how it ended."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Generic, TypeVar

from ..ring.key import AnyKey
from ..support import fork
from ..support.async_use import EnteredBlock, only_async_with
from .record import BreakerOpen

if TYPE_CHECKING:
    from typing_extensions import Self

    from .circuit_breaker import BaseBreaker

A = TypeVar("A")  # a call that was let through


class _BaseBreakerCall(EnteredBlock, Generic[A]):
    """A call that was admitted, and whether the caller has said how it ended."""

    __slots__ = ("_admission", "_breaker", "_forks", "_key", "_marked_failed")

    def __init__(self, breaker: BaseBreaker[Any, A], key: AnyKey) -> None:
        self._breaker = breaker
        self._key = key
        self._admission: A | None = None
        self._forks: int | None = None
        """That of the process that has entered it, as what a forked child leaves is a copy; None
        before.
        """
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
            self._admission = self._breaker._states.restarted(self._admission)

    def _begin(self) -> A | None:
        """Return the call if it is let through by what is known."""
        if self._forks is not None:
            raise RuntimeError(
                "this call of a circuit breaker was entered before; write `breaker.call(key)` anew "
                "for each block"
            )
        self._forks = fork.forks
        return self._breaker._states.decide(self._key)

    def _end(self, exc: BaseException | None) -> A | None:
        """Record how the call ended, once. Return it if that is to be sent at once."""
        admission, self._admission = self._admission, None
        if admission is None:
            raise RuntimeError("this call of a circuit breaker has not been entered, or has ended")
        if self._forks != fork.forks:
            return None
        breaker = self._breaker
        failed: bool | None = self._marked_failed
        if exc is not None and not failed:
            failed = breaker._failure_types.failed(exc)
        return admission if breaker._states.record(admission, failed) else None

    def _withdraw(self) -> A | None:
        """Do as `_end`, for a call that is not made, if it was let through."""
        admission, self._admission = self._admission, None
        if admission is None or self._forks != fork.forks:
            return None
        return admission if self._breaker._states.record(admission, None) else None


class BreakerCall(_BaseBreakerCall[A]):
    """`with breaker.call(key) as call:`. Raises `BreakerOpen` where the block would begin."""

    __slots__ = ()
    _written = "`with breaker.call(key):`, which raises `BreakerOpen` if refused"

    def __enter__(self) -> Self:
        try:
            admission = self._begin()
            self._admission = self._breaker._ask(self._key) if admission is None else admission
        except BreakerOpen as refused:
            self._breaker.count_refused(refused)
            raise
        return self

    def __exit__(self, kind: object, exc: BaseException | None, trace: object) -> None:
        to_send = self._end(exc)
        if to_send is not None:
            self._breaker._send(to_send)

    def withdraw(self) -> None:
        """End a call that is not made: nothing is counted, and a probe goes to another call."""
        to_send = self._withdraw()
        if to_send is not None:
            self._breaker._send(to_send)


@only_async_with
class AsyncBreakerCall(_BaseBreakerCall[A]):
    """`async with breaker.call(key) as call:`, the same for tasks."""

    __slots__ = ()
    _written = "`async with breaker.call(key):`, which raises `BreakerOpen` if refused"

    async def __aenter__(self) -> Self:
        try:
            admission = self._begin()
            known = admission is not None
            self._admission = admission if known else await self._breaker._ask(self._key)
        except BreakerOpen as refused:
            self._breaker.count_refused(refused)
            raise
        return self

    async def __aexit__(self, kind: object, exc: BaseException | None, trace: object) -> None:
        # Before anything is awaited: if the task is cancelled then, the worker sends it.
        to_send = self._end(exc)
        if to_send is not None:
            await self._breaker._send(to_send)

    async def withdraw(self) -> None:
        to_send = self._withdraw()
        if to_send is not None:
            await self._breaker._send(to_send)
