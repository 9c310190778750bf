"""rq worker --worker-class distwindow.contrib.rq.LimitedWorker jobs; and
`python -m tests.contrib.rq_app job FIRST END` enqueues jobs.
"""

import sys

import redis
import rq

from distwindow.contrib.rq import RateLimits
from tests.contrib.recorder import LIMIT, STORE_URL, URL, job_started, record_decisions

record_decisions()
rate_limits = RateLimits(STORE_URL)


@rate_limits.limit(limits=LIMIT, limit_key="tenant:{tenant}")
def job(tenant: str, number: int) -> None:
    job_started(number)


def free(tenant: str, number: int) -> None:
    job_started(number)


if __name__ == "__main__":
    name, first, end = sys.argv[1:]
    queue = rq.Queue("jobs", connection=redis.Redis.from_url(URL))
    for number in range(int(first), int(end)):
        queue.enqueue(f"tests.contrib.rq_app.{name}", "acme", number)
