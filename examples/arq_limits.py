"""arq with one limit per tenant: python examples/arq_limits.py [URL]

The worker runs in this process here; `arq MODULE.WorkerSettings` starts as many as you like, on any
host, and all of them share the limits. arq needs redis-py below 6.
"""

import asyncio
import sys
import time
from typing import Any

from arq import Worker, create_pool
from arq.connections import RedisSettings

from distwindow.contrib.arq import RateLimits

URL = sys.argv[1] if len(sys.argv) > 1 else "redis://localhost:6379/0"
CALLS = [("acme", n) for n in range(6)] + [("initech", n) for n in range(3)]

rate_limits = RateLimits(URL)
began = time.monotonic()


# Three calls per tenant in 500 ms, and a thousand in an hour. A job waits for up to a second in its
# worker, and is deferred until its turn if that is later; no try is used up.
@rate_limits.limit(limits=["3/500ms", "1000/hour"], limit_key="arq:{tenant}")
async def fetch(ctx: dict[Any, Any], tenant: str, number: int) -> None:
    print(f"{tenant} {number} after {time.monotonic() - began:.2f} s")


async def main() -> None:
    pool = await create_pool(RedisSettings.from_dsn(URL), default_queue_name="examples-arq")
    for call in CALLS:
        await pool.enqueue_job("fetch", *call)
    # `burst` ends the worker when the queue is empty.
    worker = Worker([fetch], queue_name="examples-arq", redis_pool=pool, burst=True)
    await worker.main()
    print(f"{worker.jobs_complete} of {len(CALLS)} done")
    await worker.close()


if __name__ == "__main__":
    asyncio.run(main())
