"""In the child of scenario `interruptions`: the calls, and what each thread has counted of them."""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Callable
from functools import partial
from typing import Any

from distwindow import Limiter
from tests.attack.harness import FOREVER
from tests.attack.interrupter import now_s

TIMEOUT_S = 1.0
WAIT_S = 1.5
TIGHT = "5/day"


class CallCounts:
    """What one thread has counted of its calls. It changes by assignments only, which no signal
    handler interrupts.
    """

    def __init__(self) -> None:
        self.certain: dict[str, int] = defaultdict(int)
        self.unsure: dict[str, int] = defaultdict(int)
        self.ends: dict[str, int] = defaultdict(int)
        self.unsure_ends: dict[str, int] = defaultdict(int)
        self.blocked: dict[str, int] = defaultdict(int)
        self.unsure_blocked: dict[str, int] = defaultdict(int)
        self.key: str | None = None
        """The key of the call under way. `cost` is its cost, and `what` its kind."""
        self.cost = 0
        self.what = ""
        self.calls = 0
        self.worst_s = 0.0
        self.began = 0.0

    def on_error(self) -> None:
        """Count the call under way, which has raised, as one of unknown outcome."""
        key, cost = self.key, self.cost
        self.key = None
        if key is None:
            return
        if self.what == "refund":
            self.certain[key] -= cost
        if self.what == "tight":
            self.unsure_blocked[key] += cost
        else:
            self.unsure[key] += cost
        if self.what == "entry":
            self.unsure_ends[key] += 1


class Calls:
    """The limiters and the calls to them."""

    def __init__(self, plan: dict[str, Any]) -> None:
        self.plan = plan
        self.rng = random.Random(plan["seed"])
        self.keys = [f"k{number}" for number in range(plan["keys"])]
        self.unknown = 0
        self.waited = 0
        self.limiter = self.make_limiter(FOREVER)
        self.tight_limiter = self.make_limiter(TIGHT)

    def make_limiter(self, limit: str) -> Limiter:
        return Limiter(
            self.plan["url"],
            limit,
            prefix=self.plan["prefix"] + ("-tight" if limit == TIGHT else ""),
            consistency=self.plan["mode"],
            timeout=TIMEOUT_S,
            flush_interval=0.05,
            sync_interval=0.05,
        )

    def op(self, counts: CallCounts, rng: random.Random) -> tuple[str, Callable[[], None]]:
        """Return the next operation and its name."""
        draw = rng.random()
        if draw < 0.6:
            calls = [(rng.choice(self.keys), rng.choice([1, 1, 3])) for _ in range(40)]
            return "try_acquire", partial(self.hits, counts, calls)
        key = rng.choice(self.keys)
        for most, name in (
            (0.72, "tight"),
            (0.78, "entry"),
            (0.84, "refund"),
            (0.90, "acquire"),
            (0.94, "peek"),
            (0.97, "stats"),
        ):
            if draw < most:
                return name, partial(getattr(self, name), counts, key)
        return "flush", partial(self.flush, counts, key)

    def hits(self, counts: CallCounts, calls: list[tuple[str, int]]) -> None:
        certain, acquire, clock = counts.certain, self.limiter.try_acquire, now_s
        for number, (key, cost) in enumerate(calls):
            name = key.encode() if number % 3 == 0 else key
            counts.what, counts.cost, counts.key = "call", cost, key
            counts.began = clock()
            decision = acquire(name, cost)
            if decision[0]:
                certain[key] = certain[key] + cost
            counts.key = None
            counts.calls = counts.calls + 1
            spent = clock() - counts.began
            if spent > counts.worst_s:
                counts.worst_s = spent

    def tight(self, counts: CallCounts, key: str) -> None:
        name = "t" + key[-1]
        for _ in range(10):
            counts.what, counts.cost, counts.key = "tight", 2, name
            decision = self.tight_limiter.try_acquire(name, 2)
            if not decision[0]:
                counts.blocked[name] = counts.blocked[name] + 2
            counts.key = None

    def entry(self, counts: CallCounts, key: str) -> None:
        counts.what, counts.cost, counts.key = "entry", 1, key
        limiter = self.limiter
        try:
            with limiter.entry(key):
                if counts.calls % 2:
                    raise LookupError
        except LookupError:
            pass
        counts.certain[key] = counts.certain[key] + 1
        # The end of an entry whose limiter is being closed may not be recorded.
        ends = counts.ends if limiter is self.limiter else counts.unsure_ends
        ends[key] = ends[key] + 1
        counts.key = None

    def refund(self, counts: CallCounts, key: str) -> None:
        counts.what, counts.cost, counts.key = "call", 4, key
        decision = self.limiter.try_acquire(key, 4)
        counts.certain[key] = counts.certain[key] + 4
        counts.what = "refund"
        given = self.limiter.refund(decision)
        counts.certain[key] = counts.certain[key] - given
        counts.key = None

    def acquire(self, counts: CallCounts, key: str) -> None:
        counts.what, counts.cost, counts.key = "call", 1, key
        began = now_s()
        self.limiter.acquire(key, timeout=WAIT_S)
        if now_s() - began > WAIT_S * 0.8:
            self.waited = self.waited + 1  # no other call waits for this key for so long
        counts.certain[key] = counts.certain[key] + 1
        counts.key = None

    def peek(self, counts: CallCounts, key: str) -> None:
        self.limiter.peek(key)

    def stats(self, counts: CallCounts, key: str) -> None:
        self.limiter.stats(key)

    def flush(self, counts: CallCounts, key: str) -> None:
        self.limiter.flush()
