"""Scenario `ends`: processes that end in all ways, with many keys and long flush intervals.

What calls have returned arrives, however the process ends; leases are given back. At most the calls
that were under way may have counted besides.
"""

from __future__ import annotations

import random
import signal
import time

from distwindow import Limit
from tests.attack.children import Child
from tests.attack.frame import FOREVER, Run, Violation, derived
from tests.attack.shared_counts import SharedCounts
from tests.attack.stored import all_stored, conserved
from tests.servers import Delay, Proxy, Standalone, until

MODES = ["direct", "leased", "eventual"]
ENDS = [
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
VARIANTS = [f"{mode}: {end}" for end in ENDS for mode in MODES]
KEYS = 2000
THREADS = 4
CLOSES = 4
END_S = 8.0
"""A process may use three seconds for the telling; the rest is the machine's."""


def ends(run: Run) -> None:
    """Ways to end, drawn by the seed, until the time is up; or only the one that is asked for."""
    rng = random.Random(run.seed)
    # A link that is slow, so that a lease is often on its way when its limiter closes.
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
    # A direct limiter counts refusals by itself: nearly all of its calls are refused.
    limit = Limit("1/day" if mode == "direct" else FOREVER)
    prefix = f"ends-{turn}"
    counts = SharedCounts.made(2 * THREADS, KEYS)
    try:
        told = {
            "url": url, "prefix": prefix, "mode": mode, "way": way, "limit": str(limit),
            "keys": KEYS, "threads": THREADS, "counts": str(counts.path),
            "seconds": 0.3 if run.seconds or "close amid" in way else 0.15,
            "seed": derived(run.seed, turn), "closes": CLOSES,
        }  # fmt: skip
        history = [f"variant {variant!r}, plan {told}"]
        before = _play(run, told, way, counts, history)
        _conserved(run, server, variant, limit, prefix, before, counts.sums(), history)
    finally:
        counts.remove()


def _play(
    run: Run, told: dict[str, object], way: str, counts: SharedCounts, history: list[str]
) -> list[int]:
    """Run it to its end; what had been counted for sure when it was told to end."""
    kind = "sigterm" if "sigterm" in way else way
    before: list[int] | None = None
    with Child("ends_child", told) as child:
        if kind == "sigterm":
            until(lambda: counts.total() > 3000, timeout=20, what="calls before the SIGTERM")
            before = counts.sums()
            child.signal(signal.SIGTERM)
        began = time.monotonic()
        code = child.ended(END_S if kind == "sigterm" else 20)
        if kind == "sigterm":
            run.most("ms from SIGTERM to the end", int((time.monotonic() - began) * 1000))
        complaints = child.complaints()
    history.append(f"exit {code}; stderr: {complaints[-3000:]}")
    expected = {"sigterm": (-signal.SIGTERM, 128 + signal.SIGTERM), "exception": (1,)}
    if code not in expected.get(kind, (0,)):
        raise Violation(f"ends, {way}: exit {code}", history)
    return counts.sums() if before is None else before


def _conserved(
    run: Run,
    server: Standalone,
    variant: str,
    limit: Limit,
    prefix: str,
    before: list[int],
    after: list[int],
    history: list[str],
) -> None:
    """What had returned `before` has arrived; of what returned until the `after` some may have."""
    names = [f"k{number}" for number in range(KEYS)]
    with server.client(decode_responses=False) as client:
        found = all_stored(client, prefix, names, limit)
    direct = variant.startswith("direct")
    # Direct: what was refused, and for each key the one call that was admitted.
    theirs = {
        name: count.passed + (count.blocked if direct else 0) for name, count in found.items()
    }
    run.count("processes")
    run.count("calls", sum(after))
    over, _ = conserved(
        f"ends, {variant}",
        theirs,
        dict(zip(names, before, strict=True)),
        {name: late - early for name, early, late in zip(names, before, after, strict=True)},
        stranded=_unreturned(variant),
        history=history,
    )
    run.count("counted calls that did not return", over)


def _unreturned(variant: str) -> int:
    """Permits of calls that were cut off: at most one call of each thread or task, and where it was
    to fetch a lease, that lease, which is small with so many keys.
    """
    mode, way = variant.split(": ")
    if way in ("normal", "exception", "thread exits", "fork", "async normal"):
        return 0
    if way == "aclose amid calls" and mode == "leased":
        # It cuts calls off, whose outcome is unknown then, each with the lease it was to fetch.
        return THREADS * CLOSES * 16
    if "close amid" in way:
        return THREADS * CLOSES  # what a call fetches for others that late, it gives back
    return 2 * THREADS * (8 if mode == "leased" else 1)
