"""taskiq with one limit per tenant: python examples/taskiq_limits.py [URL]

The broker is in memory here, and runs the tasks in this process. In earnest, with a broker such as
`taskiq_redis.RedisStreamBroker`, start as many workers as you like, on any host:
taskiq worker --receiver distwindow.contrib.taskiq:LimitedReceiver MODULE:broker
"""

import asyncio
import sys
import time

from taskiq import InMemoryBroker

from distwindow.contrib.taskiq import RateLimits

URL = sys.argv[1] if len(sys.argv) > 1 else "memory://"
CALLS = [("acme", n) for n in range(6)] + [("initech", n) for n in range(3)]

broker = InMemoryBroker().with_middlewares(RateLimits(URL))
began = time.monotonic()
done: list[tuple[str, int]] = []


# Three calls per tenant in 500 ms, and a thousand in an hour. A task waits in its worker.
@broker.task(limits=["3/500ms", "1000/hour"], limit_key="taskiq:{tenant}")
async def fetch(tenant: str, number: int) -> None:
    print(f"{tenant} {number} after {time.monotonic() - began:.2f} s")
    done.append((tenant, number))


async def main() -> None:
    await broker.startup()
    for call in CALLS:
        await fetch.kiq(*call)
    await broker.wait_all()
    await broker.shutdown()
    print(f"{len(done)} of {len(CALLS)} done")


if __name__ == "__main__":
    asyncio.run(main())
