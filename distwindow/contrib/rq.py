"""Limits of RQ's jobs, for the whole fleet.

    rate_limits = RateLimits("redis://localhost:6379/0")
    @rate_limits.limit(limits=["5/second", "1000/hour"], limit_key="tenant:{tenant}")
    def fetch(tenant, url): ...

The worker is `LimitedWorker`. It asks before it forks; a job that is refused is scheduled for its
turn, and taken off the worker, in one transaction. No retry is used up.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from rq import SimpleWorker, Worker

from .. import ConfigurationError
from .rq_jobs import DELAY_ATTRIBUTE, job_delay, send_back
from .task_gate import OnStoreError, TaskGate
from .task_limits import TaskLimits

SCHEDULER_CHECK_S = 10  # RQ looks each ten minutes whether the scheduler's worker has ended
F = TypeVar("F", bound=Callable[..., Any])


class RateLimits:
    """The limits of functions that RQ runs. `store` is a URL or a client, as for `Limiter`.

    `on_store_error` says what happens to jobs while the limiter's store fails: "hold" schedules
    them a second later, "run" runs them without counting. `timeout` (seconds) bounds how long a
    worker asks. Raises `ConfigurationError` for a store that can never work.
    """

    def __init__(
        self,
        store: Any,
        *,
        prefix: str = "distwindow",
        on_store_error: OnStoreError = "hold",
        timeout: float = 0.5,
    ) -> None:
        self._gate = TaskGate(store, prefix, on_store_error, timeout)

    def limit(self, *, limits: Any, limit_key: Any = None, limit_cost: Any = 1) -> Callable[[F], F]:
        """Return a decorator that gives a function its limits, and returns the same function.

        `limit_key` is a template over the names of its arguments, or a function of them; by default
        its full name. A method has its object among its arguments (`self`, `cls`). Raises
        `ConfigurationError` for wrong options, and for a function that has limits already.
        """

        def decorate(function: F) -> F:
            if isinstance(function, (classmethod, staticmethod)):
                raise ConfigurationError(
                    f"{function.__func__.__qualname__}: RQ does not see the limits above "
                    f"@{type(function).__name__}; write @limit below it, next to the function"
                )
            name = f"{function.__module__}.{function.__qualname__}"
            if hasattr(function, DELAY_ATTRIBUTE):
                raise ConfigurationError(
                    f"{name} has limits already; write all of them in one @limit, such as "
                    'limits=["5/second", "1000/hour"]'
                )
            task = self._gate.add(TaskLimits(name, function, limits, limit_key, limit_cost))
            setattr(function, DELAY_ATTRIBUTE, lambda *call: self._gate.delay(task, *call))
            return function

        return decorate


class LimitedJobs:
    """What makes an RQ worker keep the limits: `class MyWorker(LimitedJobs, rq.Worker)`."""

    _in_hand = False
    """May a job have been taken off its queue? Then a warm shutdown waits until it is done with."""
    is_forced_to_stop = False
    """Has a second signal come? Then the worker ends at once, whatever it has in hand."""

    def work(self, *args: Any, **options: Any) -> bool:
        """Work with a scheduler, which enqueues the jobs that were sent back."""
        options["with_scheduler"] = True
        self.maintenance_interval = SCHEDULER_CHECK_S
        return bool(super().work(*args, **options))  # type: ignore[misc]  # super() is RQ's

    @property
    def dequeue_timeout(self) -> int:
        """For how long to wait for a job until the next look at the scheduler, seconds."""
        return min(SCHEDULER_CHECK_S, int(super().dequeue_timeout))  # type: ignore[misc]  # super() is RQ's

    def dequeue_job_and_maintain_ttl(self, timeout: Any, max_idle_time: Any = None) -> Any:
        """Return the next job that may start now, and its queue; None to end the worker.

        RQ ends a worker at once while it waits for a job. So jobs are first taken without waiting.
        """
        worker: Any = self
        dequeue, waits = super().dequeue_job_and_maintain_ttl, False  # type: ignore[misc]  # super() is RQ's
        while True:
            self._in_hand = not waits
            found = dequeue(timeout, max_idle_time) if waits else dequeue(None)
            self._in_hand = True  # until the next one is waited for
            if found and not (delay := job_delay(worker, found[0])):
                return found
            if found:
                send_back(worker.connection, found[0], found[1], delay)
            if worker._stop_requested or (not found and (waits or timeout is None)):
                return None
            waits = not found

    def _shutdown(self) -> None:
        """End the worker; where a job may be in hand, only after that. A signal handler calls."""
        if self._in_hand:
            self._stop_requested = True
        else:
            super()._shutdown()  # type: ignore[misc]  # super() is RQ's

    def request_force_stop(self, signum: int, frame: Any) -> None:
        """End the worker at once. RQ sets this as the handler of a second signal."""
        try:
            super().request_force_stop(signum, frame)  # type: ignore[misc]  # super() is RQ's
        except SystemExit:
            self.is_forced_to_stop = True
            raise


class LimitedWorker(LimitedJobs, Worker):
    """RQ's worker that forks, with limits."""


class LimitedSimpleWorker(LimitedJobs, SimpleWorker):
    """RQ's worker that does not fork, with limits."""
