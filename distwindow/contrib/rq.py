"""Limits of RQ's jobs, for the whole fleet.

    rate_limits = RateLimits("redis://localhost:6379/0")
    @rate_limits.limit(limits=["5/second", "1000/hour"], limit_key="tenant:{tenant}")
    def fetch(tenant, url): ...

The worker is `LimitedWorker`. It asks before it forks; a job that is refused is scheduled for its
turn, and taken off the worker, in one transaction. No retry is used up.
"""

from __future__ import annotations

import inspect
import itertools
import math
import time
import uuid
from collections.abc import Callable
from datetime import datetime, timezone
from typing import Any, TypeVar

import redis
from rq import SimpleWorker, Worker
from rq.job import JobStatus

from .task_gate import OnStoreError, TaskGate, broker_failed
from .task_limits import TaskLimits

SCHEDULER_CHECK_S = 10  # RQ looks each ten minutes whether the scheduler's worker has ended
_ATTRIBUTE = "__distwindow_delay__"
_SENT_BACK = "distwindow_sent_back"  # a field of the job's hash: what sent it back last
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
        its full name. Raises `ConfigurationError` for wrong options.
        """

        def decorate(function: F) -> F:
            name = f"{function.__module__}.{function.__qualname__}"
            task = self._gate.add(TaskLimits(name, function, limits, limit_key, limit_cost))
            setattr(function, _ATTRIBUTE, lambda *call: self._gate.delay(task, *call))
            return function

        return decorate


class LimitedJobs:
    """What makes an RQ worker keep the limits: `class MyWorker(LimitedJobs, rq.Worker)`."""

    _in_hand = False
    """May a job have been taken off its queue? Then a warm shutdown waits until it is done with."""

    def work(self, *args: Any, **options: Any) -> bool:
        """Work with a scheduler, which enqueues the jobs that were sent back."""
        options["with_scheduler"] = True
        self.maintenance_interval = SCHEDULER_CHECK_S
        return bool(super().work(*args, **options))  # type: ignore[misc]

    @property
    def dequeue_timeout(self) -> int:
        """For how long to wait for a job until the next look at the scheduler, seconds."""
        return min(SCHEDULER_CHECK_S, int(super().dequeue_timeout))  # type: ignore[misc]

    def dequeue_job_and_maintain_ttl(self, timeout: Any, max_idle_time: Any = None) -> Any:
        """Return the next job that may start now, and its queue; None to end the worker.

        RQ ends a worker at once while it waits for a job. So jobs are first taken without waiting.
        """
        worker: Any = self
        dequeue, waits = super().dequeue_job_and_maintain_ttl, False  # type: ignore[misc]
        while True:
            self._in_hand = not waits
            found = dequeue(timeout, max_idle_time) if waits else dequeue(None)
            self._in_hand = True  # until the next one is waited for
            if found and not (delay := _delay(found[0])):
                return found
            if found:
                _send_back(worker.connection, found[0], found[1], delay)
            if worker._stop_requested or (not found and (waits or timeout is None)):
                return None
            waits = not found

    def _shutdown(self) -> None:
        """End the worker; where a job may be in hand, only after that. A signal handler calls."""
        if self._in_hand:
            self._stop_requested = True
        else:
            super()._shutdown()  # type: ignore[misc]


class LimitedWorker(LimitedJobs, Worker):
    """RQ's worker that forks, with limits."""


class LimitedSimpleWorker(LimitedJobs, SimpleWorker):
    """RQ's worker that does not fork, with limits."""


def _delay(job: Any) -> float:
    try:
        function, args, kwargs = job.func, job.args, job.kwargs
    except Exception:  # the function cannot be imported, or the arguments cannot be read
        return 0.0  # RQ runs the job, and reports that
    own = (function.__self__,) if inspect.ismethod(function) else ()  # the limits' function has it
    delay = getattr(function, _ATTRIBUTE, None)
    return 0.0 if delay is None else float(delay((*own, *args), kwargs))


def _send_back(connection: Any, job: Any, queue: Any, delay: float) -> None:
    """Schedule `job` in `delay` seconds, or up to a second later: RQ keeps whole seconds."""
    when = datetime.fromtimestamp(math.ceil(time.time() + delay), timezone.utc)
    token = uuid.uuid4().hex
    for attempt in itertools.count():
        try:
            if attempt and connection.hget(job.key, _SENT_BACK) == token.encode():
                return  # the transaction was executed, and its reply lost
            with connection.pipeline() as transaction:
                job.set_status(JobStatus.SCHEDULED, pipeline=transaction)
                queue.schedule_job(job, when, pipeline=transaction)
                transaction.lrem(queue.intermediate_queue_key, 1, job.id)
                # Otherwise RQ may fail the job as stuck when it is seen here a minute later.
                transaction.delete(queue.intermediate_queue.get_first_seen_key(job.id))
                transaction.hset(job.key, _SENT_BACK, token)
                transaction.execute()
            return
        except (redis.ConnectionError, redis.TimeoutError) as exc:
            time.sleep(broker_failed(f"job {job.id}", exc))
