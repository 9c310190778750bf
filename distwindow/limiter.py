"""The faces: `Limiter` for threads, `AsyncLimiter` for tasks. The same names, the same signatures;
what they do is in `flow/`, where it is kept is in `store/`.
"""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Awaitable, Callable, Iterable, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from .connect import ClockChoice, open_async_store, open_store, survive_fork
from .core.clock import SYSTEM, Clock
from .core.decision import Decision
from .core.errors import ConfigurationError, RateLimitExceeded
from .core.limit import Limit, LimitSpec
from .core.stats import Stats
from .entry import AsyncEntry, Entry
from .flow import admin
from .flow.admit import wait
from .flow.book import Book
from .flow.drive import arun, run
from .flow.effect import Dialogue
from .flow.line import Lines
from .store.memory import MemoryStore
from .wire.keys import AnyKey

if TYPE_CHECKING:
    from typing_extensions import Self

T = TypeVar("T")
F = TypeVar("F", bound=Callable[..., Any])

Consistency = Literal["direct"]
OnStoreError = Literal["raise"]


class _Face:
    """What both faces are made of. Arguments are theirs."""

    def __init__(
        self, limits: LimitSpec, prefix: str, consistency: str, on_store_error: str, time: Clock
    ) -> None:
        if consistency != "direct":
            raise ConfigurationError(f'consistency={consistency!r}: this version has "direct" only')
        if on_store_error != "raise":
            raise ConfigurationError(
                f'on_store_error={on_store_error!r}: this version has "raise" only'
            )
        self._book = Book(prefix, limits)
        self._lines = survive_fork(Lines(time))

    @property
    def limits(self) -> tuple[Limit, ...]:
        """The limits, shortest interval first."""
        return self._book.limits

    @property
    def prefix(self) -> str:
        """What the names of all rings begin with."""
        return self._book.prefix


class Limiter(_Face):
    """Limits that hold for the whole fleet. Safe to share between threads; survives `fork`.

    `store` is a URL (`redis://`, `rediss://`, `unix://`, `redis+cluster://`, `redis+sentinel://`,
    the same with `valkey`, `memory://`) or a redis-py client that stays the caller's. `limits` is
    one limit or several; all must admit, or none is charged.

        limiter = Limiter("redis://localhost:6379/0", "100/second")
        if limiter.try_acquire("user:42"):
            ...

    `timeout` (seconds) is the deadline of one whole call: connect, TLS, write and read together.
    `clock="client"` is for servers that refuse TIME in scripts; never mix clocks on one key.
    `name` says who this is in the list of the server's clients. Raises `ConfigurationError` for
    arguments that can never work; nothing is connected to before the first call.

    Every call may raise `StoreTimeout` and `StoreUnavailable`, whose `.charged` tells what is known
    of its fate, and `ConfigurationError` where the server can never serve it.
    """

    def __init__(
        self,
        store: Any,
        limits: LimitSpec,
        *,
        prefix: str = "distwindow",
        consistency: Consistency = "direct",
        on_store_error: OnStoreError = "raise",
        timeout: float = 0.25,
        clock: ClockChoice = "server",
        name: str | None = None,
        time: Clock = SYSTEM,
    ) -> None:
        super().__init__(limits, prefix, consistency, on_store_error, time)
        self._store = open_store(store, timeout=timeout, clock=clock, name=name, time=time)
        self._close = _kept if self._store is store else self._store.close

    @property
    def unknown_total(self) -> int:
        """How many calls of this limiter have had an unknown outcome: each may have been charged,
        once.
        """
        return self._store.unknown_total

    def try_acquire(self, key: AnyKey, cost: int = 1) -> Decision:
        """Count `cost` permits on `key` if all limits allow it. Never raises because of a limit.

        Raises `ValueError` for an empty key, and for a cost that is not a whole number of at least
        1 or exceeds the smallest limit, before anything is sent.
        """
        return self._store.attempt(self._book.acquire(key, cost))

    def try_acquire_all(self, items: Iterable[Sequence[Any]]) -> Decision:
        """Over several keys, each with its own limits: `[(key, limits, cost), ...]`; all or none.

        One round trip; the decision names the key and the limit that refused. On a cluster the
        keys need a common tag (`Key(resource, tag=...)`); `ConfigurationError` says so.
        """
        return self._store.attempt(self._book.acquire_all(items))

    def acquire(self, key: AnyKey, cost: int = 1, timeout: float | None = None) -> Decision:
        """`try_acquire` that waits for its turn: in line behind the earlier waiters of this
        process, then asleep until the exact moment of its permits.

        Raises `RateLimitExceeded` once it is certain that `timeout` (seconds; None: endless) ends
        before that.
        """
        command = self._book.acquire(key, cost)
        with self._lines.turn(command, _patience(timeout)) as place:
            return self._run(wait(command, self._store.source, place))

    def peek(self, key: AnyKey) -> Decision:
        """The decision a cost of 1 would get now; counts nothing, so `remaining` is before it."""
        return self._run(admin.peek(self._book.acquire(key).charges, self._store.source))

    def stats(self, key: AnyKey) -> Stats:
        """What the live windows of `key` have recorded."""
        return self._run(admin.stats(key, self._book.acquire(key).charges))

    def refund(self, decision: Decision) -> int:
        """Give an admitted cost back, in its own bucket; how many permits were still there.

        Not idempotent: two refunds of one decision give back twice. Raises `ValueError` for a
        decision that charged nothing.
        """
        return self._run(admin.refund(decision))

    def reset(self, key: AnyKey) -> None:
        """Forget the windows of `key`: everything is free again."""
        self._run(admin.reset(self._book.acquire(key).charges))

    def limit(
        self, key: AnyKey | Callable[..., AnyKey], *, cost: int | Callable[..., int] = 1
    ) -> Callable[[F], F]:
        """Decorator: a call of the function is refused with `RateLimitExceeded` when over limit.

        `key` and `cost` may be callables of the function's own arguments.
        """

        def decorate(function: F) -> F:
            if inspect.iscoroutinefunction(function):
                raise ConfigurationError(
                    f"{_named(function)} is a coroutine function; use AsyncLimiter.limit, "
                    "as a blocking limiter would stop the event loop"
                )

            @functools.wraps(function)
            def limited(*args: Any, **kwargs: Any) -> Any:
                _demand(self.try_acquire(_of(key, args, kwargs), _of(cost, args, kwargs)))
                return function(*args, **kwargs)

            return limited  # type: ignore[return-value]  # it has the signature of what it wraps

        return decorate

    def entry(self, key: AnyKey, cost: int = 1) -> Entry:
        """`with limiter.entry(key) as entry:` acquires (or raises `RateLimitExceeded`), and when
        the block ends records success or error and the response time.
        """
        return Entry(
            functools.partial(self.try_acquire, key, cost), self._record, self._store.clock
        )

    def close(self) -> None:
        """Close the connections. Later calls raise `ConfigurationError`; closing twice is fine.

        A store object that the caller made stays open, as it stays the caller's.
        """
        self._close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        exc: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _record(self, decision: Decision, failed: bool, rt_ms: int) -> None:
        self._run(admin.observe(decision, failed=failed, rt_ms=rt_ms))

    def _run(self, dialogue: Dialogue[T]) -> T:
        return run(dialogue, self._store.execute, self._store.clock.sleep)


class AsyncLimiter(_Face):
    """`Limiter` for tasks: the same names and signatures, awaited where there is I/O. Safe to share
    between tasks, and between event loops.

    Concurrent calls share one connection, and those of one key share script calls.
    """

    def __init__(
        self,
        store: Any,
        limits: LimitSpec,
        *,
        prefix: str = "distwindow",
        consistency: Consistency = "direct",
        on_store_error: OnStoreError = "raise",
        timeout: float = 0.25,
        clock: ClockChoice = "server",
        name: str | None = None,
        time: Clock = SYSTEM,
    ) -> None:
        super().__init__(limits, prefix, consistency, on_store_error, time)
        self._store = open_async_store(store, timeout=timeout, clock=clock, name=name, time=time)
        given = self._store is store or isinstance(store, MemoryStore)
        self._aclose = _akept if given else self._store.aclose

    @property
    def unknown_total(self) -> int:
        """See `Limiter.unknown_total`."""
        return self._store.unknown_total

    async def try_acquire(self, key: AnyKey, cost: int = 1) -> Decision:
        """See `Limiter.try_acquire`."""
        return await self._store.attempt(self._book.acquire(key, cost))

    async def try_acquire_all(self, items: Iterable[Sequence[Any]]) -> Decision:
        """See `Limiter.try_acquire_all`."""
        return await self._store.attempt(self._book.acquire_all(items))

    async def acquire(self, key: AnyKey, cost: int = 1, timeout: float | None = None) -> Decision:
        """See `Limiter.acquire`."""
        command = self._book.acquire(key, cost)
        async with self._lines.aturn(command, _patience(timeout)) as place:
            return await self._run(wait(command, self._store.source, place))

    async def peek(self, key: AnyKey) -> Decision:
        """See `Limiter.peek`."""
        return await self._run(admin.peek(self._book.acquire(key).charges, self._store.source))

    async def stats(self, key: AnyKey) -> Stats:
        """See `Limiter.stats`."""
        return await self._run(admin.stats(key, self._book.acquire(key).charges))

    async def refund(self, decision: Decision) -> int:
        """See `Limiter.refund`."""
        return await self._run(admin.refund(decision))

    async def reset(self, key: AnyKey) -> None:
        """See `Limiter.reset`."""
        await self._run(admin.reset(self._book.acquire(key).charges))

    def limit(
        self, key: AnyKey | Callable[..., AnyKey], *, cost: int | Callable[..., int] = 1
    ) -> Callable[[F], F]:
        """See `Limiter.limit`; for coroutine functions."""

        def decorate(function: F) -> F:
            if not inspect.iscoroutinefunction(function):
                raise ConfigurationError(
                    f"{_named(function)} is no coroutine function; use Limiter.limit"
                )

            @functools.wraps(function)
            async def limited(*args: Any, **kwargs: Any) -> Any:
                _demand(await self.try_acquire(_of(key, args, kwargs), _of(cost, args, kwargs)))
                return await function(*args, **kwargs)

            return limited  # type: ignore[return-value]  # it has the signature of what it wraps

        return decorate

    def entry(self, key: AnyKey, cost: int = 1) -> AsyncEntry:
        """See `Limiter.entry`; `async with`."""
        return AsyncEntry(
            functools.partial(self.try_acquire, key, cost), self._record, self._store.clock
        )

    async def aclose(self) -> None:
        """See `Limiter.close`."""
        await self._aclose()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        exc: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.aclose()

    async def _record(self, decision: Decision, failed: bool, rt_ms: int) -> None:
        await self._run(admin.observe(decision, failed=failed, rt_ms=rt_ms))

    def _run(self, dialogue: Dialogue[T]) -> Awaitable[T]:
        return arun(dialogue, self._store.execute, self._store.sleep)


def _named(function: Callable[..., Any]) -> str:
    return getattr(function, "__qualname__", repr(function))


def _kept() -> None:
    """Closing what is the caller's is the caller's."""


async def _akept() -> None:
    """Closing what is the caller's is the caller's."""


def _of(value: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """A decorator's key or cost for this call."""
    return value(*args, **kwargs) if callable(value) else value


def _demand(decision: Decision) -> None:
    if not decision.allowed:
        raise RateLimitExceeded(decision)


def _patience(timeout: float | None) -> float | None:
    if timeout is None:
        return None
    if isinstance(timeout, bool) or not isinstance(timeout, (int, float)) or not timeout >= 0:
        raise ValueError(f"timeout={timeout!r} is not a number of seconds of at least 0, or None")
    return None if math.isinf(timeout) else float(timeout)
