"""dramatiq with one limit per tenant: python examples/dramatiq_limits.py [URL]

The worker runs in this process here; `dramatiq MODULE` starts as many as you like, on any host, and
all of them share the limits.
"""

import sys
import time

import dramatiq
from dramatiq.brokers.redis import RedisBroker

from distwindow.contrib.dramatiq import RateLimits

URL = sys.argv[1] if len(sys.argv) > 1 else "redis://localhost:6379/0"
CALLS = [("acme", n) for n in range(6)] + [("initech", n) for n in range(3)]

broker = RedisBroker(url=URL, namespace="examples-dramatiq")  # type: ignore[no-untyped-call]
broker.add_middleware(RateLimits(URL))
began = time.monotonic()
done: list[tuple[str, int]] = []


# Three calls per tenant in 500 ms, and a thousand in an hour. A message that is refused is delayed
# until its turn; no retry is used up.
@dramatiq.actor(broker=broker, limits=["3/500ms", "1000/hour"], limit_key="dramatiq:{tenant}")
def fetch(tenant: str, number: int) -> None:
    # One string with its end, because two threads print.
    print(f"{tenant} {number} after {time.monotonic() - began:.2f} s\n", end="")
    done.append((tenant, number))


def main() -> None:
    for tenant, number in CALLS:
        fetch.send(tenant, number)
    worker = dramatiq.Worker(broker, worker_threads=2, worker_timeout=100)
    worker.start()
    while len(done) < len(CALLS) and time.monotonic() - began < 30:
        time.sleep(0.05)
    worker.stop()
    print(f"{len(done)} of {len(CALLS)} done")


if __name__ == "__main__":
    main()
