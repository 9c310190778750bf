"""Scenario `storm`: exceptions out of signal handlers at random moments, in every mode.

The application's exception must arrive as itself, no call may outlive its deadline, no thread may
hang, the worker must live, and what the server has counted must be what the calls have returned,
but for the interrupted ones.
"""

from __future__ import annotations

import itertools
import random
from typing import Any

from distwindow import Limit
from tests.attack.children import Child
from tests.attack.frame import FOREVER, Run, Violation, between, derived
from tests.attack.stored import all_stored, conserved
from tests.servers import Delay, Pass, Proxy, Silent, Standalone

LONG = Limit(FOREVER)
MODES = ["direct", "leased", "eventual"]
CALLING = [f"{mode}-{threads}" for mode in MODES for threads in (1, 4)]
CONNECTING = [f"connecting-{mode}-{link}" for mode in MODES for link in ("slow", "silent")]
VARIANTS = [*CALLING, *CONNECTING]


def storm(run: Run) -> None:
    """One variant for each run: the one that is asked for, or one drawn by the seed."""
    rng = random.Random(run.seed)
    variant = run.only or rng.choice(CALLING if rng.random() < 0.75 else CONNECTING)
    if variant not in VARIANTS:
        raise ValueError(f"there is no storm {variant!r}; there are {', '.join(VARIANTS)}")
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
    told = {
        "connecting": True, "url": url, "mode": mode, "prefix": "storm", "seed": run.seed,
        "seconds": run.seconds, "interrupts": 10**9, "silent": silent,
        "within": 0.06 if silent else 0.05,
    }  # fmt: skip
    _said(run, f"connecting-{mode}", told)


def _calling(run: Run, server: Standalone, mode: str, threads: int, **more: Any) -> None:
    rng = random.Random(run.seed)
    until = run.seconds
    for turn in itertools.count():
        seconds = min(until, 15.0)
        if seconds < 0.5:
            return
        until -= seconds
        prefix = f"storm-{turn}"
        told = {
            "connecting": False, "url": server.url, "direct_url": server.url, "mode": mode,
            "prefix": prefix, "seed": derived(run.seed, turn), "seconds": seconds,
            "interrupts": 10**9, "threads": threads, "keys": rng.choice([3, 3, 2000]), **more,
        }  # fmt: skip
        facts = _said(run, f"{mode}-{threads}", told)
        _conserved(run, server, told, facts)


def _said(run: Run, variant: str, told: dict[str, Any]) -> dict[str, Any]:
    """Run a child to its end; what it said in the end. Raises what it has found."""
    with Child("storm_child", told) as child:
        code = child.ended(told["seconds"] + 60)
        facts = next((facts for facts in child.said() if facts.get("done")), None)
        if code != 0 or facts is None:
            # `faulthandler.dump_traceback_later` ends a process that hangs with 1.
            raise Violation(
                f"storm {variant}: the process hangs or has died (exit {code})",
                [child.complaints()[-8000:]],
            )
        complaints = child.complaints()
    figures: dict[str, int] = facts["figures"]
    run.gather({name: n for name, n in figures.items() if not name.startswith("wrong")})
    run.count(f"interrupts {variant}", figures.get("interrupts", 0))
    wrong = {name: n for name, n in figures.items() if name.startswith("wrong")}
    if wrong:
        shown = ", ".join(f"{n} {name[7:]}" for name, n in sorted(wrong.items()))
        raise Violation(
            f"storm {variant}, {figures.get('interrupts', 0)} interrupts: {shown}",
            [*facts["history"], complaints[-4000:]],
        )
    return facts


def _conserved(run: Run, server: Standalone, told: dict[str, Any], facts: dict[str, Any]) -> None:
    prefix, mode = told["prefix"], told["mode"]
    sums: dict[str, dict[str, int]] = facts["sums"]
    with server.client(decode_responses=False) as client:
        keys = [f"k{number}" for number in range(told["keys"])]
        counts = all_stored(client, prefix, keys, LONG)
        tight = all_stored(client, prefix + "-tight", sums["blocked"], Limit("5/day"))
    # A fetch that was interrupted may strand the lease it was to bring: at most what was called
    # in a quarter of a second. More than half of all calls on one key are never as many.
    calls = sum(sums["certain"].values())
    interrupted = sum(sums["unsure"].values()) + facts["figures"]["unknown"]
    stranded = interrupted * (2 + calls // 40) if mode == "leased" else 0
    over, _ = conserved(
        f"storm {mode}: permits",
        {key: count.passed for key, count in counts.items()},
        sums["certain"],
        sums["unsure"],
        stranded=stranded,
    )
    run.count(f"permits stranded, {mode}", over)
    ends = sum(count.success + count.error for count in counts.values())
    sure = sum(sums["ends"].values())
    unsure = sum(sums["unsure_ends"].values())
    between(f"storm {mode}: ends of entries", ends, sure, sure + unsure, [])
    for key, count in tight.items():
        sure, unsure = sums["blocked"].get(key, 0), sums["unsure_blocked"].get(key, 0)
        between(f"storm {mode}: blocked permits of {key}", count.blocked, sure, sure + unsure, [])
