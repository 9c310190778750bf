"""Run the scenarios in turn, for some minutes. The first violation ends the run, with exit 1."""

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

from tests.attack.harness import Run, Scenario, Violation, derive_seed

TURN_S = {
    "model": 10.0,
    "interruptions": 15.0,
    "nemesis": 12.0,
    "process_exits": 15.0,
    "timeouts": 6.0,
    "cold_start": 5.0,
    **dict.fromkeys(("slots", "breakers", "borrowing", "entries", "guards"), 12.0),
    "refused_rights": 10.0,
    "tasks": 5.0,
}
"""The scenarios, and the seconds of one turn."""
_LAST = list(TURN_S)[6:]
TURNS = (
    *("model", "interruptions", "nemesis", "interruptions", "process_exits"),
    *("interruptions", "timeouts", "interruptions", "cold_start", "interruptions", *_LAST),
)
"""`interruptions` has twelve variants, of which a turn runs one."""


def scenario(name: str) -> Scenario:
    """Return the function that has the name of its module."""
    found: Scenario = getattr(importlib.import_module(f"tests.attack.{name}"), name)
    return found


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="scripts/attack", description=__doc__)
    parser.add_argument("--minutes", type=float, help="how long in all (5; with --only: one turn)")
    parser.add_argument("--seed", type=int, help="seed of all random choices; drawn if missing")
    parser.add_argument(
        "--only",
        metavar="SCENARIO[:VARIANT]",
        help=f"one scenario, whose first turn has exactly this seed: {', '.join(TURN_S)}",
    )
    parser.add_argument("--seconds", type=float, help="of one turn, instead of its usual length")
    parser.add_argument("--keep-going", action="store_true", help="count violations, and go on")
    options = parser.parse_args(arguments)
    only, _, variant = (options.only or "").partition(":")
    if only and only not in TURN_S:
        parser.error(f"there is no scenario {only!r}; there are {', '.join(TURN_S)}")
    minutes = options.minutes or (0.0 if only else 5.0)
    seed = random.SystemRandom().randrange(10**6) if options.seed is None else options.seed
    print(f"seed {seed}", flush=True)
    figures: dict[str, Run] = {}
    violations: Counter[str] = Counter()
    stop, turn = time.monotonic() + minutes * 60, 0
    try:
        while turn == 0 or time.monotonic() < stop:
            name = only or TURNS[turn % len(TURNS)]
            is_first = only and turn == 0
            turn_seed = seed if is_first else derive_seed(seed, name, turn) % 10**9
            seconds = options.seconds or TURN_S[name]
            if minutes:
                seconds = max(1.0, min(seconds, stop - time.monotonic()))
            run = Run(turn_seed, seconds, variant or None)
            if not _turn(name, run, figures.setdefault(name, Run(seed, 0))):
                violations[name] += 1
                if not options.keep_going:
                    break
            turn += 1
    except KeyboardInterrupt:
        print("interrupted", flush=True)
    _table(figures, violations)
    return 1 if violations else 0


def _turn(name: str, run: Run, sums: Run) -> bool:
    """Run one turn and print its outcome; return False for a violation."""
    began = time.monotonic()
    violation: Violation | None = None
    try:
        scenario(name)(run)
    except Violation as found:
        violation = found
    except Exception as exc:
        # A server did not start, or a child reported something unexpected.
        violation = Violation(f"the scenario failed: {exc!r}", [traceback.format_exc()])
    took = time.monotonic() - began
    sums.gather(dict(run.figures))
    sums.count("turns")
    sums.count("seconds", round(took))
    shown = "VIOLATION" if violation else "ok"
    calls = run.figures.get("calls", run.figures.get("interruptions", 0))
    print(f"{name:<14} seed {run.seed:<10} {calls:>9,} calls {took:6.1f} s  {shown}", flush=True)
    if violation is None:
        return True
    only = name if run.only is None else f"{name}:{run.only}"
    # The whole length of the turn, although it ended early: finding the violation again may take as
    # long.
    command = ["scripts/attack", "--only", only, "--seed", str(run.seed)]
    command += ["--seconds", f"{run.seconds:g}"]
    print(f"\n{name}, seed {run.seed}: {violation}\n\nagain: {shlex.join(command)}\n", flush=True)
    return False


def _table(figures: dict[str, Run], violations: Counter[str]) -> None:
    print()
    for name, run in figures.items():
        for figure, number in sorted(run.figures.items()):
            print(f"{name:<14} {figure:<45} {number:>12,}")
        if violations[name]:
            print(f"{name:<14} {'VIOLATIONS':<45} {violations[name]:>12,}")
    print(f"\n{'violated' if violations else 'no violation'}", flush=True)


if __name__ == "__main__":
    faulthandler.register(signal.SIGQUIT, all_threads=True)
    sys.exit(main(sys.argv[1:]))
