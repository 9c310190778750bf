"""A Celery application whose tasks have a limit; see apps.py."""

from __future__ import annotations

import redis
from celery import Celery, signals
from prometheus_client import multiprocess

from tests.observer.apps import URL, limiters

app = Celery("project", broker=URL)
app.conf.update(broker_connection_retry_on_startup=True, worker_max_tasks_per_child=40)


@app.task
def call(way: str) -> None:
    """Count in the store what the limiter has said."""
    answer = "allowed" if limiters[way].try_acquire("all") else "refused"
    with redis.Redis.from_url(URL) as client:
        client.incr(f"{way} {answer}")


@signals.worker_process_shutdown.connect
def forget_process(pid: int, **_: object) -> None:
    multiprocess.mark_process_dead(pid)
