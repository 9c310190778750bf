"""What breakers for tasks do: the methods of `BlockingBreaker`, awaited where there is I/O."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Awaitable, Callable
from types import TracebackType
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from ..base_limiter import ignore_wake, raise_failure
from ..connect import open_async_store
from ..consistency.breaker_source import BreakerSource, FollowedBreaker, SourceOptions
from ..core.errors import DistwindowError
from ..core.key import AnyKey
from ..operations.breaker import admit, send_state
from ..operations.drivers import run_async
from ..operations.flush import flush_due
from ..operations.steps import Operation, Pipeline
from ..store.memory import MemoryStore
from ..worker import TASK_WORKER
from ..worker.flush_job import FlushJob
from .base import BaseBreaker, BreakerOptions, source_options
from .call import AsyncCall
from .protect import F, ProtectDecorator, protect_async_function

if TYPE_CHECKING:
    from typing_extensions import Self

T = TypeVar("T")
S = TypeVar("S", bound=FollowedBreaker)
A = TypeVar("A")


class AwaitedBreaker(BaseBreaker, Generic[S, A]):
    """A breaker for tasks."""

    def __init__(self, store: Any, options: BreakerOptions, name: str | None) -> None:
        super().__init__(store, options)
        self._store = open_async_store(
            store, timeout=options.timeout, clock=options.clock, name=name, time=options.time
        )
        self._owns_store = self._store is not store and not isinstance(store, MemoryStore)
        self._states = self._open_states(
            source_options(options, self._store.clock, self._store.source)
        )
        if self._states.in_process:
            self._flush_job = FlushJob(self._states, self._flush_now, self._name)
        else:
            self._flush_job = TASK_WORKER.add_limiter(
                self._states,
                self._flush_now,
                self._store.clock,
                name=self._name,
                handle_sigterm=options.handle_sigterm,
            )

    def _open_states(self, options: SourceOptions) -> BreakerSource[S, A]:
        """Return what this breaker knows and counts in this process."""
        raise NotImplementedError  # each kind of breaker has its own

    def call(self, key: AnyKey) -> AsyncCall[A]:
        """See `CircuitBreaker.call`; `async with`."""
        admit = functools.partial(self._admit, key)
        return AsyncCall(self._failure_types, admit, self._finish, self._states.restarted)

    def protect(
        self, key: AnyKey | Callable[..., AnyKey], *, fallback: Callable[..., Any] | None = None
    ) -> Callable[[F], F]:
        """See `CircuitBreaker.protect`; for coroutine functions. `fallback` may be one, too."""
        self._check_key(key)
        return ProtectDecorator(functools.partial(protect_async_function, self, key, fallback))

    async def _refreshed(self, key: AnyKey) -> S:
        """Return what the store knows of `key` now."""
        self._check_open()
        state = self._states.of_key(key)
        raise_failure(await self._run(send_state(self._states, state)))
        return state

    async def flush(self) -> None:
        """See `CircuitBreaker.flush`."""
        await TASK_WORKER.wait_for(self._flush_job)
        raise_failure(await self._flush_now(False))

    async def aclose(self) -> None:
        """See `CircuitBreaker.close`. If it is cancelled, it goes on to its end before
        `CancelledError` is raised.
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
                self._is_closed = True
                self._states.wake = ignore_wake
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

    async def _admit(self, key: AnyKey) -> A:
        self._check_open()
        state = self._states.of_key(key)
        admission = self._states.decide(state)
        return await self._run(admit(self._states, state)) if admission is None else admission

    async def _finish(self, admission: A, failed: bool | None) -> None:
        # Before anything is awaited: if the task is cancelled then, the worker sends it.
        if self._states.record(admission, failed) and not self._is_closed:
            await self._run(send_state(self._states, self._states.state_of(admission)))

    async def _flush_now(self, everything: bool) -> DistwindowError | None:
        """See `Limiter._flush_now`."""
        operation = flush_due(self._states, self._store.clock.monotonic, everything=everything)
        return await run_async(operation, functools.partial(self._execute, None), self._store.sleep)

    def _run(self, operation: Operation[T]) -> Awaitable[T]:
        deadline = self._store.clock.monotonic() + self._timeout
        return run_async(operation, functools.partial(self._execute, deadline), self._store.sleep)

    def _execute(self, deadline: float | None, step: Any) -> Awaitable[Any]:
        assert isinstance(step, Pipeline)
        return self._store.exchange(step.commands, deadline)
