"""`AsyncLimiter`, for tasks: the methods of `Limiter`, awaited where there is I/O."""

from __future__ import annotations

import asyncio
import functools
import sys
from collections.abc import Awaitable, Callable, Iterable, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, TypeVar

from .base_limiter import (
    BaseLimiter,
    OnStoreError,
    check_timeout,
    ignore_wake,
    raise_failure,
)
from .breaker.entry import AsyncBreakerEntry, AsyncEntryBreaker, async_call_of
from .connect import (
    ClockChoice,
    Consistency,
    LimiterOptions,
    in_process_attempt,
    make_strategy,
    make_views,
    open_async_store,
)
from .core.clock import SYSTEM, Clock
from .core.decision import Decision
from .core.errors import DistwindowError
from .core.key import AnyKey
from .core.limit import LimitSpec
from .core.minute_view import MinuteStats
from .core.stats import Stats
from .decorator import F, LimitDecorator, check_arguments, limit_async_function, requires_key
from .entry import AsyncEntry, EntrySettings
from .entry_options import CountedErrors, ErrorTypes, check_max_origins, check_origin
from .operations import key_operations, minute_views
from .operations.acquire import wait_until_admitted
from .operations.borrow import Borrowing, PriorityCall
from .operations.drivers import run_async
from .operations.flush import flush_due
from .operations.paced_acquire import wait_until_paced
from .operations.steps import Fetch, Operation, Pipeline
from .operations.wait_queue import AsyncQueueSlot
from .protocol.commands import Acquire
from .protocol.frames import Command
from .protocol.shaped_commands import AcquireShaped, any_shaped
from .store.memory import MemoryStore
from .worker import TASK_WORKER

if TYPE_CHECKING:
    from typing_extensions import Self

T = TypeVar("T")

_YIELD_EVERY = 64
"""Calls in a row that may return without letting other tasks run."""


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
        max_wait: float = 0.5,
        borrow_share: float = 0.5,
        errors: ErrorTypes = BaseException,
        ignore: ErrorTypes = (),
        max_origins: int = 100,
        time: Clock = SYSTEM,
    ) -> None:
        super().__init__(limits, prefix, on_store_error, time, handle_sigterm, store, consistency)
        self._counted_errors = CountedErrors(errors, ignore)
        check_max_origins(max_origins)
        options = LimiterOptions(
            consistency, clock, sync_interval, share, flush_interval, max_local_keys, timeout,
            max_wait, borrow_share,
        )  # fmt: skip
        self._store = open_async_store(store, timeout=timeout, clock=clock, name=name, time=time)
        self._owns_store = self._store is not store and not isinstance(store, MemoryStore)
        self._monotonic = self._store.clock.monotonic
        self._timeout = options.timeout
        self._strategy = make_strategy(
            options, self._command_cache, self._store, in_process_attempt(self._store)
        )
        self._borrowing = Borrowing(
            self._command_cache, self._strategy, self._store.source, options.max_wait,
            options.borrow_share,
        )  # fmt: skip
        self._views = make_views(self._strategy, prefix, max_origins, self._store)
        self._flush_job = TASK_WORKER.add_limiter(
            self._strategy,
            self._flush_now,
            self._store.clock,
            name=f"limiter {prefix!r} at {self._store_name}",
            handle_sigterm=handle_sigterm,
        )
        self._entry_settings = EntrySettings(self._views, self._store.clock, self._flush_job.name)
        self._calls_without_wait = 0
        """How many calls in a row have returned without awaiting anything."""

    @property
    def unknown_total(self) -> int:
        """See `Limiter.unknown_total`."""
        return self._store.unknown_total

    async def try_acquire(self, key: AnyKey, cost: int = 1, priority: bool = False) -> Decision:
        """See `Limiter.try_acquire`."""
        decision: Decision | None
        if priority:
            decision = await self._run(self._borrowing.call(key, cost, priority).attempt())
            if decision.source == "store":
                return decision
        else:
            decision = self._strategy.decide_locally(key, cost)
        if decision is None:
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
        self._calls_without_wait += 1
        if self._calls_without_wait >= _YIELD_EVERY:
            # Let other tasks run: a loop of calls that are decided here would stop them all.
            self._calls_without_wait = 0
            await asyncio.sleep(0)
        return decision

    async def try_acquire_all(self, items: Iterable[Sequence[Any]]) -> Decision:
        """See `Limiter.try_acquire_all`."""
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
        if priority:
            call = self._borrowing.call(key, cost, priority)
            return await self._acquire_with_priority(call, timeout)
        command = self._command_cache.acquire_command(key, cost)
        attempt = functools.partial(self.try_acquire, key, cost)
        slot = AsyncQueueSlot(self._wait_queues, command, check_timeout(timeout))
        try:
            await slot.wait_async()
            if isinstance(command, AcquireShaped):
                execute = functools.partial(self._execute_step, None)
                return await run_async(wait_until_paced(command, slot), execute, self._store.sleep)
            return await run_async(
                wait_until_admitted(command, slot), lambda _: attempt(), self._store.sleep
            )
        finally:
            slot.leave()

    async def peek(self, key: AnyKey) -> Decision:
        """See `Limiter.peek`."""
        return await self._peek(key, 1)

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
        return await self._run(key_operations.refund(self._strategy, decision, self._store.clock))

    async def reset(self, key: AnyKey) -> None:
        """See `Limiter.reset`."""
        await self._run(
            key_operations.reset(self._strategy, self._command_cache.acquire_command(key).charges)
        )

    @requires_key
    def limit(
        self, key: AnyKey | Callable[..., AnyKey], *, cost: int | Callable[..., int] = 1
    ) -> Callable[[F], F]:
        """See `Limiter.limit`; for coroutine functions, and for asynchronous generators, whose
        first step is refused.
        """
        here = sys._getframe(2)  # above `requires_key`
        check_arguments(key, cost, self.prefix, self.limits, here.f_lineno, here.f_code)
        return LimitDecorator(
            key, functools.partial(limit_async_function, self._admission, key, cost)
        )

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
            functools.partial(self._admission, key, cost),
            self._record,
            self._entry_settings,
            self._counted_errors.changed(errors, ignore),
            origin,
            any_thread,
        )
        if breaker is not None:
            return AsyncBreakerEntry(async_call_of(breaker, key), *arguments)
        return AsyncEntry(*arguments)

    async def flush(self) -> None:
        """See `Limiter.flush`."""
        await TASK_WORKER.wait_for(self._flush_job)
        raise_failure(await self._flush_now(False))

    async def aclose(self) -> None:
        """See `Limiter.close`. If it is cancelled, it goes on to its end before `CancelledError` is
        raised.
        """
        closing = asyncio.ensure_future(self._close())
        try:
            await asyncio.shield(closing)
        except asyncio.CancelledError:
            await asyncio.wait([closing])  # each of its exchanges has a deadline
            raise

    async def _close(self) -> None:
        try:
            await self._flush_and_close()
        except BaseException:
            # The loop is shutting down, and has cancelled this task, too (`CancelledError`). The
            # flush at exit sends what is left.
            self._flush_job.detached = False
            raise

    async def _flush_and_close(self) -> None:
        with self._flush_job.being_closed():
            if self._owns_store:
                self._strategy.close()
                if self._strategy.uses_leases:
                    # Leases that are being fetched arrive first, so that they are given back, too.
                    await self._store.drain()
                self._strategy.wake = ignore_wake
            await TASK_WORKER.detach(self._flush_job)
            failure = await self._flush_now(True)
            if self._owns_store:
                failure = await self._flush_now(True) or failure
                await self._store.aclose()
            self._flush_job.record_close(failure)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        exc: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.aclose()

    async def _acquire_with_priority(self, call: PriorityCall, timeout: float | None) -> Decision:
        """See `Limiter._acquire_with_priority`."""
        sleep = self._store.sleep
        slot = AsyncQueueSlot(
            self._wait_queues, call.acquire, check_timeout(timeout), priority=True
        )
        try:
            await slot.wait_async()
            decision = await run_async(
                call.attempt_until_admitted(slot),
                functools.partial(self._execute_step, None),
                sleep,
            )
        finally:
            slot.leave()
        if decision.wait:
            await sleep(decision.wait)
        return decision

    @property
    def _admission(self) -> Callable[[AnyKey, int], Awaitable[Decision]]:
        """See `Limiter._admission`."""
        return self._paced_admission if any_shaped(self.limits) else self.try_acquire

    async def _paced_admission(self, key: AnyKey, cost: int) -> Decision:
        """See `Limiter._paced_admission`."""
        decision = await self.try_acquire(key, cost)
        if decision.wait:
            await self._store.sleep(decision.wait)
        return decision

    async def _record(self, decision: Decision, failed: bool, rt_ms: int) -> None:
        recording = key_operations.record(self._strategy, decision, failed, rt_ms)
        if recording is not None:
            await self._run(recording)

    async def _flush_now(self, everything: bool) -> DistwindowError | None:
        """See `Limiter._flush_now`."""
        operation = flush_due(self._strategy, self._store.clock.monotonic, everything=everything)
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

    def _execute_step(
        self, deadline: float | None, step: Command[Any] | Fetch | Pipeline
    ) -> Awaitable[Any]:
        if isinstance(step, Acquire):
            return self._store.attempt(step, deadline)
        if isinstance(step, Pipeline):
            return self._store.exchange(step.commands, deadline)
        if isinstance(step, Fetch):
            return self._store.execute(step.command, deadline, step.on_late_reply)
        return self._store.execute(step, deadline)
