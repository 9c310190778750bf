"""What is flushed and closed by tasks: `blocking.py`, awaited where there is I/O."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING, Any, TypeVar

from ..connect import ClockChoice, open_async_store
from ..core.async_use import only_async_with
from ..core.clock import Clock
from ..core.errors import DistwindowError
from ..operations.drivers import run_async
from ..operations.flush import flush_due
from ..operations.flush_source import FlushSource
from ..operations.steps import Fetch, Operation, Pipeline, StoreStep
from ..protocol.commands import Acquire
from ..store.base import AsyncStore
from ..store.memory import MemoryStore
from ..worker import TASK_WORKER
from ..worker.flush_job import FlushJob
from .base import EnteredOnce, raise_failure

if TYPE_CHECKING:
    from typing_extensions import Self

T = TypeVar("T")


@only_async_with
class AsyncClosable(EnteredOnce):
    """Is closed by `aclose`, and at the end of an `async with` block."""

    async def aclose(self) -> None:
        """See `Limiter.close`. If it is cancelled, it goes on to its end before `CancelledError` is
        raised.
        """
        self._has_ended = True
        closing = asyncio.ensure_future(self._close())
        try:
            await asyncio.shield(closing)
        except asyncio.CancelledError:
            await asyncio.wait([closing])  # each of its exchanges has a deadline
            raise

    async def _close(self) -> None:
        """Close it, in the running task."""
        raise NotImplementedError  # each kind has steps of its own

    async def __aenter__(self) -> Self:
        self._enter()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        exc: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.aclose()


class AsyncLifecycle(AsyncClosable):
    """`BlockingLifecycle` for tasks."""

    _store: AsyncStore
    _owns_store: bool
    """True if the store is closed with it."""
    _timeout: float
    """Seconds that one call has."""
    _flush_job: FlushJob

    def _open_store(
        self, store: Any, timeout: float, clock: ClockChoice, name: str | None, time: Clock
    ) -> None:
        """Open `store`, which is what the caller has given; nothing is connected to."""
        self._store = open_async_store(store, timeout=timeout, clock=clock, name=name, time=time)
        self._owns_store = self._store is not store and not isinstance(store, MemoryStore)

    def _add_flush_job(
        self,
        source: FlushSource,
        name: str,
        *,
        job_type: type[FlushJob] = FlushJob,
        in_background: bool = True,
    ) -> None:
        """See `BlockingLifecycle._add_flush_job`."""
        if in_background:
            self._flush_job = TASK_WORKER.add_limiter(
                source,
                self._flush_now,
                self._store.clock,
                name=name,
                job_type=job_type,
            )
        else:
            self._flush_job = job_type(source, self._flush_now, name)

    async def flush(self) -> None:
        """See `Limiter.flush`."""
        await TASK_WORKER.wait_for(self._flush_job)
        raise_failure(await self._flush_now(False))

    async def _close(self) -> None:
        job = self._flush_job
        try:
            with job.being_closed():
                await self._end_calls()
                await TASK_WORKER.detach(job)
                failure = await self._flush_rest()
                if self._owns_store:
                    await self._store.aclose()
                job.record_close(failure)
        except BaseException:
            # The loop is shutting down, and has cancelled this task, too (`CancelledError`). The
            # flush at exit sends what is left.
            job.detached = False
            raise

    async def _end_calls(self) -> None:
        """See `BlockingLifecycle._end_calls`."""
        raise NotImplementedError  # each kind has calls of its own

    async def _flush_rest(self) -> DistwindowError | None:
        """See `BlockingLifecycle._flush_rest`."""
        failure = await self._flush_now(True)
        if self._owns_store:
            failure = await self._flush_now(True) or failure
        return failure

    async def _flush_now(self, everything: bool) -> DistwindowError | None:
        """See `BlockingLifecycle._flush_now`."""
        source, monotonic = self._flush_job.strategy, self._store.clock.monotonic
        operation = flush_due(source, monotonic, everything=everything)
        result = await run_async(operation, partial(self._execute_step, None), self._store.sleep)
        self._flush_job.has_sent = result.has_sent
        return result.failure

    def _run(self, operation: Operation[T], deadline: float | None = None) -> Awaitable[T]:
        """See `BlockingLifecycle._run`."""
        if deadline is None:
            deadline = self._store.clock.monotonic() + self._timeout
        return run_async(operation, partial(self._execute_step, deadline), self._store.sleep)

    def _execute_step(self, deadline: float | None, step: StoreStep) -> Awaitable[Any]:
        if isinstance(step, Acquire):
            return self._store.attempt(step, deadline)
        if isinstance(step, Pipeline):
            return self._store.exchange(step.commands, deadline)
        if isinstance(step, Fetch):
            return self._store.execute(step.command, deadline, step.on_late_reply)
        return self._store.execute(step, deadline)
