"""Scenario `timeouts`: many asynchronous calls with tiny timeouts, with `leased`.

Beyond the calls that returned, the server has charged at most the calls of unknown outcome and one
lease for each key.
"""

from __future__ import annotations

import asyncio
import itertools
import random
import time
from collections import Counter, deque
from typing import Any

from distwindow import AsyncLimiter, Limit, StoreError
from tests.attack.children import (
    Child,
    dump_stacks_on_sigquit,
    read_plan,
    report,
    restart_watchdog,
)
from tests.attack.harness import FOREVER, Run, derive_seed
from tests.attack.history import check_conserved, read_named
from tests.servers import Delay, Proxy, Standalone

CALLS = 10_000
LEASE_S = 0.25
"""A lease is at most the demand of this time."""


def timeouts(run: Run) -> None:
    """Play batches of calls until the time is up; `only` is the number of calls in a batch."""
    calls = int(run.only or CALLS)
    with Standalone() as server, Proxy(server.port) as proxy:
        until = time.monotonic() + run.seconds
        for batch in itertools.count():
            if batch and time.monotonic() >= until:
                return
            proxy.fault = Delay(requests=0.0003, replies=[0.0, 0.0007, 0.0015][batch % 3])
            _one(run, server, proxy.url, batch, calls)


def _one(run: Run, server: Standalone, url: str, batch: int, calls: int) -> None:
    plan: dict[str, Any] = {
        "url": url, "prefix": f"timeouts-{batch}", "keys": 4, "tasks": 20, "calls": calls,
        "seed": derive_seed(run.seed, batch),
    }  # fmt: skip
    with Child("timeouts", plan) as child:
        facts = child.facts(calls / 50 + 60)
    run.gather(facts["figures"])
    certain = facts["certain"]
    with server.client(decode_responses=False) as client:
        stored = read_named(client, plan["prefix"], certain, Limit(FOREVER), "passed")
    leases = sum(facts["lease"].values())
    over, _ = check_conserved(
        f"timeouts, batch {batch}",
        stored,
        certain,
        facts["unsure"],
        more=leases,
        history=[f"plan {plan}", {"one lease for each key": leases, **facts["figures"]}],
    )
    run.count("permits stranded", over)


# -- the child --


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
            plan["url"], FOREVER, prefix=plan["prefix"], consistency="leased", timeout=timeout
        )

    long_timeout, short_timeout = make_limiter(0.25), make_limiter(0.002)
    await asyncio.gather(*(calls.work(long_timeout, short_timeout) for _ in range(plan["tasks"])))
    calls.figures["unknown"] = long_timeout.unknown_total + short_timeout.unknown_total
    await long_timeout.aclose()
    await short_timeout.aclose()
    report(
        done=True, certain=calls.certain, unsure=calls.unsure, lease=calls.lease,
        figures=calls.figures,
    )  # fmt: skip


if __name__ == "__main__":
    dump_stacks_on_sigquit()
    restart_watchdog(300)
    asyncio.run(main())
