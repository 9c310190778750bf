"""What breakers for threads do. What they do with the store is in `operations/breaker.py`; what is
decided in this process is in `consistency/breaker_states.py` and `adaptive_states.py`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import TracebackType
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from ..base_limiter import ignore_wake, raise_failure
from ..connect import open_store
from ..consistency.breaker_source import BreakerSource, FollowedBreaker, SourceOptions
from ..core.errors import DistwindowError
from ..core.interrupts import run_to_completion
from ..core.key import AnyKey
from ..operations.breaker import admit, send_state
from ..operations.drivers import run_blocking
from ..operations.flush import flush_due
from ..operations.steps import Operation, Pipeline
from ..worker import THREAD_WORKER
from ..worker.flush_job import FlushJob
from .base import BaseBreaker, BreakerOptions, source_options
from .call import Call
from .protect import F, ProtectDecorator, protect_function

if TYPE_CHECKING:
    from typing_extensions import Self

T = TypeVar("T")
S = TypeVar("S", bound=FollowedBreaker)
A = TypeVar("A")


class BlockingBreaker(BaseBreaker, Generic[S, A]):
    """A breaker for threads."""

    def __init__(self, store: Any, options: BreakerOptions, name: str | None) -> None:
        super().__init__(store, options)
        self._store = open_store(
            store, timeout=options.timeout, clock=options.clock, name=name, time=options.time
        )
        self._owns_store = self._store is not store
        self._states = self._open_states(
            source_options(options, self._store.clock, self._store.source)
        )
        if self._states.in_process:
            self._flush_job = FlushJob(self._states, self._flush_now, self._name)
        else:
            self._flush_job = THREAD_WORKER.add_limiter(
                self._states,
                self._flush_now,
                self._store.clock,
                name=self._name,
                handle_sigterm=options.handle_sigterm,
            )

    def _open_states(self, options: SourceOptions) -> BreakerSource[S, A]:
        """Return what this breaker knows and counts in this process."""
        raise NotImplementedError  # each kind of breaker has its own

    def call(self, key: AnyKey) -> Call[A]:
        """Return a context manager for one call of the service: raises `BreakerOpen` at the
        beginning of its block if it is refused, and counts its end. `fail()` of the object that
        `as` gives counts it as failed though it raises nothing.
        """
        admit = functools.partial(self._admit, key)
        return Call(self._failure_types, admit, self._finish, self._states.restarted)

    def protect(
        self, key: AnyKey | Callable[..., AnyKey], *, fallback: Callable[..., Any] | None = None
    ) -> Callable[[F], F]:
        """Return a decorator: each call of the function goes through the breaker. A refused call
        returns what `fallback` returns for the same arguments, or raises `BreakerOpen`.

        `key` may be a callable of the function's own arguments. Raises `ConfigurationError` for
        what can never work, when it is applied.
        """
        self._check_key(key)
        return ProtectDecorator(functools.partial(protect_function, self, key, fallback))

    def _refreshed(self, key: AnyKey) -> S:
        """Return what the store knows of `key` now."""
        self._check_open()
        state = self._states.of_key(key)
        raise_failure(self._run(send_state(self._states, state)))
        return state

    def flush(self) -> None:
        """Send now what was counted in this process, instead of within `flush_interval`. If the
        store does not take it, raise, and keep it for the next flush.
        """
        THREAD_WORKER.wait_for(self._flush_job)
        raise_failure(run_to_completion(functools.partial(self._flush_now, False)))

    def close(self) -> None:
        """Send what was counted, and close the connections. Later calls raise
        `ConfigurationError`; closing twice is allowed. A store object that the caller made stays
        open, and later calls still work.
        """
        run_to_completion(self._close)

    def _close(self) -> None:
        with self._flush_job.closing_lock, self._flush_job.being_closed():
            if self._owns_store:
                self._is_closed = True
                self._states.wake = ignore_wake  # this thread flushes from here on
            THREAD_WORKER.detach(self._flush_job)
            failure = self._flush_now(True)
            if self._owns_store:
                failure = self._flush_now(True) or failure  # of calls that were ending
                self._store.close()
            self._flush_job.record_close(failure)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        exc: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _admit(self, key: AnyKey) -> A:
        self._check_open()
        state = self._states.of_key(key)
        admission = self._states.decide(state)
        return self._run(admit(self._states, state)) if admission is None else admission

    def _finish(self, admission: A, failed: bool | None) -> None:
        if self._states.record(admission, failed) and not self._is_closed:
            # If the store does not take it now, the worker sends it again.
            self._run(send_state(self._states, self._states.state_of(admission)))

    def _flush_now(self, everything: bool) -> DistwindowError | None:
        """See `Limiter._flush_now`."""
        operation = flush_due(self._states, self._store.clock.monotonic, everything=everything)
        return run_blocking(
            operation, functools.partial(self._execute, None), self._store.clock.sleep
        )

    def _run(self, operation: Operation[T]) -> T:
        deadline = self._store.clock.monotonic() + self._timeout
        return run_blocking(
            operation, functools.partial(self._execute, deadline), self._store.clock.sleep
        )

    def _execute(self, deadline: float | None, step: Any) -> Any:
        assert isinstance(step, Pipeline)
        return self._store.exchange(step.commands, deadline)
