"""The application of worker processes. Everything that varies comes from the environment:

BROKER, BACKEND: URLs of Celery; RECORDS: of what the tasks record; STORE: of the limiter.
OPTIONS: JSON, options of the task `fetch`; CONF: JSON, the configuration; GATE: "no" for none.
"""

from __future__ import annotations

import json
import os
import time
from typing import Any

import redis
from celery import Celery, signals

from distwindow import Decision, Limiter
from distwindow.contrib.celery import RateLimits, task_parked, task_sent_back
from distwindow.contrib.limiter_pool import LimiterPool

app = Celery("project", broker=os.environ["BROKER"], backend=os.environ["BACKEND"])
app.conf.update(
    broker_connection_retry_on_startup=True,
    worker_cancel_long_running_tasks_on_connection_loss=False,
    task_store_eager_result=True,
)
app.conf.update(json.loads(os.environ.get("CONF", "{}")))
records = redis.Redis.from_url(os.environ["RECORDS"], decode_responses=True)

if os.environ.get("GATE") != "no":
    limits = RateLimits(app, os.environ["STORE"])


class RecordingLimiter(Limiter):
    """Records when the store admitted something, by the store's clock."""

    def try_acquire_all(self, items: Any, enqueue: bool = False) -> Decision:
        decision = self._recorded(super().try_acquire_all(items, enqueue))
        if decision.allowed and len(items) > 1:
            for key, *_ in items:
                records.rpush(f"admitted {key}", decision.now_ms)
        return decision

    def try_acquire(self, *args: Any, **options: Any) -> Decision:
        return self._recorded(super().try_acquire(*args, **options))

    def _recorded(self, decision: Decision) -> Decision:
        if decision.allowed:
            records.rpush("admitted", decision.now_ms)
        return decision


@signals.worker_init.connect
def record_decisions(**_: Any) -> None:
    LimiterPool._limiter_type = RecordingLimiter


@signals.worker_ready.connect
def ready(sender: Any, **_: Any) -> None:
    records.rpush("ready", str(sender))


@task_parked.connect
def parked(sender: Any, request: Any, **_: Any) -> None:
    records.rpush("parked", request.id)


@task_sent_back.connect
def sent_back(sender: Any, request: Any, **_: Any) -> None:
    records.rpush("sent_back", request.id)


@app.task(bind=True, **json.loads(os.environ.get("OPTIONS", "{}")))
def fetch(self: Any, number: int, seconds: float = 0.01, tenant: str = "") -> int:
    records.rpush("starts", json.dumps([number, time.time(), os.getpid(), tenant]))
    time.sleep(seconds)
    records.rpush("ends", number)
    return number


@app.task
def free(number: int, seconds: float = 0.0) -> int:
    records.rpush("free", json.dumps([number, time.time()]))
    time.sleep(seconds)
    return number
