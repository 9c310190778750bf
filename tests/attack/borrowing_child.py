"""A client of scenario `borrowing`: plain calls, priority calls, refunds, and waits."""

from __future__ import annotations

import random
from typing import Any

from distwindow import (
    AsyncLimiter,
    Decision,
    Limiter,
    RateLimitExceeded,
    StoreError,
)
from tests.attack.client import Client, ClientLog, Op, Work, now_ms

KEY_MS = 700
"""The keys of the long window change so often, for all processes at once."""


class Call(Op):
    """One call, and maybe its refund."""

    expected = (StoreError, RateLimitExceeded)

    def __init__(self, limiters: dict[str, Any], rng: random.Random) -> None:
        self.window = rng.choice(["short", "long"])
        self.key = "k" if self.window == "short" else f"k{int(now_ms() // KEY_MS)}"
        self.limiter = limiters[self.window]
        self.cost = rng.choice([1, 1, 1, 2, 3])
        self.priority = rng.random() < 0.5
        self.waits = self.window == "short" and rng.random() < 0.1
        self.refunds = rng.random() < 0.2
        self.name = f"{'acquire' if self.waits else 'try_acquire'} of {self.window}"
        self.decision: Decision | None = None
        self.given: int | None = None

    def run(self) -> None:
        if self.waits:
            self.decision = self.limiter.acquire(
                self.key, self.cost, timeout=0.4, priority=self.priority
            )
        else:
            self.decision = self.limiter.try_acquire(self.key, self.cost, self.priority)
        if self.refunds and self.decision:
            self.given = self.limiter.refund(self.decision)

    async def run_async(self) -> None:
        if self.waits:
            self.decision = await self.limiter.acquire(
                self.key, self.cost, timeout=0.4, priority=self.priority
            )
        else:
            self.decision = await self.limiter.try_acquire(self.key, self.cost, self.priority)
        if self.refunds and self.decision:
            self.given = await self.limiter.refund(self.decision)

    def note(self, log: ClientLog, raised: BaseException | None, interrupted: bool) -> None:
        decision, sure, unsure = self.decision, 0, 0
        given_back: int | None = self.given if self.refunds else 0
        if decision is None:
            refused = isinstance(raised, RateLimitExceeded) and not interrupted
            not_charged = isinstance(raised, StoreError) and raised.charged is False
            unsure = 0 if refused or not_charged else self.cost
        elif decision and given_back is None:
            unsure = self.cost  # it may have been given back
        elif decision:
            sure = self.cost - (given_back or 0)
        if decision:
            log.write(
                call=self.window,
                key=self.key,
                cost=self.cost,
                now=decision.now_ms,
                wait=decision.wait,
                reason=decision.reason,
                left=sure,
            )
        if self.window == "long":
            name = f"permits {self.key}"
            if decision is None or not decision:
                log.write(call="long", key=self.key, now=0)
            log.write(sure={name: sure}, unsure={name: unsure})


class Calls(Work):
    """The limiters of one client."""

    def _options(self, window: str) -> dict[str, Any]:
        return {
            "limits": self.plan[window],
            "prefix": f"{self.plan['prefix']}-{window}",
            "consistency": self.plan["mode"],
            "timeout": self.plan["timeout"],
            "borrow_share": self.plan["share"],
            "max_wait": 0.3 if window == "short" else 86400.0,
        }

    def open(self) -> None:
        url = self.plan["url"]
        self.limiters: dict[str, Any] = {
            window: Limiter(url, **self._options(window)) for window in ("short", "long")
        }

    async def open_async(self) -> None:
        url = self.plan["url"]
        self.limiters = {
            window: AsyncLimiter(url, **self._options(window)) for window in ("short", "long")
        }

    def op(self, rng: random.Random) -> Op:
        return Call(self.limiters, rng)

    def close(self) -> None:
        for limiter in self.limiters.values():
            limiter.close()

    async def close_async(self) -> None:
        for limiter in self.limiters.values():
            await limiter.aclose()


if __name__ == "__main__":
    Client(Calls).run()
