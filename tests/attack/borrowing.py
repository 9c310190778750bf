"""Scenario `borrowing`: calls with and without priority, refunds and waits, over a faulty link.

With borrowed permits in the bucket in which their call proceeds, no window holds more than the
limit, nor more borrowed permits than the share; every permit, borrowed or not, is counted once.
"""

from __future__ import annotations

import random
from typing import Any

from distwindow import AsyncLimiter, Decision, Limit, Limiter, RateLimitExceeded, StoreError
from distwindow.ring.key import ring_name, ring_name_prefix
from distwindow.ring.replies import ring_state
from tests.attack.children import now_ms
from tests.attack.client import Client, ClientLog, Op, Work, result_of
from tests.attack.fleet import attacked, play_fleets
from tests.attack.harness import Run
from tests.attack.history import (
    Admitted,
    History,
    check_aligned_windows,
    check_any_window,
    check_tallies,
)
from tests.servers import Standalone

VARIANTS = ["direct", "leased"]
SHORT = [
    "40/second", "30/second strict 10 buckets", "100/2s 10 buckets", "12/500ms 5 buckets",
    "30/500ms strict 10 buckets",
]  # fmt: skip
LONG = Limit("200/day 1 buckets")
"""Each key is full after some calls, and then lends permits of tomorrow."""
KEY_MS = 700
"""The keys of the long window change so often, for all processes at once."""
MAX_COST = 3


def borrowing(run: Run) -> None:
    """The seed draws the consistency, the limit and the faults."""
    play_fleets(run, "borrowing", ["direct", "direct", "leased"], _play)


def _play(run: Run, rng: random.Random, server: Standalone, mode: str, seconds: float) -> None:
    limit, share = Limit(rng.choice(SHORT)), rng.choice([0.3, 0.5, 1.0])
    plan = {
        "prefix": "borrowing", "mode": mode, "short": str(limit), "long": str(LONG),
        "share": share, "timeout": 0.5,
    }  # fmt: skip
    with attacked(run, rng, server, "borrowing", plan, seconds) as (_, history):
        _check_windows(run, history, limit, share)
        if mode == "direct":  # with `leased`, a lost lease is counted as well
            keys = {line["key"] for _, line in history.having("call") if line["call"] == "long"}
            # Three threads of each process, and each may be in a call of the greatest cost.
            under_way = len(history.dead) * 4 * MAX_COST
            stored = {f"permits {key}": _stored(server, key) for key in keys}
            check_tallies("permits", stored, history, sent_later=False, under_way=under_way)
            run.count("keys checked", len(keys))


def _check_windows(run: Run, history: History, limit: Limit, share: float) -> None:
    calls = [line for _, line in history.having("call") if line["call"] == "short" and line["now"]]
    run.count("calls", len(calls))
    admitted = [_admitted(line) for line in calls]
    borrowed = [_admitted(line) for line in calls if line["reason"] == "borrowed"]
    of_all_windows = [line.get("reason") for _, line in history.having("call")]
    run.count("calls that borrowed", of_all_windows.count("borrowed"))
    run.count("refunds", sum(line["left"] < line["cost"] for line in calls))
    check_aligned_windows(admitted, limit.amount, limit.bucket_ms, limit.span)
    check_aligned_windows(borrowed, int(limit.amount * share), limit.bucket_ms, limit.span)
    if limit.bound == "strict":
        check_any_window(admitted, limit.amount, limit.interval_ms)


def _admitted(line: dict[str, Any]) -> Admitted:
    """Return the call at the moment at which it may proceed."""
    return Admitted(line["key"], line["now"] + round(line["wait"] * 1000), line["left"])


def _stored(server: Standalone, key: str) -> int:
    """Return all permits of a ring, those of coming buckets included."""
    name = ring_name(ring_name_prefix("borrowing-long", key), LONG)
    with server.client(decode_responses=False) as client:
        state = ring_state(client.hgetall(name), LONG.bucket_ms, LONG.span)
    if state is None:
        return 0
    return sum(bucket.passed for bucket in state.buckets) + sum(b.borrowed for b in state.coming)


# -- the client --


class Call(Op):
    """One call, and maybe its refund."""

    expected = (StoreError, RateLimitExceeded)

    def __init__(self, limiters: dict[str, Any], rng: random.Random) -> None:
        self.window = rng.choice(["short", "long"])
        self.key = "k" if self.window == "short" else f"k{int(now_ms() // KEY_MS)}"
        self.limiter = limiters[self.window]
        self.cost = rng.choice([1, 1, 1, 2, MAX_COST])
        self.priority = rng.random() < 0.5
        self.waits = self.window == "short" and rng.random() < 0.1
        self.refunds = rng.random() < 0.2
        self.name = f"{'acquire' if self.waits else 'try_acquire'} of {self.window}"
        self.decision: Decision | None = None
        self.given: int | None = None

    async def run_async(self) -> None:
        if self.waits:
            call = self.limiter.acquire(self.key, self.cost, timeout=0.4, priority=self.priority)
        else:
            call = self.limiter.try_acquire(self.key, self.cost, self.priority)
        self.decision = await result_of(call)
        if self.refunds and self.decision:
            self.given = await result_of(self.limiter.refund(self.decision))

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
                call=self.window, key=self.key, cost=self.cost, now=decision.now_ms,
                wait=decision.wait, reason=decision.reason, left=sure,
            )  # fmt: skip
        if self.window == "long":
            name = f"permits {self.key}"
            if decision is None or not decision:
                log.write(call="long", key=self.key, now=0)
            log.write(sure={name: sure}, unsure={name: unsure})


class Calls(Work):
    """The limiters of one client."""

    def open(self) -> None:
        self.limiters = {
            window: self.make(
                Limiter, AsyncLimiter, limits=self.plan[window],
                prefix=f"{self.plan['prefix']}-{window}", consistency=self.plan["mode"],
                timeout=self.plan["timeout"], borrow_share=self.plan["share"],
                max_wait=0.3 if window == "short" else 86400.0,
            )
            for window in ("short", "long")
        }  # fmt: skip

    def op(self, rng: random.Random) -> Op:
        return Call(self.limiters, rng)

    async def close(self) -> None:
        for limiter in self.limiters.values():
            await self.end(limiter)


if __name__ == "__main__":
    Client(Calls).run()
