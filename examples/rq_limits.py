"""RQ with one limit per tenant: python examples/rq_limits.py [URL]

The worker runs in this process here. In earnest, start as many as you like, on any host:
rq worker --worker-class distwindow.contrib.rq.LimitedWorker
"""

import sys
import time

import redis
import rq

from distwindow.contrib.rq import LimitedSimpleWorker, RateLimits

URL = sys.argv[1] if len(sys.argv) > 1 else "redis://localhost:6379/0"
CALLS = [("acme", n) for n in range(6)] + [("initech", n) for n in range(3)]

rate_limits = RateLimits(URL)
began = time.monotonic()


# Three calls per tenant in 500 ms, and a thousand in an hour. A job that is refused is scheduled
# for its turn; no retry is used up.
@rate_limits.limit(limits=["3/500ms", "1000/hour"], limit_key="rq:{tenant}")
def fetch(tenant: str, number: int) -> None:
    print(f"{tenant} {number} after {time.monotonic() - began:.2f} s")


def main() -> None:
    queue = rq.Queue("examples-rq", connection=redis.Redis.from_url(URL))
    jobs = [queue.enqueue("rq_limits.fetch", *call) for call in CALLS]
    worker = LimitedSimpleWorker([queue], connection=queue.connection)
    worker.work(max_jobs=len(CALLS), logging_level="WARNING")  # jobs that wait do not count
    print(f"{sum(job.is_finished for job in jobs)} of {len(CALLS)} done")


if __name__ == "__main__":
    main()
