"""`CircuitBreaker`, for threads. `AsyncCircuitBreaker` has the same methods, for tasks. What they
do with the store is in `operations/breaker.py`; what is decided in this process is in
`consistency/breaker_states.py`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import TracebackType
from typing import TYPE_CHECKING, Any, TypeVar

from ..base_limiter import ignore_wake, raise_failure
from ..connect import ClockChoice, open_store
from ..consistency.breaker_states import Admission, OnBreakerStoreError
from ..core.breaker_rules import BreakerRule
from ..core.breaker_state import BreakerState
from ..core.clock import SYSTEM, Clock
from ..core.errors import DistwindowError
from ..core.interrupts import run_to_completion
from ..core.key import AnyKey
from ..operations.breaker import admit, send_state
from ..operations.drivers import run_blocking
from ..operations.flush import flush_due
from ..operations.steps import Operation, Pipeline
from ..worker import THREAD_WORKER
from ..worker.flush_job import FlushJob
from .base import BaseBreaker, BreakerOptions, needs_store
from .call import Call
from .outcomes import ErrorTypes
from .protect import F, ProtectDecorator, protect_function

if TYPE_CHECKING:
    from typing_extensions import Self

T = TypeVar("T")


class CircuitBreaker(BaseBreaker):
    """Circuit breakers that the whole fleet shares, one for each key. Safe to share between
    threads; survives `fork`.

        breaker = CircuitBreaker("redis://localhost:6379/0", ErrorRatio(0.5, open_for=5.0))
        with breaker.call("payments"):
            pay()

    `store` is what a `Limiter` takes: a URL, `memory://`, or a redis-py client that stays the
    caller's. `rule` is an `ErrorRatio`, a `SlowRatio` or an `ErrorCount`.

    A call is decided in this process, by the last known state. How calls ended is flushed every
    `flush_interval` seconds, and the states of the breakers in use are refreshed every
    `sync_interval` seconds, both by the background worker: when the fleet's calls reach the
    threshold, every process refuses within the sum of both and one round trip. The number of
    probes is the fleet's.

    `errors` are the exceptions that count as failures; `ignore` are those that say nothing about
    the service. Other exceptions count as successes, but a cancellation or `KeyboardInterrupt`
    says nothing.

    If the store does not answer, the last known state holds. Where that cannot decide (no state is
    known yet, or an open breaker's time has come), `on_store_error="allow"` lets calls through, an
    open breaker's one at a time as a probe of this process; `"deny"` refuses them.

    `timeout`, `clock`, `name`, `max_local_keys`, `handle_sigterm` and `time` are those of
    `Limiter`. Raises `ConfigurationError` for arguments that can never work; nothing is connected
    to before the first call.
    """

    def __init__(
        self,
        store: Any,
        rule: BreakerRule,
        *,
        prefix: str = "distwindow",
        errors: ErrorTypes = Exception,
        ignore: ErrorTypes = (),
        on_store_error: OnBreakerStoreError = "allow",
        timeout: float = 0.25,
        clock: ClockChoice = "server",
        name: str | None = None,
        sync_interval: float = 0.25,
        flush_interval: float = 0.25,
        max_local_keys: int = 10_000,
        handle_sigterm: bool = True,
        time: Clock = SYSTEM,
    ) -> None:
        options = BreakerOptions(
            prefix, errors, ignore, on_store_error, timeout, clock, sync_interval, flush_interval,
            max_local_keys, handle_sigterm, time,
        )  # fmt: skip
        super().__init__(store, rule, options)
        self._store = open_store(store, timeout=timeout, clock=clock, name=name, time=time)
        self._owns_store = self._store is not store
        self._states = self._make_states(options, self._store.clock, self._store.source)
        if self._states.in_process:
            self._flush_job = FlushJob(self._states, self._flush_now, self._name)
        else:
            self._flush_job = THREAD_WORKER.add_limiter(
                self._states,
                self._flush_now,
                self._store.clock,
                name=self._name,
                handle_sigterm=handle_sigterm,
            )

    def call(self, key: AnyKey) -> Call[Admission]:
        """Return a context manager for one call of the service: raises `BreakerOpen` at the
        beginning of its block if it is refused, and counts its end. `fail()` of the object that
        `as` gives counts it as failed though it raises nothing.
        """
        return Call(self._failure_types, functools.partial(self._admit, key), self._finish)

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

    def state(self, key: AnyKey) -> BreakerState:
        """Return the breaker's state in the store: `"closed"`, `"open"` or `"half_open"`. An open
        breaker stays open until a call is let through as a probe.
        """
        self._check_open()
        state = self._states.of_key(key)
        failure = self._run(send_state(self._states, state))
        if failure is not None:
            raise failure
        return state.state

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

    def _admit(self, key: AnyKey) -> Admission:
        self._check_open()
        state = self._states.of_key(key)
        admission = self._states.decide(state)
        return self._run(admit(self._states, state)) if admission is None else admission

    def _finish(self, admission: Admission, failed: bool | None) -> None:
        self._states.record(admission, failed)
        if needs_store(self._states, admission) and not self._is_closed:
            # If the store does not take it now, the worker sends it again.
            self._run(send_state(self._states, admission.state))

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
