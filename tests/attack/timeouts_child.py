"""The child of scenario `timeouts`."""

from __future__ import annotations

import asyncio
import random
import time
from collections import Counter, deque
from typing import Any

from distwindow import AsyncLimiter, StoreError
from tests.attack.children import dump_stacks_on_sigquit, read_plan, report, restart_watchdog

LEASE_S = 0.25
"""A lease is at most the demand of this time."""


class Calls:
    """The calls of all tasks, and their outcomes."""

    def __init__(self, plan: dict[str, Any]) -> None:
        self.plan = plan
        self.rng = random.Random(plan["seed"])
        self.left = plan["calls"]
        names = [f"k{number}" for number in range(plan["keys"])]
        self.certain: Counter[str] = Counter(dict.fromkeys(names, 0))
        self.unsure: Counter[str] = Counter()
        self.figures: Counter[str] = Counter()
        self.lease: Counter[str] = Counter(dict.fromkeys(names, 2))
        self._recent: dict[str, deque[float]] = {name: deque() for name in names}
        self.names = names

    async def work(self, long_timeout: AsyncLimiter, short_timeout: AsyncLimiter) -> None:
        rng = self.rng
        while self.left > 0:
            self.left -= 1
            key, cost = rng.choice(self.names), 1
            self._observe_demand(key)
            self.figures["calls"] += 1
            try:
                if rng.random() < 0.7:
                    wait = rng.random() * 0.002
                    decision = await asyncio.wait_for(long_timeout.try_acquire(key, cost), wait)
                else:
                    decision = await short_timeout.try_acquire(key, cost)
                self.certain[key] += cost if decision else 0
            except (asyncio.TimeoutError, TimeoutError):
                self.unsure[key] += cost
                self.figures["cancelled"] += 1
            except StoreError as exc:
                self.figures[f"StoreError charged={exc.charged}"] += 1
                if exc.charged is None:
                    self.unsure[key] += cost
            # The calls are rare, so that a lease, which is the demand of LEASE_S, is small.
            await asyncio.sleep(rng.random() * 0.02)

    def _observe_demand(self, key: str) -> None:
        """Count the call towards the most calls in LEASE_S."""
        now, recent = time.monotonic(), self._recent[key]
        recent.append(now)
        while recent[0] < now - LEASE_S:
            recent.popleft()
        self.lease[key] = max(self.lease[key], len(recent) + 2)


async def main() -> None:
    plan = read_plan()
    calls = Calls(plan)

    def make_limiter(timeout: float) -> AsyncLimiter:
        return AsyncLimiter(
            plan["url"], plan["limit"], prefix=plan["prefix"], consistency="leased", timeout=timeout
        )

    long_timeout, short_timeout = make_limiter(0.25), make_limiter(0.002)
    await asyncio.gather(*(calls.work(long_timeout, short_timeout) for _ in range(plan["tasks"])))
    calls.figures["unknown"] = long_timeout.unknown_total + short_timeout.unknown_total
    await long_timeout.aclose()
    await short_timeout.aclose()
    report(
        done=True,
        certain=calls.certain,
        unsure=calls.unsure,
        lease=calls.lease,
        figures=calls.figures,
    )


if __name__ == "__main__":
    dump_stacks_on_sigquit()
    restart_watchdog(300)
    asyncio.run(main())
