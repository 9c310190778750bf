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

from .. import ConfigurationError
from ..runtime.shutdown import SHUTDOWN
from . import needs
from .tasks import BlockingQueueLimits, TaskLimits, broker_failed

with needs("rq"):
    import redis
    from rq import Queue, SimpleWorker, Worker
    from rq.job import JobStatus
    from rq.timeouts import JobTimeoutException

DELAY_ATTRIBUTE = "__distwindow_delay__"
"""The attribute of a limited function: `delay(args, kwargs)` says in how many seconds to ask."""
_SENT_BACK = "distwindow_sent_back"  # a field of the job's hash: what sent it back last
_WITHDRAWN = (JobStatus.CANCELED.encode(), JobStatus.STOPPED.encode())


def job_delay(worker: Any, job: Any) -> float:
    """Return 0.0 if `job` may start now; otherwise in how many seconds to ask again.

    The function is imported in the worker itself, within the time that the job has. Where that
    fails, the job may start: RQ imports once more when it runs the job, and reports the failure.
    """
    timeout = job.timeout or Queue.DEFAULT_TIMEOUT
    try:
        with worker.death_penalty_class(timeout, JobTimeoutException, job_id=job.id):
            function, args, kwargs = job.func, job.args, job.kwargs
    except SystemExit:
        if worker.is_forced_to_stop:
            raise  # a second signal, not a module that calls `sys.exit`
        return 0.0
    except Exception:
        return 0.0
    delay = getattr(function, DELAY_ATTRIBUTE, None)
    if delay is None:
        return 0.0
    if inspect.ismethod(function):  # RQ keeps the object of a bound method beside its arguments
        args = (function.__self__, *args)
    return float(delay(args, kwargs))


def send_back(connection: Any, job: Any, queue: Any, delay: float) -> None:
    """Schedule `job` in `delay` seconds, or up to a second later: RQ keeps whole seconds.

    A job that was cancelled, stopped or deleted meanwhile only leaves the worker.
    """
    when = datetime.fromtimestamp(math.ceil(time.time() + delay), timezone.utc)
    token = uuid.uuid4().hex
    for attempt in itertools.count():
        try:
            if attempt and connection.hget(job.key, _SENT_BACK) == token.encode():
                return  # the transaction was executed, and its reply lost
            with connection.pipeline() as transaction:
                transaction.watch(job.key)
                status = transaction.hget(job.key, "status")
                transaction.multi()
                if status is not None and status not in _WITHDRAWN:
                    job.set_status(JobStatus.SCHEDULED, pipeline=transaction)
                    queue.schedule_job(job, when, pipeline=transaction)
                    transaction.hset(job.key, _SENT_BACK, token)
                transaction.lrem(queue.intermediate_queue_key, 1, job.id)
                # Otherwise RQ may fail the job as stuck when it is seen here a minute later.
                transaction.delete(queue.intermediate_queue.get_first_seen_key(job.id))
                transaction.execute()
            return
        except redis.WatchError:
            continue  # the job was changed, or the connection was lost meanwhile: look at it again
        except (redis.ConnectionError, redis.TimeoutError) as exc:
            time.sleep(broker_failed(f"job {job.id}", exc))


SCHEDULER_CHECK_S = 10  # RQ looks each ten minutes whether the scheduler's worker has ended
F = TypeVar("F", bound=Callable[..., Any])


class RateLimits(BlockingQueueLimits):
    """The limits of functions that RQ runs. `store` is a URL or a client, as for `Limiter`.

    `on_store_error` says what happens to jobs while the limiter's store fails: "hold" schedules
    them a second later, "run" runs them without counting. `timeout` (seconds) bounds how long a
    worker asks, and `clock` is as for `Limiter`. Raises `ConfigurationError` for a wrong store.
    """

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
    """Mixin by which an RQ worker keeps the limits: `class MyWorker(LimitedJobs, rq.Worker)`."""

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

    def perform_job(self, *args: Any, **options: Any) -> bool:
        """Run a job, and send what it has counted where it has a process of its own, a horse: RQ
        ends that by `os._exit`, which runs no exit hooks.
        """
        worker: Any = self
        try:
            return bool(super().perform_job(*args, **options))  # type: ignore[misc]  # super() is RQ's
        finally:
            if worker.is_horse:
                SHUTDOWN.flush()

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
