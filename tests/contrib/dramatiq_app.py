"""dramatiq tests.contrib.dramatiq_app; and `python -m tests.contrib.dramatiq_app job FIRST END`
enqueues jobs.
"""

import sys

import dramatiq
from dramatiq.brokers.redis import RedisBroker

from distwindow.contrib.dramatiq import RateLimits
from tests.contrib.recorder import LIMIT, STORE_URL, URL, job_started, record_decisions

record_decisions()
# Messages of a killed worker are taken over after two seconds, and not after a minute.
broker = RedisBroker(url=URL, heartbeat_timeout=2000, maintenance_chance=1_000_000)
broker.add_middleware(RateLimits(STORE_URL))
dramatiq.set_broker(broker)


@dramatiq.actor(limits=LIMIT, limit_key="tenant:{tenant}", max_retries=0)
def job(tenant: str, number: int) -> None:
    job_started(number)


@dramatiq.actor
def free(tenant: str, number: int) -> None:
    job_started(number)


if __name__ == "__main__":
    name, first, end = sys.argv[1:]
    for number in range(int(first), int(end)):
        {"job": job, "free": free}[name].send("acme", number)
