"""`AsyncLimiter`, for tasks: the methods of `Limiter`, awaited where there is I/O."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable, Generator, Iterable, Sequence
from typing import Any

from .admission import AsyncAdmission
from .base_limiter import BaseLimiter, OnStoreError
from .breaker.entry import AsyncBreakerEntry, AsyncEntryBreaker, async_call_of
from .connect import ClockChoice, Consistency, LimiterOptions, in_process_attempt
from .core.async_use import Unawaited, UnawaitedCoroutine
from .core.clock import SYSTEM, Clock
from .core.decision import Decision
from .core.key import AnyKey
from .core.limit import LimitSpec
from .core.minute_view import MinuteStats
from .core.stats import Stats
from .decorator import DecoratorKey, F, check_decorator_cost, limit_async_function
from .entry import AsyncEntry
from .entry_options import check_max_origins, check_origin
from .failure_types import ErrorTypes, FailureTypes
from .lifecycle.base import ignore_wake
from .lifecycle.tasks import AsyncLifecycle
from .operations import key_operations, minute_views

_YIELD_EVERY = 64
"""Calls in a row that may return without letting other tasks run."""


class _Attempt(Unawaited[Decision]):
    """`try_acquire` without `priority` and `enqueue`, which begins when it is awaited."""

    __slots__ = ("_cost", "_key", "_limiter")

    def __init__(self, limiter: AsyncLimiter, key: AnyKey, cost: int) -> None:
        self._limiter = limiter
        self._key = key
        self._cost = cost

    def __await__(self) -> Generator[Any, Any, Decision]:
        limiter = self._limiter
        decision = limiter._decide_locally(self._key, self._cost)
        if decision is None:
            return (yield from limiter._acquire_remote(self._key, self._cost).__await__())
        limiter._calls_without_wait += 1
        if limiter._calls_without_wait >= _YIELD_EVERY:
            # Let other tasks run: a loop of calls that are decided here would stop them all.
            limiter._calls_without_wait = 0
            yield
        return decision


class AsyncLimiter(BaseLimiter, AsyncLifecycle):
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
        max_wait: float = 0.5,
        borrow_share: float = 0.5,
        errors: ErrorTypes = BaseException,
        ignore: ErrorTypes = (),
        max_origins: int = 100,
        time: Clock = SYSTEM,
    ) -> None:
        super().__init__(limits, prefix, on_store_error, time, store, consistency)
        self._failure_types = FailureTypes(errors, ignore)
        check_max_origins(max_origins)
        options = LimiterOptions(
            consistency, clock, sync_interval, share, flush_interval, max_local_keys, timeout,
            max_wait, borrow_share,
        )  # fmt: skip
        self._open_store(store, timeout, clock, name, time)
        self._monotonic = self._store.clock.monotonic
        self._open_strategy(options, self._store, in_process_attempt(self._store), max_origins)
        self._decide_locally = self._strategy.decide_locally
        self._admission = AsyncAdmission(
            self._command_cache, self._wait_queues, self._borrowing, self._turns, self.try_acquire,
            functools.partial(self._execute_step, None), self._store.sleep,
            self._store.clock,
        )  # fmt: skip
        self._admit = self._admission.admit
        self._add_flush_job(self._strategy, self._name)
        self._calls_without_wait = 0
        """How many calls in a row have returned without awaiting anything."""

    @property
    def unknown_total(self) -> int:
        """See `Limiter.unknown_total`."""
        return self._store.unknown_total

    def try_acquire(
        self, key: AnyKey, cost: int = 1, priority: bool = False, enqueue: bool = False
    ) -> Unawaited[Decision]:
        """See `Limiter.try_acquire`; it has no truth value before it is awaited."""
        if priority or enqueue:
            return UnawaitedCoroutine(self._try_special(key, cost, priority, enqueue))
        return _Attempt(self, key, cost)

    async def _try_special(self, key: AnyKey, cost: int, priority: bool, enqueue: bool) -> Decision:
        decision = await self._run(self._special_attempt(key, cost, priority, enqueue))
        if decision.source != "store":
            self._calls_without_wait += 1
            if self._calls_without_wait >= _YIELD_EVERY:
                self._calls_without_wait = 0
                await asyncio.sleep(0)
        return decision

    async def _acquire_remote(self, key: AnyKey, cost: int) -> Decision:
        """Return the decision that takes the store, after `decide_locally` has returned None."""
        self._calls_without_wait = 0
        sent_at = self._monotonic()
        command = self._strategy.store_command(key, cost)
        if command is None:
            return await self._run(self._strategy.acquire_remote(key, cost))
        # The same as `acquire_remote`, without a generator and its driver.
        decision = await self._store.attempt(command)
        return (
            decision
            if decision[0]
            else self._strategy.cache_refusal(decision[1], decision, sent_at)
        )

    def try_acquire_all(self, items: Iterable[Sequence[Any]]) -> Unawaited[Decision]:
        """See `Limiter.try_acquire_all`; it has no truth value before it is awaited."""
        return UnawaitedCoroutine(self._try_acquire_all(items))

    async def _try_acquire_all(self, items: Iterable[Sequence[Any]]) -> Decision:
        command = self._command_cache.acquire_all_command(items)
        deadline = self._store.clock.monotonic() + self._timeout
        await self._run(
            key_operations.before_multi_key(self._strategy, command.charges, self._store.clock),
            deadline,
        )
        return await self._store.attempt(command, deadline)

    async def acquire(
        self, key: AnyKey, cost: int = 1, timeout: float | None = None, priority: bool = False
    ) -> Decision:
        """See `Limiter.acquire`."""
        return await self._admission.acquire(key, cost, timeout, priority)

    def peek(self, key: AnyKey) -> Unawaited[Decision]:
        """See `Limiter.peek`; it has no truth value before it is awaited."""
        return UnawaitedCoroutine(self._peek(key, 1))

    async def _peek(self, key: AnyKey, cost: int) -> Decision:
        charges = self._command_cache.acquire_command(key, cost).charges
        return await self._run(key_operations.peek(self._strategy, charges, self._store.source))

    async def stats(self, key: AnyKey) -> Stats:
        """See `Limiter.stats`."""
        charges = self._command_cache.acquire_command(key).charges
        return await self._run(key_operations.stats(self._strategy, charges, self._store.clock))

    async def minute(self, key: AnyKey) -> MinuteStats:
        """See `Limiter.minute`."""
        return await self._run(
            minute_views.minute(self._views, self.prefix, key, self._store.clock)
        )

    async def origins(self, key: AnyKey) -> dict[str, MinuteStats]:
        """See `Limiter.origins`."""
        return await self._run(
            minute_views.origins(self._views, self.prefix, key, self._store.clock)
        )

    async def refund(self, decision: Decision) -> int:
        """See `Limiter.refund`."""
        count = await self._run(key_operations.refund(self._strategy, decision, self._store.clock))
        if count and decision.charged:
            self._wait_queues.on_freed(decision.charged)
        return count

    async def reset(self, key: AnyKey) -> None:
        """See `Limiter.reset`."""
        charges = self._command_cache.acquire_command(key).charges
        await self._run(key_operations.reset(self._strategy, charges))
        self._wait_queues.on_freed(charges)

    def limit(
        self,
        text: AnyKey | None = None,
        *,
        key: AnyKey | Callable[..., AnyKey] | None = None,
        cost: int | Callable[..., int] = 1,
    ) -> Callable[[F], F]:
        """See `Limiter.limit`; for coroutine functions, and for asynchronous generators, whose
        first step is refused.
        """
        source = DecoratorKey("limiter.limit", self.prefix, text, key)
        check_decorator_cost(cost, self.limits)
        return functools.partial(limit_async_function, self._admit, source, cost)

    def entry(
        self,
        key: AnyKey,
        cost: int = 1,
        *,
        origin: str | None = None,
        errors: ErrorTypes | None = None,
        ignore: ErrorTypes | None = None,
        any_thread: bool = False,
        breaker: AsyncEntryBreaker | None = None,
    ) -> AsyncEntry:
        """See `Limiter.entry`; `async with`."""
        origin = check_origin(origin)
        if origin:
            minute_views.require_views(self._views)
        arguments = (
            functools.partial(self._admit, key, cost),
            self._record,
            self._entry_settings,
            self._failure_types.changed(errors, ignore),
            origin,
            any_thread,
        )
        if breaker is not None:
            return AsyncBreakerEntry(async_call_of(breaker, key), *arguments)
        return AsyncEntry(*arguments)

    async def _end_calls(self) -> None:
        if self._owns_store:
            self._strategy.close()
            if self._strategy.uses_leases:
                # Leases that are being fetched arrive first, so that they are given back, too.
                await self._store.drain()
            self._strategy.wake = ignore_wake

    async def _record(self, decision: Decision, failed: bool, rt_ms: int) -> None:
        recording = key_operations.record(self._strategy, decision, failed, rt_ms)
        if recording is not None:
            await self._run(recording)
