"""The scenarios by turns, for some minutes. The first violation ends it, with exit 1."""

from __future__ import annotations

import argparse
import faulthandler
import importlib
import random
import shlex
import signal
import sys
import time
import traceback
from collections import Counter

from tests.attack.frame import Run, Scenario, Violation, derived

SCENARIOS = ("model", "storm", "fleet", "ends", "timeouts", "cold_start")
TURNS = (
    *("model", "storm", "fleet", "storm", "ends"),
    *("storm", "timeouts", "storm", "cold_start", "storm"),
)
"""The storm has twelve variants, of which a turn plays one."""
TURN_S = {"model": 10.0, "storm": 15.0, "fleet": 18.0, "ends": 15.0, "timeouts": 6.0}
"""Seconds of one turn; five for those that are not named."""


def scenario(name: str) -> Scenario:
    """A function of the module of the same name."""
    found: Scenario = getattr(importlib.import_module(f"tests.attack.{name}"), name)
    return found


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="scripts/attack", description=__doc__)
    parser.add_argument("--minutes", type=float, default=5.0, help="how long in all (5)")
    parser.add_argument(
        "--seed", type=int, help="what follows from what; drawn where it is missing"
    )
    parser.add_argument(
        "--only",
        metavar="SCENARIO[:VARIANT]",
        help=f"one turn of one scenario with exactly this seed: {', '.join(SCENARIOS)}",
    )
    parser.add_argument("--seconds", type=float, help="of one turn, in place of its usual length")
    parser.add_argument("--keep-going", action="store_true", help="count violations, and go on")
    told = parser.parse_args(arguments)
    only, _, variant = (told.only or "").partition(":")
    if only and only not in SCENARIOS:
        parser.error(f"there is no scenario {only!r}; there are {', '.join(SCENARIOS)}")
    seed = random.SystemRandom().randrange(10**6) if told.seed is None else told.seed
    print(f"seed {seed}", flush=True)
    figures: dict[str, Run] = {}
    violations: Counter[str] = Counter()
    stop, turn = time.monotonic() + told.minutes * 60, 0
    try:
        while turn == 0 or (time.monotonic() < stop and not told.only):
            name = only or TURNS[turn % len(TURNS)]
            own = seed if told.only else derived(seed, name, turn) % 10**9
            seconds = told.seconds or TURN_S.get(name, 5.0)
            if not told.only:
                seconds = max(1.0, min(seconds, stop - time.monotonic()))
            run = Run(own, seconds, variant or None)
            if not _turn(name, run, figures.setdefault(name, Run(seed, 0))):
                violations[name] += 1
                if not told.keep_going:
                    break
            turn += 1
    except KeyboardInterrupt:
        print("interrupted", flush=True)
    _table(figures, violations)
    return 1 if violations else 0


def _turn(name: str, run: Run, sums: Run) -> bool:
    """One turn; prints what it came to. False for a violation."""
    began = time.monotonic()
    violation: Violation | None = None
    try:
        scenario(name)(run)
    except Violation as found:
        violation = found
    except Exception as exc:
        # A server that does not start, or a child that says what nobody expects.
        violation = Violation(f"the scenario failed: {exc!r}", [traceback.format_exc()])
    took = time.monotonic() - began
    sums.gather(dict(run.figures))
    sums.count("turns")
    sums.count("seconds", round(took))
    shown = "VIOLATION" if violation else "ok"
    calls = run.figures.get("calls", run.figures.get("interrupts", 0))
    print(f"{name:<11} seed {run.seed:<10} {calls:>9,} calls {took:6.1f} s  {shown}", flush=True)
    if violation is None:
        return True
    only = name if run.only is None else f"{name}:{run.only}"
    # A turn that ended early with a violation needs no less time to find it again.
    again = ["scripts/attack", "--only", only, "--seed", str(run.seed)]
    again += ["--seconds", f"{run.seconds:g}"]
    print(f"\n{name}, seed {run.seed}: {violation}\n\nagain: {shlex.join(again)}\n", flush=True)
    return False


def _table(figures: dict[str, Run], violations: Counter[str]) -> None:
    print()
    for name, run in figures.items():
        for figure, number in sorted(run.figures.items()):
            print(f"{name:<11} {figure:<45} {number:>12,}")
        if violations[name]:
            print(f"{name:<11} {'VIOLATIONS':<45} {violations[name]:>12,}")
    print(f"\n{'violated' if violations else 'all held'}", flush=True)


if __name__ == "__main__":
    faulthandler.register(signal.SIGQUIT, all_threads=True)
    sys.exit(main(sys.argv[1:]))
