"""A client of limiters (`client.py`), which logs each call when it has returned.

Its plan: `windows` (the arguments of a limiter by the name of the window) and `calls`: a list of
`window`, `weight`, `keys` (`{name}` becomes the name of the process), `costs`, `priorities` if not
all calls are plain, and `waits`, in seconds, if they wait, of which each call is drawn.
"""

from __future__ import annotations

import random
import time
from typing import Any

from distwindow import AsyncLimiter, Decision, Limiter, StoreError
from tests.attack.children import now_ms
from tests.attack.client import Client, ClientLog, Op, Work, result_of


class Call(Op):
    """One call of a limiter."""

    name = "a call"
    expected = (StoreError,)

    def __init__(self, callers: Callers, rng: random.Random) -> None:
        plan = callers.plan
        (drawn,) = rng.choices(plan["calls"], [kind["weight"] for kind in plan["calls"]])
        self.window = drawn["window"]
        self.key = rng.choice(drawn["keys"]).format(name=callers.log.name)
        self.cost = rng.choice(drawn["costs"])
        self.priority = rng.choice(drawn.get("priorities", [False]))
        self.waits = drawn.get("waits")
        self.limiter, self.options = callers.limiters[self.window], plan["windows"][self.window]
        self.decision: Decision | None = None
        self.at = self.took = 0.0
        self.wall = 0.0

    async def run_async(self) -> None:
        self.at, self.wall = now_ms(), time.time() * 1000
        try:
            if self.waits is None:
                call = self.limiter.try_acquire(self.key, self.cost, self.priority)
            else:
                call = self.limiter.acquire(self.key, self.cost, timeout=self.waits)
            self.decision = await result_of(call)
        finally:
            self.took = now_ms() - self.at

    def note(self, log: ClientLog, raised: BaseException | None, interrupted: bool) -> None:
        decision = self.decision
        facts: dict[str, Any] = {}
        if decision is not None:
            by: str = decision.source
            if decision.reason == "store_down" and by == "local":
                by = "share"
            facts |= {"ok": decision.allowed, "by": by, "now": decision.now_ms, "wall": self.wall}
            facts |= {"reason": decision.reason, "wait_ms": round(decision.wait * 1000)}
        else:
            is_known = isinstance(raised, StoreError) and raised.charged is not None
            facts |= {"ok": False if is_known else None, "by": "error"}
        if facts["by"] in ("error", "policy", "share"):
            facts["why"] = str(self.limiter.health().last_error)[:150]
        log.write(
            window=self.window, key=self.key, cost=self.cost, priority=self.priority,
            at=round(self.at), took=self.took, mode=self.options["consistency"],
            late_ms=round(self.took - 1000 * self.options["timeout"]), **facts,
        )  # fmt: skip


class Callers(Work):
    """The limiters of one client."""

    interrupts = False

    def open(self) -> None:
        windows = self.plan["windows"]
        self.limiters = {
            window: self.make(Limiter, AsyncLimiter, **given) for window, given in windows.items()
        }

    def op(self, rng: random.Random) -> Op:
        return Call(self, rng)

    async def close(self) -> None:
        unknown = 0
        for limiter in self.limiters.values():
            await self.flush(limiter)
            await self.end(limiter)
            unknown += limiter.unknown_total
        self.log.write(unknown=unknown)


if __name__ == "__main__":
    Client(Callers).run()
