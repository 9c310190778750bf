"""Scenario `interruptions`: exceptions of signal handlers at random moments, with every
consistency.

The four laws of docs/guarantees.md must hold: nothing hangs, no call ends after its deadline and
the worker goes on; the exception of the application arrives unchanged; and the server has counted
what the calls have returned, so that no more is lost or added than the interrupted calls.
"""

from __future__ import annotations

import itertools
import random
from typing import Any

from distwindow import Limit
from tests.attack.children import Child
from tests.attack.harness import FOREVER, MODES, Run, Violation, check_between, derive_seed
from tests.attack.history import check_conserved, read_all_counts
from tests.servers import Delay, Pass, Proxy, Silent, Standalone

LONG = Limit(FOREVER)
CALLING = [f"{mode}-{threads}" for mode in MODES for threads in (1, 4)]
CONNECTING = [f"connecting-{mode}-{link}" for mode in MODES for link in ("slow", "silent")]
VARIANTS = [*CALLING, *CONNECTING]


def interruptions(run: Run) -> None:
    """Run one variant: `run.only`, or one drawn by the seed."""
    rng = random.Random(run.seed)
    variant = run.only or rng.choice(CALLING if rng.random() < 0.75 else CONNECTING)
    if variant not in VARIANTS:
        raise ValueError(f"there is no variant {variant!r}; there are {', '.join(VARIANTS)}")
    with Standalone() as server, Proxy(server.port) as proxy:
        if variant.startswith("connecting-"):
            _, mode, link = variant.split("-")
            proxy.fault = Silent() if link == "silent" else Delay(requests=0.004, replies=0.002)
            _connecting(run, proxy.url, mode, silent=link == "silent")
            proxy.fault = Pass()
        else:
            mode, threads = variant.split("-")
            _calling(run, server, mode, int(threads))


def _connecting(run: Run, url: str, mode: str, *, silent: bool) -> None:
    plan = {
        "connecting": True, "url": url, "mode": mode, "prefix": "interruptions", "seed": run.seed,
        "seconds": run.seconds, "interruptions": 10**9, "silent": silent,
        "within": 0.06 if silent else 0.05,
    }  # fmt: skip
    _run_child(run, f"connecting-{mode}", plan)


def _calling(run: Run, server: Standalone, mode: str, threads: int, **more: Any) -> None:
    rng = random.Random(run.seed)
    seconds_left = run.seconds
    for turn in itertools.count():
        seconds = min(seconds_left, 15.0)
        if seconds < 0.5:
            return
        seconds_left -= seconds
        prefix = f"interruptions-{turn}"
        plan = {
            "connecting": False, "url": server.url, "direct_url": server.url, "mode": mode,
            "prefix": prefix, "seed": derive_seed(run.seed, turn), "seconds": seconds,
            "interruptions": 10**9, "threads": threads, "keys": rng.choice([3, 3, 2000]), **more,
        }  # fmt: skip
        facts = _run_child(run, f"{mode}-{threads}", plan)
        _check_counts(run, server, plan, facts)


def _run_child(run: Run, variant: str, plan: dict[str, Any]) -> dict[str, Any]:
    """Run a child to its end and return its last report; raise `Violation` for its faults."""
    with Child("interruptions_child", plan) as child:
        # `faulthandler.dump_traceback_later` ends a process that hangs with 1.
        facts = child.facts(plan["seconds"] + 60)
        stderr = child.stderr()
    figures: dict[str, int] = facts["figures"]
    run.gather({name: n for name, n in figures.items() if not name.startswith("wrong")})
    run.count(f"interruptions {variant}", figures.get("interruptions", 0))
    wrong = {name: n for name, n in figures.items() if name.startswith("wrong")}
    if wrong:
        shown = ", ".join(f"{n} {name[7:]}" for name, n in sorted(wrong.items()))
        raise Violation(
            f"interruptions {variant}, {figures.get('interruptions', 0)} interruptions: {shown}",
            [*facts["history"], stderr[-4000:]],
        )
    return facts


def _check_counts(
    run: Run, server: Standalone, plan: dict[str, Any], facts: dict[str, Any]
) -> None:
    prefix, mode = plan["prefix"], plan["mode"]
    sums: dict[str, dict[str, int]] = facts["sums"]
    with server.client(decode_responses=False) as client:
        keys = [f"k{number}" for number in range(plan["keys"])]
        counts = read_all_counts(client, prefix, keys, LONG)
        tight = read_all_counts(client, prefix + "-tight", sums["blocked"], Limit("5/day"))
    # An interrupted fetch may strand its lease, which is at most the calls of one key in a quarter
    # of a second; a fortieth of all calls allows for that.
    calls = sum(sums["certain"].values())
    interrupted = sum(sums["unsure"].values()) + facts["figures"]["unknown"]
    stranded = interrupted * (2 + calls // 40) if mode == "leased" else 0
    over, _ = check_conserved(
        f"interruptions {mode}: permits",
        {key: count.passed for key, count in counts.items()},
        sums["certain"],
        sums["unsure"],
        more=stranded,
    )
    run.count(f"permits stranded, {mode}", over)
    ends = sum(count.success + count.error for count in counts.values())
    sure = sum(sums["ends"].values())
    unsure = sum(sums["unsure_ends"].values())
    check_between(f"interruptions {mode}: ends of entries", ends, sure, sure + unsure)
    for key, count in tight.items():
        sure, unsure = sums["blocked"].get(key, 0), sums["unsure_blocked"].get(key, 0)
        what = f"interruptions {mode}: blocked permits of {key}"
        check_between(what, count.blocked, sure, sure + unsure)
