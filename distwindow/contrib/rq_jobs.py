"""One job of RQ: whether it may start, and how it is sent back. `rq.py` has the worker."""

from __future__ import annotations

import inspect
import itertools
import math
import time
import uuid
from datetime import datetime, timezone
from typing import Any

import redis
from rq import Queue
from rq.job import JobStatus
from rq.timeouts import JobTimeoutException

from .task_gate import broker_failed

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
