"""Scenario `process_exits`: all ways in which a process ends, with many keys and rare flushes.

However a process ends, what its calls have returned reaches the store, and its leases are refunded.
Beyond that at most the calls under way may have been counted.
"""

from __future__ import annotations

import random
import signal
import time
from typing import Any

from distwindow import Limit
from tests.attack.children import Child
from tests.attack.harness import FOREVER, MODES, Run, Violation, derive_seed
from tests.attack.history import check_conserved, read_all_counts
from tests.attack.shared_counts import SharedCounts
from tests.servers import Delay, Proxy, Standalone, until

WAYS = [
    "normal",
    "exception",
    "thread exits",
    "close amid calls",
    "sigterm",
    "sigterm amid threads",
    "fork",
    "async normal",
    "async without aclose",
    "async kept exceptions",
    "aclose amid calls",
    "async sigterm",
]
VARIANTS = [f"{mode}: {end}" for end in WAYS for mode in MODES]
KEYS = 2000
THREADS = 4
CLOSES = 4
END_S = 30.0
"""A process may flush for three seconds; the rest allows for a slow machine."""


def process_exits(run: Run) -> None:
    """Run variants in random order until the time is up; only `run.only` if it is given."""
    rng = random.Random(run.seed)
    # A slow link, so that a lease is often being fetched when its limiter closes.
    with Standalone() as server, Proxy(server.port) as proxy:
        proxy.fault = Delay(replies=0.03)
        stop, left = time.monotonic() + run.seconds, rng.sample(VARIANTS, len(VARIANTS))
        turn = 0
        while turn == 0 or time.monotonic() < stop:
            variant = run.only or left[turn % len(left)]
            url = proxy.url if "close amid" in variant else server.url
            _one(run, server, url, variant, turn)
            turn += 1


def _one(run: Run, server: Standalone, url: str, variant: str, turn: int) -> None:
    mode, way = variant.split(": ")
    counts = SharedCounts.create(2 * THREADS, KEYS)
    try:
        plan: dict[str, Any] = {
            "url": url, "prefix": f"exits-{turn}", "mode": mode, "way": way,
            # A direct limiter counts only cached refusals itself: nearly all calls are refused.
            "limit": "1/day" if mode == "direct" else FOREVER,
            "keys": KEYS, "threads": THREADS, "counts": str(counts.path),
            "seconds": 0.3 if run.seconds or "close amid" in way else 0.15,
            "seed": derive_seed(run.seed, turn), "closes": CLOSES,
        }  # fmt: skip
        history = [f"variant {variant!r}, plan {plan}"]
        before = _run_variant(run, plan, way, counts, history)
        _check_counts(run, server, plan, before, counts.sums(), history)
    finally:
        counts.remove()


def _run_variant(
    run: Run, plan: dict[str, Any], way: str, counts: SharedCounts, history: list[str]
) -> list[int]:
    """Run a child to its end; return what its calls had counted when it got the signal to end."""
    kind = "sigterm" if "sigterm" in way else way
    before: list[int] | None = None
    with Child("process_exits_child", plan) as child:
        if kind == "sigterm":
            until(lambda: counts.total() > 3000, timeout=20, what="calls before the SIGTERM")
            before = counts.sums()
            child.signal(signal.SIGTERM)
        began = time.monotonic()
        code = child.wait(END_S if kind == "sigterm" else 20)
        if kind == "sigterm":
            run.maximum("ms from SIGTERM to the end", int((time.monotonic() - began) * 1000))
        stderr = child.stderr()
    history.append(f"exit {code}; stderr: {stderr[-3000:]}")
    if code != {"sigterm": 128 + signal.SIGTERM, "exception": 1}.get(kind, 0):
        raise Violation(f"process_exits, {way}: exit {code}", history)
    return counts.sums() if before is None else before


def _check_counts(
    run: Run, server: Standalone, plan: dict[str, Any], before: list[int], after: list[int],
    history: list[str],
) -> None:  # fmt: skip
    """Check that what had returned `before` is counted; what returned until `after` may be."""
    names = [f"k{number}" for number in range(KEYS)]
    with server.client(decode_responses=False) as client:
        found = read_all_counts(client, plan["prefix"], names, Limit(plan["limit"]))
    mode, way = plan["mode"], plan["way"]
    # Direct: the refusals, and the one call of each key that was admitted.
    in_store = {
        name: count.passed + (count.blocked if mode == "direct" else 0)
        for name, count in found.items()
    }
    run.count("processes")
    run.count("calls", sum(after))
    over, _ = check_conserved(
        f"process_exits, {mode}: {way}",
        in_store,
        dict(zip(names, before, strict=True)),
        {name: late - early for name, early, late in zip(names, before, after, strict=True)},
        more=_unreturned(mode, way),
        history=history,
    )
    run.count("counted calls that did not return", over)


def _unreturned(mode: str, way: str) -> int:
    """Return the permits of calls that did not return: at most one call of each thread or task, and
    the lease that it may have fetched, which is small with so many keys.
    """
    if way in ("normal", "exception", "thread exits", "fork", "async normal"):
        return 0
    if way == "aclose amid calls" and mode == "leased":
        # It cancels calls, whose outcome is unknown then, each with the lease that it fetched.
        return THREADS * CLOSES * 16
    if "close amid" in way:
        return THREADS * CLOSES  # a lease that arrives that late is refunded
    return 2 * THREADS * (8 if mode == "leased" else 1)
