"""The faces: `Limiter` for threads, `AsyncLimiter` for tasks. The same names, the same signatures;
what they do is in `flow/`, where it is kept is in `store/`.
"""

from __future__ import annotations

import asyncio
import functools
import math
import sys
from collections.abc import Awaitable, Callable, Iterable, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from .connect import (
    ClockChoice,
    Consistency,
    Mode,
    inside,
    open_async_store,
    open_near,
    open_store,
    store_name,
    survive_fork,
)
from .core.clock import SYSTEM, Clock
from .core.decision import Decision
from .core.errors import ConfigurationError, DistwindowError, RateLimitExceeded
from .core.interrupts import check_patched_before_import, complete_in_thread
from .core.limit import Limit, LimitSpec
from .core.stats import Stats
from .decorator import (
    LimitDecorator,
    check_arguments,
    is_async_generator,
    is_awaiting,
    limited_generator,
    name_of,
)
from .entry import AsyncEntry, Entry
from .operations import key_operations as admin
from .operations.acquire import wait
from .operations.command_cache import Book
from .operations.drivers import arun, run
from .operations.flush import work
from .operations.steps import Dialogue, Fetch, Together
from .operations.wait_queue import AsyncPlace, Lines, Place
from .protocol.commands import Acquire
from .protocol.keys import AnyKey
from .store.memory import MemoryStore
from .worker import TASKS, THREAD

if TYPE_CHECKING:
    from typing_extensions import Self

T = TypeVar("T")
F = TypeVar("F", bound=Callable[..., Any])

OnStoreError = Literal["raise"]


class _Face:
    """What both faces are made of. Arguments are theirs."""

    def __init__(
        self,
        limits: LimitSpec,
        prefix: str,
        on_store_error: str,
        time: Clock,
        handle_sigterm: bool,
    ) -> None:
        if on_store_error != "raise":
            raise ConfigurationError(
                f'on_store_error={on_store_error!r}: this version has "raise" only'
            )
        if not isinstance(handle_sigterm, bool):
            raise ConfigurationError(f"handle_sigterm={handle_sigterm!r} is neither True nor False")
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

    `consistency` says who decides. `direct`: the store, each time; a refusal is remembered until it
    can change. `leased`: this process, with permits it has bought from the store in blocks; never
    more than the limit is admitted. `eventual`: this process, by what it and the others had passed
    at the last sync, every `sync_interval` seconds; a call never waits for the store, and the fleet
    may pass more than the limit meanwhile. `share` (0 to 1) caps what one process may admit of each
    limit then. docs/consistency.md has the bounds and the costs.

    What is counted in this process (blocks, and the ends of entries) is told to the store every
    `flush_interval` seconds by one worker for all limiters, and when the process ends. At most
    `max_local_keys` keys are kept here, the last ones used.

    SIGTERM would end the process before that. Where nobody handles it, and the limiter is made in
    the main thread, a handler has everything sent first, for at most three seconds;
    `handle_sigterm=False` leaves the signal alone.

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
        sync_interval: float = 0.1,
        share: float | None = None,
        flush_interval: float = 0.25,
        max_local_keys: int = 100_000,
        handle_sigterm: bool = True,
        time: Clock = SYSTEM,
    ) -> None:
        check_patched_before_import()
        super().__init__(limits, prefix, on_store_error, time, handle_sigterm)
        mode = Mode(
            consistency, clock, sync_interval, share, flush_interval, max_local_keys, timeout
        )
        self._store = open_store(store, timeout=timeout, clock=clock, name=name, time=time)
        self._kept = self._store is store
        self._timeout = mode.timeout
        self._near = open_near(mode, self._book, self._store, self._store.attempt)
        self._judge = self._near.judge
        self._ask = self._ask_store if mode.direct else self._ask_near
        self._agent = THREAD.serve(
            self._near,
            self._work,
            self._store.clock,
            name=f"limiter {prefix!r} at {store_name(store)}",
            handle_sigterm=handle_sigterm,
        )

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
        decision = self._judge(key, cost)
        return self._ask(key, cost) if decision is None else decision

    def try_acquire_all(self, items: Iterable[Sequence[Any]]) -> Decision:
        """Over several keys, each with its own limits: `[(key, limits, cost), ...]`; all or none.

        One round trip; the decision names the key and the limit that refused. On a cluster the
        keys need a common tag (`Key(resource, tag=...)`); `ConfigurationError` says so.
        """
        command = self._book.acquire_all(items)
        deadline = self._store.clock.monotonic() + self._timeout
        self._run(admin.ahead(self._near, command.charges, self._store.clock), deadline)
        return self._store.attempt(command, deadline)

    def acquire(self, key: AnyKey, cost: int = 1, timeout: float | None = None) -> Decision:
        """`try_acquire` that waits for its turn: in line behind the earlier waiters of this
        process, then asleep until the exact moment of its permits.

        Raises `RateLimitExceeded` once it is certain that `timeout` (seconds; None: endless) ends
        before that.
        """
        command = self._book.acquire(key, cost)
        attempt = functools.partial(self.try_acquire, key, cost)
        place = Place(self._lines, command, _patience(timeout))
        try:
            place.wait()
            return run(wait(command, place), lambda _: attempt(), self._store.clock.sleep)
        finally:
            try:
                place.leave()
            finally:
                place.leave()  # a signal handler may have raised in the first

    def peek(self, key: AnyKey) -> Decision:
        """The decision a cost of 1 would get now; counts nothing, so `remaining` is before it."""
        charges = self._book.acquire(key).charges
        return self._run(admin.peek(self._near, charges, self._store.source))

    def stats(self, key: AnyKey) -> Stats:
        """What the live windows of `key` have recorded."""
        charges = self._book.acquire(key).charges
        return self._run(admin.stats(self._near, charges, self._store.clock))

    def refund(self, decision: Decision) -> int:
        """Give an admitted cost back, in its own bucket; how many permits were still there.

        Not idempotent: two refunds of one decision give back twice. Raises `ValueError` for a
        decision that charged nothing.
        """
        return self._run(admin.refund(self._near, decision, self._store.clock))

    def reset(self, key: AnyKey) -> None:
        """Forget the windows of `key`: everything is free again."""
        self._run(admin.reset(self._near, self._book.acquire(key).charges))

    def limit(
        self, key: AnyKey | Callable[..., AnyKey], *, cost: int | Callable[..., int] = 1
    ) -> Callable[[F], F]:
        """Decorator: a call of the function is refused with `RateLimitExceeded` when over limit.

        `key` and `cost` may be callables of the function's own arguments. Raises
        `ConfigurationError` for what can never work, when it is applied.
        """
        here = sys._getframe(1)
        check_arguments(key, cost, self.prefix, self.limits, here.f_lineno, here.f_code)

        def make(function: Any) -> Any:
            if is_awaiting(function) or is_async_generator(function):
                kind = "a coroutine function" if is_awaiting(function) else "an async generator"
                raise ConfigurationError(
                    f"{name_of(function)} is {kind}; use AsyncLimiter.limit, "
                    "as a blocking limiter would stop the event loop"
                )

            @functools.wraps(function)
            def limited(*args: Any, **kwargs: Any) -> Any:
                _demand(self.try_acquire(_of(key, args, kwargs), _of(cost, args, kwargs)))
                return function(*args, **kwargs)

            return limited

        return LimitDecorator(key, make)

    def entry(self, key: AnyKey, cost: int = 1) -> Entry:
        """`with limiter.entry(key) as entry:` acquires (or raises `RateLimitExceeded`), and when
        the block ends records success or error and the response time.
        """
        return Entry(
            functools.partial(self.try_acquire, key, cost), self._record, self._store.clock
        )

    def flush(self) -> None:
        """Tell the store now what was counted in this process; else that waits for `flush_interval`
        (or `sync_interval`) at the most. Raises where the store does not take it; it is kept then.
        """
        THREAD.wait_for(self._agent)
        _demand_told(complete_in_thread(functools.partial(self._work, False)))

    def close(self) -> None:
        """Give back and tell what is kept here, and close the connections. Later calls raise
        `ConfigurationError`; closing twice is fine.

        A store object that the caller made stays open, as it stays the caller's.
        """
        complete_in_thread(self._close)

    def _close(self) -> None:
        with self._agent.closing_lock, self._agent.being_closed():
            if not self._kept:
                self._near.close()  # first: what is counted after that, nobody would tell
                ends = self._store.clock.monotonic() + self._timeout
                for fetch in self._near.fetches():  # what they bring has to be given back
                    fetch.gate.wait(ends - self._store.clock.monotonic())
                self._near.wake = _nobody  # the worker would only be in the way
            THREAD.dismiss(self._agent)
            failure = self._work(True)
            if not self._kept:
                failure = self._work(True) or failure  # of calls that were just being decided
                self._store.close()
            if failure is not None:
                self._agent.went(failure)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        exc: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _ask_store(self, key: AnyKey, cost: int) -> Decision:
        """`near.ask` in the mode where a call is one attempt, without the detour."""
        sent_at = self._store.clock.monotonic()
        decision = self._store.attempt(self._book.acquire(key, cost))
        return decision if decision[0] else self._near.refused(decision[1], decision, sent_at)

    def _ask_near(self, key: AnyKey, cost: int) -> Decision:
        return self._run(self._near.ask(key, cost))

    def _record(self, decision: Decision, failed: bool, rt_ms: int) -> None:
        self._run(admin.record(self._near, decision, failed=failed, rt_ms=rt_ms))

    def _work(self, last: bool) -> DistwindowError | None:
        """However many exchanges that takes, each has a deadline of its own."""
        dialogue = work(self._near, self._store.clock.monotonic, last=last)
        execute = functools.partial(self._answer, None)
        return run(dialogue, execute, self._store.clock.sleep)

    def _run(self, dialogue: Dialogue[T], deadline: float | None = None) -> T:
        """The dialogue of one call, with one deadline for all that it asks for."""
        if deadline is None:
            deadline = self._store.clock.monotonic() + self._timeout
        execute = functools.partial(self._answer, deadline)
        return run(dialogue, execute, self._store.clock.sleep)

    def _answer(self, deadline: float | None, effect: Any) -> Any:
        if type(effect) is Acquire:
            return self._store.attempt(effect, deadline)
        if type(effect) is Together:
            return self._store.exchange(effect.commands, deadline)
        if type(effect) is Fetch:  # no reply comes late: its connection is closed
            return self._store.execute(effect.command, deadline)
        return self._store.execute(effect, deadline)


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
        sync_interval: float = 0.1,
        share: float | None = None,
        flush_interval: float = 0.25,
        max_local_keys: int = 100_000,
        handle_sigterm: bool = True,
        time: Clock = SYSTEM,
    ) -> None:
        super().__init__(limits, prefix, on_store_error, time, handle_sigterm)
        mode = Mode(
            consistency, clock, sync_interval, share, flush_interval, max_local_keys, timeout
        )
        self._store = open_async_store(store, timeout=timeout, clock=clock, name=name, time=time)
        self._kept = self._store is store or isinstance(store, MemoryStore)
        self._timeout = mode.timeout
        self._near = open_near(mode, self._book, self._store, inside(self._store))
        self._judge = self._near.judge
        self._agent = TASKS.serve(
            self._near,
            self._work,
            self._store.clock,
            name=f"limiter {prefix!r} at {store_name(store)}",
            handle_sigterm=handle_sigterm,
        )
        self._streak = 0
        """Calls in a row that did not have to wait for anything."""

    @property
    def unknown_total(self) -> int:
        """See `Limiter.unknown_total`."""
        return self._store.unknown_total

    async def try_acquire(self, key: AnyKey, cost: int = 1) -> Decision:
        """See `Limiter.try_acquire`."""
        decision = self._judge(key, cost)
        if decision is None:
            self._streak = 0
            return await self._run(self._near.ask(key, cost))
        self._streak += 1
        if self._streak >= _STREAK:  # a loop around calls like this would stop all other tasks
            self._streak = 0
            await asyncio.sleep(0)
        return decision

    async def try_acquire_all(self, items: Iterable[Sequence[Any]]) -> Decision:
        """See `Limiter.try_acquire_all`."""
        command = self._book.acquire_all(items)
        deadline = self._store.clock.monotonic() + self._timeout
        await self._run(admin.ahead(self._near, command.charges, self._store.clock), deadline)
        return await self._store.attempt(command, deadline)

    async def acquire(self, key: AnyKey, cost: int = 1, timeout: float | None = None) -> Decision:
        """See `Limiter.acquire`."""
        command = self._book.acquire(key, cost)
        attempt = functools.partial(self.try_acquire, key, cost)
        place = AsyncPlace(self._lines, command, _patience(timeout))
        try:
            await place.await_()
            return await arun(wait(command, place), lambda _: attempt(), self._store.sleep)
        finally:
            place.leave()

    async def peek(self, key: AnyKey) -> Decision:
        """See `Limiter.peek`."""
        charges = self._book.acquire(key).charges
        return await self._run(admin.peek(self._near, charges, self._store.source))

    async def stats(self, key: AnyKey) -> Stats:
        """See `Limiter.stats`."""
        charges = self._book.acquire(key).charges
        return await self._run(admin.stats(self._near, charges, self._store.clock))

    async def refund(self, decision: Decision) -> int:
        """See `Limiter.refund`."""
        return await self._run(admin.refund(self._near, decision, self._store.clock))

    async def reset(self, key: AnyKey) -> None:
        """See `Limiter.reset`."""
        await self._run(admin.reset(self._near, self._book.acquire(key).charges))

    def limit(
        self, key: AnyKey | Callable[..., AnyKey], *, cost: int | Callable[..., int] = 1
    ) -> Callable[[F], F]:
        """See `Limiter.limit`; for coroutine functions, and for asynchronous generators, whose
        first step is refused.
        """
        here = sys._getframe(1)
        check_arguments(key, cost, self.prefix, self.limits, here.f_lineno, here.f_code)

        async def admit(args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            _demand(await self.try_acquire(_of(key, args, kwargs), _of(cost, args, kwargs)))

        def make(function: Any) -> Any:
            if is_async_generator(function):
                return limited_generator(function, admit)
            if not is_awaiting(function):
                raise ConfigurationError(
                    f"{name_of(function)} is no coroutine function; use Limiter.limit"
                )

            @functools.wraps(function)
            async def limited(*args: Any, **kwargs: Any) -> Any:
                _demand(await self.try_acquire(_of(key, args, kwargs), _of(cost, args, kwargs)))
                return await function(*args, **kwargs)

            return limited

        return LimitDecorator(key, make)

    def entry(self, key: AnyKey, cost: int = 1) -> AsyncEntry:
        """See `Limiter.entry`; `async with`."""
        return AsyncEntry(
            functools.partial(self.try_acquire, key, cost), self._record, self._store.clock
        )

    async def flush(self) -> None:
        """See `Limiter.flush`."""
        await TASKS.wait_for(self._agent)
        _demand_told(await self._work(False))

    async def aclose(self) -> None:
        """See `Limiter.close`."""
        with self._agent.being_closed():
            if not self._kept:
                self._near.close()
                if self._near.leases:
                    await self._store.drain()  # a lease on its way has to be given back
                self._near.wake = _nobody
            await TASKS.dismiss(self._agent)
            failure = await self._work(True)
            if not self._kept:
                failure = await self._work(True) or failure
                await self._store.aclose()
            if failure is not None:
                self._agent.went(failure)

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
        await self._run(admin.record(self._near, decision, failed=failed, rt_ms=rt_ms))

    async def _work(self, last: bool) -> DistwindowError | None:
        """See `Limiter._work`."""
        dialogue = work(self._near, self._store.clock.monotonic, last=last)
        return await arun(dialogue, functools.partial(self._answer, None), self._store.sleep)

    def _run(self, dialogue: Dialogue[T], deadline: float | None = None) -> Awaitable[T]:
        """See `Limiter._run`."""
        if deadline is None:
            deadline = self._store.clock.monotonic() + self._timeout
        return arun(dialogue, functools.partial(self._answer, deadline), self._store.sleep)

    def _answer(self, deadline: float | None, effect: Any) -> Awaitable[Any]:
        if type(effect) is Acquire:
            return self._store.attempt(effect, deadline)
        if type(effect) is Together:
            return self._store.exchange(effect.commands, deadline)
        if type(effect) is Fetch:
            return self._store.execute(effect.command, deadline, effect.unclaimed)
        return self._store.execute(effect, deadline)


def _of(value: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """A decorator's key or cost for this call."""
    return value(*args, **kwargs) if callable(value) else value


def _nobody() -> None:
    """In the place of the worker's wake-up, once a limiter is closed."""


_STREAK = 64


def _demand_told(failure: DistwindowError | None) -> None:
    if failure is not None:
        raise failure


def _demand(decision: Decision) -> None:
    if not decision.allowed:
        raise RateLimitExceeded(decision)


def _patience(timeout: float | None) -> float | None:
    if timeout is None:
        return None
    if isinstance(timeout, bool) or not isinstance(timeout, (int, float)) or not timeout >= 0:
        raise ValueError(f"timeout={timeout!r} is not a number of seconds of at least 0, or None")
    return None if math.isinf(timeout) else float(timeout)
