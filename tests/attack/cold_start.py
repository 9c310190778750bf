"""Scenario `cold_start`: `eventual`, one process that calls many keys before its first sync.

One process alone never admits more than the limit in a window, and no count is lost.
"""

from __future__ import annotations

import itertools
import time

from distwindow import Limit
from tests.attack.children import Child
from tests.attack.harness import Run, Violation, derive_seed
from tests.attack.server_counts import check_conserved, read_all_counts
from tests.servers import Delay, Pass, Proxy, Standalone

LIMIT = Limit("60/hour")
KEYS = 2000


def cold_start(run: Run) -> None:
    """Start one process after the other, every second one over a slow link."""
    with Standalone() as server, Proxy(server.port) as proxy:
        until = time.monotonic() + run.seconds
        for start in itertools.count():
            if start >= 2 and time.monotonic() >= until:
                return
            proxy.fault = Delay(requests=0.01) if start % 2 else Pass()
            _one(run, server, proxy.url, start)


def _one(run: Run, server: Standalone, url: str, start: int) -> None:
    plan = {
        "url": url, "prefix": f"cold-{start}", "limit": str(LIMIT), "keys": KEYS, "threads": 3,
        "seed": derive_seed(run.seed, start), "seconds": 0.5, "mode": "eventual", "pause": 0,
    }  # fmt: skip
    with Child("cold_child", plan) as child:
        code = child.wait(60)
        facts = next((facts for facts in child.reports() if facts.get("done")), None)
        if code != 0 or facts is None:
            raise Violation(f"cold start: exit {code}", [child.stderr()[-4000:]])
    allowed: dict[str, int] = facts["allowed"]
    refused: dict[str, int] = facts["refused"]
    history = [f"start {start}, plan {plan}"]
    run.count("starts")
    run.count("calls", facts["calls"])
    for key, permits in allowed.items():
        if permits > LIMIT.amount:
            raise Violation(f"one process alone admitted {permits} of {LIMIT} on {key}", history)
    with server.client(decode_responses=False) as client:
        # For mypy the values of `plan` are objects.
        counts = read_all_counts(client, plan["prefix"], allowed.keys() | refused.keys(), LIMIT)  # type: ignore[arg-type]
    for what, returned, in_store in (
        ("permits", allowed, {key: count.passed for key, count in counts.items()}),
        ("blocked permits", refused, {key: count.blocked for key, count in counts.items()}),
    ):
        check_conserved(f"cold start, {what}", in_store, returned, {}, history=history)
