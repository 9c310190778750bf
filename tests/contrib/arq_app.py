"""arq tests.contrib.arq_app.WorkerSettings; and `python -m tests.contrib.arq_app job FIRST END`
enqueues jobs.
"""

import asyncio
import sys
from typing import Any

from arq import create_pool
from arq.connections import RedisSettings

from distwindow.contrib.arq import RateLimits
from tests.contrib.recorder import LIMIT, STORE_URL, URL, job_started, record_decisions

record_decisions()
rate_limits = RateLimits(STORE_URL)


@rate_limits.limit(limits=LIMIT, limit_key="tenant:{tenant}")
async def job(ctx: dict[Any, Any], tenant: str, number: int) -> None:
    job_started(number)


async def free(ctx: dict[Any, Any], tenant: str, number: int) -> None:
    job_started(number)


class WorkerSettings:
    """What the command `arq` reads."""

    functions = (job, free)
    redis_settings = RedisSettings.from_dsn(URL)
    job_timeout = 3
    """Seconds; the jobs of a killed worker are taken over ten seconds later."""
    max_tries = 2
    """A killed worker uses up one try of the jobs that it had."""


async def enqueue(name: str, first: int, end: int) -> None:
    pool = await create_pool(WorkerSettings.redis_settings)
    for number in range(first, end):
        await pool.enqueue_job(name, "acme", number)
    await pool.aclose()


if __name__ == "__main__":
    asyncio.run(enqueue(sys.argv[1], *map(int, sys.argv[2:])))
