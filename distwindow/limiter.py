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
from typing import TYPE_CHECKING, Any, Literal, NoReturn, TypeVar

from ._fork import register_after_fork
from .connect import (
    ClockChoice,
    Consistency,
    LimiterOptions,
    in_process_attempt,
    make_strategy,
    open_async_store,
    open_store,
    store_name,
)
from .core.clock import SYSTEM, Clock, check_clock
from .core.decision import Decision
from .core.errors import ConfigurationError, DistwindowError, RateLimitExceeded
from .core.interrupts import check_patched_before_import, complete_in_thread
from .core.key import AnyKey
from .core.limit import Limit, LimitSpec
from .core.stats import Stats
from .decorator import (
    LimitDecorator,
    check_arguments,
    described,
    is_async_generator,
    is_awaiting,
    limited_generator,
    requires_key,
)
from .entry import AsyncEntry, Entry
from .operations import key_operations as admin
from .operations.acquire import wait_until_admitted
from .operations.command_cache import CommandCache
from .operations.drivers import run_async, run_blocking
from .operations.flush import flush_due
from .operations.steps import Fetch, Operation, Pipeline
from .operations.wait_queue import AsyncQueueSlot, QueueSlot, WaitQueues
from .protocol.commands import Acquire
from .store.memory import MemoryStore
from .worker import TASKS, THREAD

if TYPE_CHECKING:
    from typing_extensions import Self

T = TypeVar("T")
F = TypeVar("F", bound=Callable[..., Any])

OnStoreError = Literal["raise"]


class BaseLimiter:
    """What both faces are made of. Arguments are theirs."""

    def __init__(
        self,
        limits: LimitSpec,
        prefix: str,
        on_store_error: str,
        time: Clock,
        handle_sigterm: bool,
        store: Any,
        consistency: Consistency,
    ) -> None:
        if on_store_error != "raise":
            raise ConfigurationError(
                f'on_store_error={on_store_error!r}: this version has "raise" only'
            )
        if not isinstance(handle_sigterm, bool):
            raise ConfigurationError(f"handle_sigterm={handle_sigterm!r} is neither True nor False")
        self._command_cache = CommandCache(prefix, limits)
        self._wait_queues = register_after_fork(WaitQueues(check_clock(time)))
        self._consistency = consistency
        self._store_name = store_name(store)

    def __repr__(self) -> str:
        limits = "; ".join(map(str, self.limits))
        return (
            f"{type(self).__name__}({self._store_name!r}, {limits!r}, prefix={self.prefix!r}, "
            f"consistency={self._consistency!r})"
        )

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        """For `pickle` and `copy`."""
        raise TypeError(
            f"{type(self).__name__} cannot be pickled or copied, as it holds connections, locks "
            "and counts; make one in each process (at the top of a module, or first thing in the "
            "child): all with the same store, prefix and limits share their windows"
        )

    @property
    def limits(self) -> tuple[Limit, ...]:
        """The limits, shortest interval first."""
        return self._command_cache.limits

    @property
    def prefix(self) -> str:
        """What the names of all rings begin with."""
        return self._command_cache.prefix


class Limiter(BaseLimiter):
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
        super().__init__(limits, prefix, on_store_error, time, handle_sigterm, store, consistency)
        options = LimiterOptions(
            consistency, clock, sync_interval, share, flush_interval, max_local_keys, timeout
        )
        self._store = open_store(store, timeout=timeout, clock=clock, name=name, time=time)
        self._store_is_callers = self._store is store
        self._timeout = options.timeout
        self._strategy = make_strategy(
            options, self._command_cache, self._store, self._store.attempt
        )
        self._decide_locally = self._strategy.decide_locally
        self._acquire_remote = (
            self._acquire_from_store if options.direct else self._acquire_by_strategy
        )
        self._flush_job = THREAD.add(
            self._strategy,
            self._flush_now,
            self._store.clock,
            name=f"limiter {prefix!r} at {self._store_name}",
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
        decision = self._decide_locally(key, cost)
        return self._acquire_remote(key, cost) if decision is None else decision

    def try_acquire_all(self, items: Iterable[Sequence[Any]]) -> Decision:
        """Over several keys, each with its own limits: `[(key, limits, cost), ...]`; all or none.

        One round trip; the decision names the key and the limit that refused. On a cluster the
        keys need a common tag (`Key(resource, tag=...)`); `ConfigurationError` says so.
        """
        command = self._command_cache.acquire_all(items)
        deadline = self._store.clock.monotonic() + self._timeout
        self._run(
            admin.before_multi_key(self._strategy, command.charges, self._store.clock), deadline
        )
        return self._store.attempt(command, deadline)

    def acquire(self, key: AnyKey, cost: int = 1, timeout: float | None = None) -> Decision:
        """`try_acquire` that waits for its turn: in line behind the earlier waiters of this
        process, then asleep until the exact moment of its permits.

        Raises `RateLimitExceeded` once it is certain that `timeout` (seconds; None: endless) ends
        before that.
        """
        command = self._command_cache.acquire(key, cost)
        attempt = functools.partial(self.try_acquire, key, cost)
        slot = QueueSlot(self._wait_queues, command, _check_timeout(timeout))
        try:
            slot.wait()
            return run_blocking(
                wait_until_admitted(command, slot), lambda _: attempt(), self._store.clock.sleep
            )
        finally:
            try:
                slot.leave()
            finally:
                slot.leave()  # a signal handler may have raised in the first

    def peek(self, key: AnyKey) -> Decision:
        """The decision a cost of 1 would get now; counts nothing, so `remaining` is before it."""
        charges = self._command_cache.acquire(key).charges
        return self._run(admin.peek(self._strategy, charges, self._store.source))

    def stats(self, key: AnyKey) -> Stats:
        """What the live windows of `key` have recorded."""
        charges = self._command_cache.acquire(key).charges
        return self._run(admin.stats(self._strategy, charges, self._store.clock))

    def refund(self, decision: Decision) -> int:
        """Give an admitted cost back, in its own bucket; how many permits were still there.

        Not idempotent: two refunds of one decision give back twice. Raises `ValueError` for a
        decision that charged nothing.
        """
        return self._run(admin.refund(self._strategy, decision, self._store.clock))

    def reset(self, key: AnyKey) -> None:
        """Forget the windows of `key`: everything is free again."""
        self._run(admin.reset(self._strategy, self._command_cache.acquire(key).charges))

    @requires_key
    def limit(
        self, key: AnyKey | Callable[..., AnyKey], *, cost: int | Callable[..., int] = 1
    ) -> Callable[[F], F]:
        """Decorator: a call of the function is refused with `RateLimitExceeded` when over limit.

        `key` and `cost` may be callables of the function's own arguments. Raises
        `ConfigurationError` for what can never work, when it is applied.
        """
        here = sys._getframe(2)  # above `requires_key`
        check_arguments(key, cost, self.prefix, self.limits, here.f_lineno, here.f_code)

        def make(function: Any) -> Any:
            if is_awaiting(function) or is_async_generator(function):
                raise ConfigurationError(
                    f"{described(function)}; use AsyncLimiter.limit, "
                    "as a blocking limiter would stop the event loop"
                )

            @functools.wraps(function)
            def limited(*args: Any, **kwargs: Any) -> Any:
                _raise_if_refused(
                    self.try_acquire(_resolve(key, args, kwargs), _resolve(cost, args, kwargs))
                )
                return function(*args, **kwargs)

            return limited

        return LimitDecorator(key, make)

    def entry(self, key: AnyKey, cost: int = 1) -> Entry:
        """`with limiter.entry(key) as entry:` acquires (or raises `RateLimitExceeded`), and when
        the block ends records success or error and the response time.
        """
        return Entry(
            functools.partial(self.try_acquire, key, cost),
            self._record,
            self._store.clock,
            self._flush_job.name,
        )

    def flush(self) -> None:
        """Tell the store now what was counted in this process; else that waits for `flush_interval`
        (or `sync_interval`) at the most. Raises where the store does not take it; it is kept then.
        """
        THREAD.wait_for(self._flush_job)
        _raise_failure(complete_in_thread(functools.partial(self._flush_now, False)))

    def close(self) -> None:
        """Give back and tell what is kept here, and close the connections. Later calls raise
        `ConfigurationError`; closing twice is fine.

        A store object that the caller made stays open, as it stays the caller's.
        """
        complete_in_thread(self._close)

    def _close(self) -> None:
        with self._flush_job.closing_lock, self._flush_job.being_closed():
            if not self._store_is_callers:
                self._strategy.close()  # first: what is counted after that, nobody would tell
                ends = self._store.clock.monotonic() + self._timeout
                for fetch in self._strategy.lease_fetches():  # what they bring has to be given back
                    fetch.completion.wait(ends - self._store.clock.monotonic())
                self._strategy.wake = _no_worker  # the worker would only be in the way
            THREAD.detach(self._flush_job)
            failure = self._flush_now(True)
            if not self._store_is_callers:
                failure = self._flush_now(True) or failure  # of calls that were just being decided
                self._store.close()
            self._flush_job.closed(failure)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        exc: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _acquire_from_store(self, key: AnyKey, cost: int) -> Decision:
        """`near.ask` in the mode where a call is one attempt, without the detour."""
        sent_at = self._store.clock.monotonic()
        decision = self._store.attempt(self._command_cache.acquire(key, cost))
        return (
            decision
            if decision[0]
            else self._strategy.remember_refusal(decision[1], decision, sent_at)
        )

    def _acquire_by_strategy(self, key: AnyKey, cost: int) -> Decision:
        return self._run(self._strategy.acquire_remote(key, cost))

    def _record(self, decision: Decision, failed: bool, rt_ms: int) -> None:
        self._run(admin.record(self._strategy, decision, failed=failed, rt_ms=rt_ms))

    def _flush_now(self, last: bool) -> DistwindowError | None:
        """However many exchanges that takes, each has a deadline of its own."""
        operation = flush_due(self._strategy, self._store.clock.monotonic, last=last)
        execute = functools.partial(self._execute_step, None)
        return run_blocking(operation, execute, self._store.clock.sleep)

    def _run(self, operation: Operation[T], deadline: float | None = None) -> T:
        """The dialogue of one call, with one deadline for all that it asks for."""
        if deadline is None:
            deadline = self._store.clock.monotonic() + self._timeout
        execute = functools.partial(self._execute_step, deadline)
        return run_blocking(operation, execute, self._store.clock.sleep)

    def _execute_step(self, deadline: float | None, step: Any) -> Any:
        if type(step) is Acquire:
            return self._store.attempt(step, deadline)
        if type(step) is Pipeline:
            return self._store.exchange(step.commands, deadline)
        if type(step) is Fetch:  # no reply comes late: its connection is closed
            return self._store.execute(step.command, deadline)
        return self._store.execute(step, deadline)


class AsyncLimiter(BaseLimiter):
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
        super().__init__(limits, prefix, on_store_error, time, handle_sigterm, store, consistency)
        options = LimiterOptions(
            consistency, clock, sync_interval, share, flush_interval, max_local_keys, timeout
        )
        self._store = open_async_store(store, timeout=timeout, clock=clock, name=name, time=time)
        self._store_is_callers = self._store is store or isinstance(store, MemoryStore)
        self._timeout = options.timeout
        self._strategy = make_strategy(
            options, self._command_cache, self._store, in_process_attempt(self._store)
        )
        self._decide_locally = self._strategy.decide_locally
        self._flush_job = TASKS.add(
            self._strategy,
            self._flush_now,
            self._store.clock,
            name=f"limiter {prefix!r} at {self._store_name}",
            handle_sigterm=handle_sigterm,
        )
        self._calls_without_wait = 0
        """Calls in a row that did not have to wait for anything."""

    @property
    def unknown_total(self) -> int:
        """See `Limiter.unknown_total`."""
        return self._store.unknown_total

    async def try_acquire(self, key: AnyKey, cost: int = 1) -> Decision:
        """See `Limiter.try_acquire`."""
        decision = self._decide_locally(key, cost)
        if decision is None:
            self._calls_without_wait = 0
            return await self._run(self._strategy.acquire_remote(key, cost))
        self._calls_without_wait += 1
        if (
            self._calls_without_wait >= _YIELD_EVERY
        ):  # a loop around calls like this would stop all other tasks
            self._calls_without_wait = 0
            await asyncio.sleep(0)
        return decision

    async def try_acquire_all(self, items: Iterable[Sequence[Any]]) -> Decision:
        """See `Limiter.try_acquire_all`."""
        command = self._command_cache.acquire_all(items)
        deadline = self._store.clock.monotonic() + self._timeout
        await self._run(
            admin.before_multi_key(self._strategy, command.charges, self._store.clock), deadline
        )
        return await self._store.attempt(command, deadline)

    async def acquire(self, key: AnyKey, cost: int = 1, timeout: float | None = None) -> Decision:
        """See `Limiter.acquire`."""
        command = self._command_cache.acquire(key, cost)
        attempt = functools.partial(self.try_acquire, key, cost)
        slot = AsyncQueueSlot(self._wait_queues, command, _check_timeout(timeout))
        try:
            await slot.wait_async()
            return await run_async(
                wait_until_admitted(command, slot), lambda _: attempt(), self._store.sleep
            )
        finally:
            slot.leave()

    async def peek(self, key: AnyKey) -> Decision:
        """See `Limiter.peek`."""
        charges = self._command_cache.acquire(key).charges
        return await self._run(admin.peek(self._strategy, charges, self._store.source))

    async def stats(self, key: AnyKey) -> Stats:
        """See `Limiter.stats`."""
        charges = self._command_cache.acquire(key).charges
        return await self._run(admin.stats(self._strategy, charges, self._store.clock))

    async def refund(self, decision: Decision) -> int:
        """See `Limiter.refund`."""
        return await self._run(admin.refund(self._strategy, decision, self._store.clock))

    async def reset(self, key: AnyKey) -> None:
        """See `Limiter.reset`."""
        await self._run(admin.reset(self._strategy, self._command_cache.acquire(key).charges))

    @requires_key
    def limit(
        self, key: AnyKey | Callable[..., AnyKey], *, cost: int | Callable[..., int] = 1
    ) -> Callable[[F], F]:
        """See `Limiter.limit`; for coroutine functions, and for asynchronous generators, whose
        first step is refused.
        """
        here = sys._getframe(2)  # above `requires_key`
        check_arguments(key, cost, self.prefix, self.limits, here.f_lineno, here.f_code)

        async def admit(args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            _raise_if_refused(
                await self.try_acquire(_resolve(key, args, kwargs), _resolve(cost, args, kwargs))
            )

        def make(function: Any) -> Any:
            if is_async_generator(function):
                return limited_generator(function, admit)
            if not is_awaiting(function):
                raise ConfigurationError(f"{described(function)}; use Limiter.limit")

            @functools.wraps(function)
            async def limited(*args: Any, **kwargs: Any) -> Any:
                _raise_if_refused(
                    await self.try_acquire(
                        _resolve(key, args, kwargs), _resolve(cost, args, kwargs)
                    )
                )
                return await function(*args, **kwargs)

            return limited

        return LimitDecorator(key, make)

    def entry(self, key: AnyKey, cost: int = 1) -> AsyncEntry:
        """See `Limiter.entry`; `async with`."""
        return AsyncEntry(
            functools.partial(self.try_acquire, key, cost),
            self._record,
            self._store.clock,
            self._flush_job.name,
        )

    async def flush(self) -> None:
        """See `Limiter.flush`."""
        await TASKS.wait_for(self._flush_job)
        _raise_failure(await self._flush_now(False))

    async def aclose(self) -> None:
        """See `Limiter.close`."""
        with self._flush_job.being_closed():
            if not self._store_is_callers:
                self._strategy.close()
                if self._strategy.leases:
                    await self._store.drain()  # a lease on its way has to be given back
                self._strategy.wake = _no_worker
            await TASKS.detach(self._flush_job)
            failure = await self._flush_now(True)
            if not self._store_is_callers:
                failure = await self._flush_now(True) or failure
                await self._store.aclose()
            self._flush_job.closed(failure)

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
        await self._run(admin.record(self._strategy, decision, failed=failed, rt_ms=rt_ms))

    async def _flush_now(self, last: bool) -> DistwindowError | None:
        """See `Limiter._work`."""
        operation = flush_due(self._strategy, self._store.clock.monotonic, last=last)
        return await run_async(
            operation, functools.partial(self._execute_step, None), self._store.sleep
        )

    def _run(self, operation: Operation[T], deadline: float | None = None) -> Awaitable[T]:
        """See `Limiter._run`."""
        if deadline is None:
            deadline = self._store.clock.monotonic() + self._timeout
        return run_async(
            operation, functools.partial(self._execute_step, deadline), self._store.sleep
        )

    def _execute_step(self, deadline: float | None, step: Any) -> Awaitable[Any]:
        if type(step) is Acquire:
            return self._store.attempt(step, deadline)
        if type(step) is Pipeline:
            return self._store.exchange(step.commands, deadline)
        if type(step) is Fetch:
            return self._store.execute(step.command, deadline, step.on_late_reply)
        return self._store.execute(step, deadline)


def _resolve(value: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """A decorator's key or cost for this call."""
    return value(*args, **kwargs) if callable(value) else value


def _no_worker() -> None:
    """In the place of the worker's wake-up, once a limiter is closed."""


_YIELD_EVERY = 64


def _raise_failure(failure: DistwindowError | None) -> None:
    if failure is not None:
        raise failure


def _raise_if_refused(decision: Decision) -> None:
    if not decision.allowed:
        raise RateLimitExceeded(decision)


def _check_timeout(timeout: float | None) -> float | None:
    if timeout is None:
        return None
    if isinstance(timeout, bool) or not isinstance(timeout, (int, float)) or not timeout >= 0:
        raise ValueError(f"timeout={timeout!r} is not a number of seconds of at least 0, or None")
    return None if math.isinf(timeout) else float(timeout)
