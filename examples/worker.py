"""A worker that never sleeps on a refused job: python examples/worker.py [URL]

It is the loop of a Celery worker in plain Python. A refused job is queued again for the time at
which there is room for it, and the worker takes the next job meanwhile. With a `redis://` URL
several of these processes share the limits.
"""

import heapq
import sys
import time

from distwindow import Limiter, StoreError

JOBS = [("acme", n) for n in range(6)] + [("initech", n) for n in range(3)]


def main(url: str = "memory://") -> list[tuple[str, int]]:
    done: list[tuple[str, int]] = []
    now = time.monotonic()
    # (due, order, tenant, job)
    queue = [(now, order, tenant, job) for order, (tenant, job) in enumerate(JOBS)]
    heapq.heapify(queue)
    # Both limits must admit a job: three per tenant in 200 ms, and a thousand in an hour.
    with Limiter(url, ["3/200ms", "1000/hour"]) as limiter:
        for tenant in ("acme", "initech"):
            limiter.reset(f"examples:{tenant}")
        while queue:
            due, order, tenant, job = heapq.heappop(queue)
            time.sleep(max(0.0, due - time.monotonic()))  # the other jobs are due later
            try:
                decision = limiter.try_acquire(f"examples:{tenant}")
            except StoreError as exc:
                # `charged` is False if the call was not counted, None if that is unknown. Try again
                # in a second in both cases.
                print(f"{tenant} {job}: {exc} (charged: {exc.charged})")
                heapq.heappush(queue, (time.monotonic() + 1.0, order, tenant, job))
                continue
            if not decision:
                wait = decision.retry_after
                print(f"{tenant} {job}: refused by {decision.limit}, again in {wait:.2f} s")
                heapq.heappush(queue, (time.monotonic() + wait, order, tenant, job))
                continue
            print(f"{tenant} {job}: done")
            done.append((tenant, job))
    return done


if __name__ == "__main__":
    main(*sys.argv[1:])
