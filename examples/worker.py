"""A worker that never sleeps on a refused job: python examples/worker.py [URL]

The loop of a Celery worker in plain Python. A job that is refused goes back to the queue once, for
the moment its permit is free, and the worker takes the next one meanwhile. With a `redis://` URL
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
    # (when it may run, order, tenant, job)
    queue = [(now, order, tenant, job) for order, (tenant, job) in enumerate(JOBS)]
    heapq.heapify(queue)
    # All must admit: three at a time per tenant, and no more than a thousand an hour.
    with Limiter(url, ["3/200ms", "1000/hour"]) as limiter:
        for tenant in ("acme", "initech"):
            limiter.reset(f"examples:{tenant}")
        while queue:
            due, order, tenant, job = heapq.heappop(queue)
            time.sleep(max(0.0, due - time.monotonic()))  # nothing else is due before
            try:
                decision = limiter.try_acquire(f"examples:{tenant}")
            except StoreError as exc:
                # Unknown outcomes may have cost a permit; either way, try again in a second.
                print(f"{tenant} {job}: {exc} (charged: {exc.charged})")
                heapq.heappush(queue, (time.monotonic() + 1.0, order, tenant, job))
                continue
            if not decision:
                print(f"{tenant} {job}: back in {decision.retry_after:.2f} s ({decision.limit})")
                heapq.heappush(queue, (time.monotonic() + decision.retry_after, order, tenant, job))
                continue
            print(f"{tenant} {job}: done")
            done.append((tenant, job))
    return done


if __name__ == "__main__":
    main(*sys.argv[1:])
