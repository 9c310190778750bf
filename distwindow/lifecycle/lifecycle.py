"""Opening, flushing and closing of limiters, concurrency limits and breakers.

Each has a store, and a source of what it counts in this process (`FlushSource`): a strategy, the
held slots, or the states of breakers. A worker flushes the source when something is due. `close`
goes through these steps, in a thread of its own (`close`) or shielded from cancellation
(`aclose`), so that an interrupted or cancelled caller does not leave it half done:

    step             calls of others meanwhile              who flushes
    -                are decided and counted                the worker
    `_end_calls`     raise, if the store is closed below;   the worker: calls count no more, but
                     those being decided may still count    what they have counted is due
    `detach`         as above                               the worker ends the flush under way, and
                                                            one that a signal has interrupted ends
    `_flush_rest`    as above, so that an owned store is    the closing thread or task
                     flushed twice
    `store.close`    raise `ConfigurationError`             nobody
    `record_close`   raise                                  nobody: what is left is logged as lost

A store object of the caller stays open, and calls are decided as before: the first one that
counts attaches the flush job to its worker again. The end of the process waits while
`being_closed`. Where the end of its event loop ends `aclose`, the flush at exit sends the rest.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from functools import partial
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

from ..away.outages import Health, Outages
from ..errors import DistwindowError
from ..observer import AsyncTimedStore, SourceKind, Tally, TimedStore, tally_of
from ..ring.commands import Acquire
from ..ring.store import AsyncStore, Store
from ..runtime.flush import FlushResult, FlushSource, JoinedSources, flush_due
from ..runtime.flush_job import FlushJob
from ..runtime.options import Options
from ..runtime.shutdown import EXIT_TIMEOUT_S
from ..runtime.steps import Fetch, Operation, Pipeline, StoreStep, run_async, run_blocking
from ..runtime.worker import TASK_WORKER, THREAD_WORKER, FlushWorker
from ..support.async_use import only_async_with, running_loop
from ..support.locks import OneShotEvent, run_to_completion
from .connect import SharedStore, is_opened, open_async_store, open_store

if TYPE_CHECKING:
    from typing_extensions import Self


class EnteredOnce:
    """Is a context manager for its own life, once, as `httpx.Client` is; one in each process."""

    _instead: str
    """The code that limits a block, where `with` of this object only reads as if it did."""
    _shared: str
    """The arguments that are the same in all processes, and what these share."""
    _is_entered = False
    _has_ended = False
    """True from `close` on."""

    def _enter(self) -> None:
        """Note that its `with` block begins. Raises `RuntimeError` the second time, and once it is
        closed: `with limiter:` reads as if it limited the block.
        """
        if self._is_entered or self._has_ended:
            raise RuntimeError(
                f"this {type(self).__name__} was {'entered' if self._is_entered else 'closed'} "
                "before, and its own `with` block limits nothing: it closes the object at its end; "
                f"write {self._instead}; for an application that starts again, as in tests, make a "
                "new one at each start"
            )
        self._is_entered = True

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        """Raise `TypeError` for `pickle` and `copy`."""
        raise TypeError(
            f"{type(self).__name__} cannot be pickled or copied, as it holds connections, locks "
            "and counts; make one in each process (at the top of a module, or first thing in the "
            f"child): all with the same {self._shared}"
        )


def ignore_wake() -> None:
    """Replaces the function that wakes the worker, once its limiter is being closed."""


def raise_failure(failure: DistwindowError | None) -> None:
    if failure is not None:
        raise failure


def _note_flush(job: FlushJob, store: Any, result: FlushResult) -> None:
    outages: Outages | None = getattr(store, "outages", None)
    job.had_work = result.has_sent
    job.store_is_away = outages is not None and bool(outages.away)


T = TypeVar("T")


class BlockingClosable(EnteredOnce):
    """Is closed by `close`, and at the end of a `with` block. An exception of a signal handler ends
    the wait for it, but not the closing.
    """

    _close: Callable[[], None]
    """Closes it, in the calling thread."""

    def close(self) -> None:
        """Send what was counted, give back what is held (leased permits, slots), and close the
        connections. Later calls raise `ConfigurationError`; closing twice is allowed.

        A store object that the caller made stays open, because it is the caller's, and later calls
        still work.
        """
        self._has_ended = True
        run_to_completion(self._close)

    def __enter__(self) -> Self:
        self._enter()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class Flushed:
    """Has a store, and counts in this process what a worker flushes; see above."""

    _worker: FlushWorker
    _store: Any
    _owns_store: bool
    """True if the store is closed with it."""
    _timeout: float
    """Seconds that one call has."""
    _flush_job: FlushJob
    _end_calls: Callable[[], Any]
    """Stops counting if the store is closed afterwards: no flush would send later counts."""
    _flush_now: Callable[[bool], Any]
    _run: Callable[..., Any]
    _execute_step: Callable[..., Any]
    _store_opener: Callable[[Any, Options], Any]
    """`open_store`, or that for tasks."""
    _timed_store: Callable[[Any, Tally], Any]
    """`TimedStore`, or that for tasks."""

    def _open_store(self, store: Any, options: Options) -> None:
        """Open `store`, which is what the caller has given; nothing is connected to."""
        self._store = self._store_opener(store, options)
        self._owns_store = is_opened(self._store, store) or isinstance(store, SharedStore)

    def _name_store(self, name: str) -> None:
        outages: Outages | None = getattr(self._store, "outages", None)
        if outages is not None:
            outages.name = name

    def _add_tally(self, options: Options, source_kind: SourceKind) -> Tally | None:
        """Return what adds up what is decided here, if there is an observer, and have it note what
        the store answers.
        """
        tally = tally_of(options, source_kind, self._store.clock.monotonic)
        if tally is not None and self._store.decided_by != "local":
            self._store = self._timed_store(self._store, tally)
        return tally

    def _tell_health(self, tally: Tally) -> None:
        """Tell an observer when the store is found to be away, and when it is back."""
        store = self._store
        outages: Outages | None = getattr(store, "outages", None)
        if outages is not None:
            away = outages

            def tell() -> None:
                down, error = away.away, away.last_error
                up = not down
                tally.changed(Health(up, away.changed_at, error, store.unknown_total, 0, down))

            outages.add_listener(tell)

    def _new_flush_job(
        self,
        source: FlushSource,
        name: str,
        tally: Tally | None = None,
        *,
        job_type: type[FlushJob] = FlushJob,
        in_background: bool = True,
    ) -> FlushJob:
        """Add `source`, and what adds up for an observer, to what the worker flushes; without
        `in_background`, only `flush` and `close` do. `name` is that of log lines.
        """
        if tally is not None:
            self._tell_health(tally)
            source = JoinedSources(source, tally)
        if not in_background:
            return job_type(source, self._flush_now, name)
        return self._worker.add_limiter(
            source, self._flush_now, self._store.clock, name=name, job_type=job_type
        )


class BlockingLifecycle(BlockingClosable, Flushed):
    """The steps above in threads."""

    _worker = THREAD_WORKER
    _store: Store
    _store_opener = staticmethod(open_store)
    _timed_store = TimedStore

    def flush(self) -> None:
        """Send now what was counted in this process, and renew or free slots that are due, instead
        of in the background. If the store does not take it, raise, and keep it for the next flush.
        """
        job, done = self._flush_job, OneShotEvent()
        has_begun = False

        def flush() -> DistwindowError | None:
            nonlocal has_begun
            has_begun = True
            try:
                return self._flush_now(False)
            finally:
                done.set()

        THREAD_WORKER.wait_for(job)
        try:
            failure = run_to_completion(flush)
        except BaseException:  # of a signal handler: the flush goes on in its thread
            if has_begun:
                job.interrupted_flush = done
            raise
        raise_failure(failure)

    def _close(self) -> None:
        job = self._flush_job
        with job.closing_lock, job.being_closed():
            self._end_calls()
            THREAD_WORKER.detach(job)
            if job.interrupted_flush is not None:
                job.interrupted_flush.wait(EXIT_TIMEOUT_S)
            failure = self._flush_rest()
            if self._owns_store:
                self._store.close()
            job.record_close(failure)

    def _flush_rest(self) -> DistwindowError | None:
        """Send all that is left. Return the first failure."""
        failure = self._flush_now(True)
        if self._owns_store:
            failure = self._flush_now(True) or failure  # of calls that were being decided
        return failure

    def _flush_now(self, everything: bool) -> DistwindowError | None:
        """Send what is due; with `everything`, all that is pending. Each exchange has a deadline of
        its own. Return the first failure.
        """
        source, clock = self._flush_job.strategy, self._store.clock
        operation = flush_due(source, clock.monotonic, everything=everything)
        result = run_blocking(operation, partial(self._execute_step, None), clock.sleep)
        _note_flush(self._flush_job, self._store, result)
        return result.failure

    def _run(self, operation: Operation[T], deadline: float | None = None) -> T:
        """Drive the operation of one call, with one deadline for all its steps."""
        if deadline is None:
            deadline = self._store.clock.monotonic() + self._timeout
        execute = partial(self._execute_step, deadline)
        return run_blocking(operation, execute, self._store.clock.sleep)

    def _execute_step(self, deadline: float | None, step: StoreStep) -> Any:
        if isinstance(step, Acquire):
            return self._store.decide(step, deadline)
        if isinstance(step, Pipeline):
            return self._store.execute_many(step.commands, deadline)
        if isinstance(step, Fetch):  # a late reply is never read: its connection is closed
            return self._store.execute(step.command, deadline)
        return self._store.execute(step, deadline)


@only_async_with
class AsyncClosable(EnteredOnce):
    """Is closed by `aclose`, and at the end of an `async with` block."""

    _close: Callable[[], Coroutine[Any, Any, None]]
    """Closes it, in the running task."""

    async def aclose(self) -> None:
        """See `Limiter.close`. Cancelled, it goes on to its end, and raises `CancelledError`."""
        self._has_ended = True
        closing = running_loop().create_task(self._close())
        try:
            await asyncio.shield(closing)
        except asyncio.CancelledError:
            await asyncio.wait([closing])  # each of its exchanges has a deadline
            raise

    async def __aenter__(self) -> Self:
        running_loop()  # or the error would come at the end, in the place of what happened before
        self._enter()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()


class AsyncLifecycle(AsyncClosable, Flushed):
    """The steps above in tasks."""

    _worker = TASK_WORKER
    _store: AsyncStore
    _store_opener = staticmethod(open_async_store)
    _timed_store = AsyncTimedStore

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

    async def _flush_rest(self) -> DistwindowError | None:
        failure = await self._flush_now(True)
        if self._owns_store:
            failure = await self._flush_now(True) or failure
        return failure

    async def _flush_now(self, everything: bool) -> DistwindowError | None:
        source, monotonic = self._flush_job.strategy, self._store.clock.monotonic
        operation = flush_due(source, monotonic, everything=everything)
        result = await run_async(operation, partial(self._execute_step, None), self._store.sleep)
        _note_flush(self._flush_job, self._store, result)
        return result.failure

    def _run(self, operation: Operation[T], deadline: float | None = None) -> Awaitable[T]:
        if deadline is None:
            deadline = self._store.clock.monotonic() + self._timeout
        return run_async(operation, partial(self._execute_step, deadline), self._store.sleep)

    def _execute_step(self, deadline: float | None, step: StoreStep) -> Awaitable[Any]:
        if isinstance(step, Acquire):
            return self._store.decide(step, deadline)
        if isinstance(step, Pipeline):
            return self._store.execute_many(step.commands, deadline)
        if isinstance(step, Fetch):
            return self._store.execute(step.command, deadline, step.on_late_reply)
        return self._store.execute(step, deadline)
