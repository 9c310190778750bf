"""The child of scenario `timeouts`."""

from __future__ import annotations

import asyncio
import random
import time
from collections import Counter, deque
from typing import Any

from distwindow import AsyncLimiter, StoreError
from tests.attack.children import alive_for, plan, say, watched

LEASE_S = 0.25
"""A lease is at most the demand of so long."""


class Calls:
    """The calls of all tasks and what became of them."""

    def __init__(self, told: dict[str, Any]) -> None:
        self.told = told
        self.rng = random.Random(told["seed"])
        self.left = told["calls"]
        names = [f"k{number}" for number in range(told["keys"])]
        self.certain: Counter[str] = Counter(dict.fromkeys(names, 0))
        self.unsure: Counter[str] = Counter()
        self.figures: Counter[str] = Counter()
        self.lease: Counter[str] = Counter(dict.fromkeys(names, 2))
        self._recent: dict[str, deque[float]] = {name: deque() for name in names}
        self.names = names

    async def work(self, patient: AsyncLimiter, hasty: AsyncLimiter) -> None:
        rng = self.rng
        while self.left > 0:
            self.left -= 1
            key, cost = rng.choice(self.names), 1
            self._demanded(key)
            self.figures["calls"] += 1
            try:
                if rng.random() < 0.7:
                    wait = rng.random() * 0.002
                    decision = await asyncio.wait_for(patient.try_acquire(key, cost), wait)
                else:
                    decision = await hasty.try_acquire(key, cost)
                self.certain[key] += cost if decision else 0
            except (asyncio.TimeoutError, TimeoutError):
                self.unsure[key] += cost
                self.figures["cancelled"] += 1
            except StoreError as exc:
                self.figures[f"StoreError charged={exc.charged}"] += 1
                if exc.charged is None:
                    self.unsure[key] += cost
            # At a pace at which a lease, which is the demand of a quarter of a second, is small.
            await asyncio.sleep(rng.random() * 0.02)

    def _demanded(self, key: str) -> None:
        """The most calls within the time that a lease covers."""
        now, recent = time.monotonic(), self._recent[key]
        recent.append(now)
        while recent[0] < now - LEASE_S:
            recent.popleft()
        self.lease[key] = max(self.lease[key], len(recent) + 2)


async def main() -> None:
    told = plan()
    calls = Calls(told)

    def made(timeout: float) -> AsyncLimiter:
        return AsyncLimiter(
            told["url"], told["limit"], prefix=told["prefix"], consistency="leased", timeout=timeout
        )

    patient, hasty = made(0.25), made(0.002)
    await asyncio.gather(*(calls.work(patient, hasty) for _ in range(told["tasks"])))
    calls.figures["unknown"] = patient.unknown_total + hasty.unknown_total
    await patient.aclose()
    await hasty.aclose()
    say(
        done=True,
        certain=calls.certain,
        unsure=calls.unsure,
        lease=calls.lease,
        figures=calls.figures,
    )


if __name__ == "__main__":
    watched()
    alive_for(300)
    asyncio.run(main())
