"""taskiq worker --receiver distwindow.contrib.taskiq:LimitedReceiver
tests.contrib.taskiq_app:broker; and `python -m tests.contrib.taskiq_app job FIRST END` enqueues.
"""

import asyncio
import sys

from taskiq_redis import RedisStreamBroker

from distwindow.contrib.taskiq import RateLimits
from tests.contrib.recorder import LIMIT, STORE_URL, URL, job_started, record_decisions

record_decisions()
# Messages that were not acknowledged for two seconds go to another worker, and not after ten
# minutes; the group reads the stream from its beginning.
broker = RedisStreamBroker(URL, consumer_id="0", idle_timeout=2000, xread_block=200)
broker = broker.with_middlewares(RateLimits(STORE_URL, max_hold=1.0))


@broker.task("job", limits=LIMIT, limit_key="tenant:{tenant}")
async def job(tenant: str, number: int) -> None:
    job_started(number)


@broker.task("free")
async def free(tenant: str, number: int) -> None:
    job_started(number)


async def enqueue(name: str, first: int, end: int) -> None:
    await broker.startup()
    for number in range(first, end):
        await {"job": job, "free": free}[name].kiq("acme", number)
    await broker.shutdown()


if __name__ == "__main__":
    asyncio.run(enqueue(sys.argv[1], *map(int, sys.argv[2:])))
