"""Scenario `cold_start`: `eventual`, one process that calls many keys before its first sync.

One process alone never admits more than the limit in a window, and no count is lost.
"""

from __future__ import annotations

import itertools
import time
from typing import Any

from distwindow import Limit
from tests.attack.children import Child
from tests.attack.harness import Run, Violation, derive_seed
from tests.attack.history import check_conserved, read_named
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
    plan: dict[str, Any] = {
        "url": url, "prefix": f"cold-{start}", "limit": str(LIMIT), "keys": KEYS, "threads": 3,
        "seed": derive_seed(run.seed, start), "seconds": 0.5, "mode": "eventual", "pause": 0,
    }  # fmt: skip
    with Child("cold_child", plan) as child:
        facts = child.facts(60)
    history = [f"start {start}, plan {plan}"]
    run.count("starts")
    run.count("calls", facts["calls"])
    allowed: dict[str, int] = facts["allowed"]
    for key, permits in allowed.items():
        if permits > LIMIT.amount:
            raise Violation(f"one process alone admitted {permits} of {LIMIT} on {key}", history)
    keys = allowed.keys() | facts["refused"].keys()
    with server.client(decode_responses=False) as client:
        for name, returned in (("passed", allowed), ("blocked", facts["refused"])):
            stored = read_named(client, plan["prefix"], keys, LIMIT, name)
            check_conserved(f"cold start, {name} permits", stored, returned, history=history)
