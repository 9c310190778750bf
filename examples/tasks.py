"""Tasks wait for permits in their order, without polling: python examples/tasks.py [URL]"""

import asyncio
import sys
import time

from distwindow import AsyncLimiter, RateLimitExceeded

TASKS = 12


async def main(url: str = "memory://") -> list[int]:
    admitted: list[int] = []
    async with AsyncLimiter(url, "5/200ms") as limiter:
        await limiter.reset("examples:tasks")
        started_at = time.monotonic()

        async def call(number: int) -> None:
            await limiter.acquire("examples:tasks", timeout=5.0)
            admitted.append(number)
            print(f"task {number:2} after {time.monotonic() - started_at:.2f} s")

        await asyncio.gather(*(call(number) for number in range(TASKS)))

        try:
            await limiter.acquire("examples:tasks", cost=5, timeout=0.0)
        except RateLimitExceeded as exc:
            print(f"without waiting: refused, {exc.retry_after:.2f} s too early")
    return admitted


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
