"""Scenario `cold_start`: `eventual`, one process alone, many keys from the very first moment.

One process alone admits never more than the limit in a window, and no count is lost.
"""

from __future__ import annotations

import itertools
import time

from distwindow import Limit
from tests.attack.children import Child
from tests.attack.frame import Run, Violation, derived
from tests.attack.stored import all_stored, conserved
from tests.servers import Delay, Pass, Proxy, Standalone

LIMIT = Limit("60/hour")
KEYS = 2000


def cold_start(run: Run) -> None:
    """Starts one after the other; every third over a link that is slow."""
    with Standalone() as server, Proxy(server.port) as proxy:
        until = time.monotonic() + run.seconds
        for start in itertools.count():
            if start and time.monotonic() >= until:
                return
            proxy.fault = Delay(requests=0.01) if start % 2 else Pass()
            _one(run, server, proxy.url, start)


def _one(run: Run, server: Standalone, url: str, start: int) -> None:
    told = {
        "url": url, "prefix": f"cold-{start}", "limit": str(LIMIT), "keys": KEYS, "threads": 3,
        "seed": derived(run.seed, start), "seconds": 0.5,
    }  # fmt: skip
    with Child("cold_child", told) as child:
        code = child.ended(60)
        facts = next((facts for facts in child.said() if facts.get("done")), None)
        if code != 0 or facts is None:
            raise Violation(f"cold start: exit {code}", [child.complaints()[-4000:]])
    allowed: dict[str, int] = facts["allowed"]
    refused: dict[str, int] = facts["refused"]
    history = [f"start {start}, plan {told}"]
    run.count("starts")
    run.count("calls", facts["calls"])
    for key, permits in allowed.items():
        if permits > LIMIT.amount:
            raise Violation(f"one process alone admitted {permits} of {LIMIT} on {key}", history)
    with server.client(decode_responses=False) as client:
        counts = all_stored(client, told["prefix"], allowed.keys() | refused.keys(), LIMIT)  # type: ignore[arg-type]
    for what, mine, theirs in (
        ("permits", allowed, {key: count.passed for key, count in counts.items()}),
        ("blocked permits", refused, {key: count.blocked for key, count in counts.items()}),
    ):
        conserved(f"cold start, {what}", theirs, mine, {}, history=history)
