"""The application of the workers: the task `fetch`, limited in the way that SETUP names.

BROKER, STORE, RECORDS are URLs. Each start, ask and requeue is recorded in Redis, by its own clock.
With SETUP "parked" one task starts in an hour, and the others wait: for what they take in memory.
With "shares" starts are recorded with the name of their task, and `free` has no limit.
"""

from __future__ import annotations

import os
import time
from typing import Any

import redis
from celery import Celery, Task, signals

from distwindow import Decision, Limiter

PER_SECOND, WORKERS = 20, 2
SETUP = os.environ.get("SETUP", "")

app = Celery("project", broker=os.environ.get("BROKER"))
app.conf.update(
    broker_connection_retry_on_startup=True,
    worker_cancel_long_running_tasks_on_connection_loss=False,
    task_ignore_result=True,
)
records: Any = redis.Redis.from_url(os.environ.get("RECORDS", "redis://"))


def now_us() -> int:
    seconds, micros = records.time()
    return int(seconds) * 1_000_000 + int(micros)


@signals.worker_ready.connect  # type: ignore[untyped-decorator]  # Celery has no types
def ready(**_: Any) -> None:
    records.incr("ready")


@signals.task_retry.connect  # type: ignore[untyped-decorator]  # Celery has no types
def retried(**_: Any) -> None:
    records.incr("requeues")


class CountingLimiter(Limiter):
    """Counts what is asked, and records each admission."""

    def try_acquire_all(self, items: Any, enqueue: bool = False) -> Decision:
        return self._counted(super().try_acquire_all(items, enqueue))

    def try_acquire(self, *args: Any, **kwargs: Any) -> Decision:
        return self._counted(super().try_acquire(*args, **kwargs))

    def _counted(self, decision: Decision) -> Decision:
        pipeline = records.pipeline(transaction=False)
        pipeline.incr("asks")
        if decision.allowed:
            pipeline.rpush("admitted", decision.now_ms)
        pipeline.execute()
        return decision


def work() -> None:
    records.rpush("starts", now_us())
    time.sleep(0.02)


def work_as(name: str) -> None:
    records.rpush("starts", f"{name} {now_us()}")
    time.sleep(0.01)


options: dict[str, Any] = {}
if SETUP in ("distwindow", "parked"):
    from distwindow.contrib.celery import RateLimits, task_sent_back
    from distwindow.contrib.limiter_pool import LimiterPool

    RateLimits(app, os.environ["STORE"], max_parked=100_000 if SETUP == "parked" else None)
    options["limits"] = f"{PER_SECOND}/second" if SETUP == "distwindow" else "1/hour"
    LimiterPool._limiter_type = CountingLimiter
    task_sent_back.connect(retried)
elif SETUP == "shares":
    from distwindow.contrib.celery import RateLimits

    RateLimits(app, os.environ["STORE"])
    options["limits"] = f"{PER_SECOND}/second"
elif SETUP == "rate_limit":
    options["rate_limit"] = f"{PER_SECOND // WORKERS}/s"
elif SETUP == "retry":
    options.update(max_retries=None, acks_late=True)
    limiter = CountingLimiter(os.environ["STORE"], f"{PER_SECOND}/second")
elif SETUP == "heimdall":
    from celery_heimdall import HeimdallTask

    class CountedHeimdallTask(HeimdallTask):  # type: ignore[misc]  # it has no types
        """The task's own counters; heimdall finds its Redis by the broker's URL."""

        abstract = True

        def __call__(self, *args: Any, **kwargs: Any) -> Any:
            records.incr("asks")
            return super().__call__(*args, **kwargs)

    options["base"] = CountedHeimdallTask
    options["heimdall"] = {"times": PER_SECOND, "per": 1, "key": "fetch"}


@app.task(bind=True, name="fetch", shared=False, **options)  # type: ignore[untyped-decorator]  # Celery has no types
def fetch(self: Task, number: int) -> None:
    if SETUP == "retry":
        decision = limiter.try_acquire("fetch")
        if not decision:
            raise self.retry(countdown=decision.retry_after)
    if SETUP == "shares":
        work_as("fetch")
    else:
        work()


@app.task(name="free", shared=False)  # type: ignore[untyped-decorator]  # Celery has no types
def free(number: int) -> None:
    work_as("free")
