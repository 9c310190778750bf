"""What is flushed and closed by threads; the steps of closing are in `base.py`."""

from __future__ import annotations

from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING, Any, TypeVar

from ..connect import ClockChoice, open_store
from ..core.clock import Clock
from ..core.errors import DistwindowError
from ..core.interrupts import run_to_completion
from ..operations.drivers import run_blocking
from ..operations.flush import flush_due
from ..operations.flush_source import FlushSource
from ..operations.steps import Fetch, Operation, Pipeline, StoreStep
from ..protocol.commands import Acquire
from ..store.base import Store
from ..worker import THREAD_WORKER
from ..worker.flush_job import FlushJob
from .base import EnteredOnce, raise_failure

if TYPE_CHECKING:
    from typing_extensions import Self

T = TypeVar("T")


class BlockingClosable(EnteredOnce):
    """Is closed by `close`, and at the end of a `with` block. An exception of a signal handler ends
    the wait for it, but not the closing.
    """

    def close(self) -> None:
        """Send what was counted, give back what is held (leased permits, slots), and close the
        connections. Later calls raise `ConfigurationError`; closing twice is allowed.

        A store object that the caller made stays open, because it is the caller's, and later calls
        still work.
        """
        self._has_ended = True
        run_to_completion(self._close)

    def _close(self) -> None:
        """Close it, in the calling thread."""
        raise NotImplementedError  # each kind has steps of its own

    def __enter__(self) -> Self:
        self._enter()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        exc: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


class BlockingLifecycle(BlockingClosable):
    """Has a store, and counts in this process what a worker flushes; see `base.py`."""

    _store: Store
    _owns_store: bool
    """True if the store is closed with it."""
    _timeout: float
    """Seconds that one call has."""
    _flush_job: FlushJob

    def _open_store(
        self, store: Any, timeout: float, clock: ClockChoice, name: str | None, time: Clock
    ) -> None:
        """Open `store`, which is what the caller has given; nothing is connected to."""
        self._store = open_store(store, timeout=timeout, clock=clock, name=name, time=time)
        self._owns_store = self._store is not store

    def _add_flush_job(
        self,
        source: FlushSource,
        name: str,
        *,
        job_type: type[FlushJob] = FlushJob,
        in_background: bool = True,
    ) -> None:
        """Have the worker flush `source`; without `in_background`, only `flush` and `close` do.
        `name` is that of log lines.
        """
        if in_background:
            self._flush_job = THREAD_WORKER.add_limiter(
                source,
                self._flush_now,
                self._store.clock,
                name=name,
                job_type=job_type,
            )
        else:
            self._flush_job = job_type(source, self._flush_now, name)

    def flush(self) -> None:
        """Send now what was counted in this process, and renew or free slots that are due, instead
        of in the background. If the store does not take it, raise, and keep it for the next flush.
        """
        THREAD_WORKER.wait_for(self._flush_job)
        raise_failure(run_to_completion(partial(self._flush_now, False)))

    def _close(self) -> None:
        job = self._flush_job
        with job.closing_lock, job.being_closed():
            self._end_calls()
            THREAD_WORKER.detach(job)
            failure = self._flush_rest()
            if self._owns_store:
                self._store.close()
            job.record_close(failure)

    def _end_calls(self) -> None:
        """Have nothing counted any more if the store is closed afterwards. It comes first, because
        no flush would send what is counted later.
        """
        raise NotImplementedError  # each kind has calls of its own

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
        self._flush_job.has_sent = result.has_sent
        return result.failure

    def _run(self, operation: Operation[T], deadline: float | None = None) -> T:
        """Drive the operation of one call, with one deadline for all its steps."""
        if deadline is None:
            deadline = self._store.clock.monotonic() + self._timeout
        execute = partial(self._execute_step, deadline)
        return run_blocking(operation, execute, self._store.clock.sleep)

    def _execute_step(self, deadline: float | None, step: StoreStep) -> Any:
        if isinstance(step, Acquire):
            return self._store.attempt(step, deadline)
        if isinstance(step, Pipeline):
            return self._store.exchange(step.commands, deadline)
        if isinstance(step, Fetch):  # a late reply is never read: its connection is closed
            return self._store.execute(step.command, deadline)
        return self._store.execute(step, deadline)
