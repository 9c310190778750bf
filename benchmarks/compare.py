"""Two checkouts of distwindow against each other: `python -m benchmarks.compare BEFORE AFTER`.

Each checkout has one child process of its own, and they take turns: in each round both run every
case once, in shuffled order. Printed is what AFTER costs over BEFORE, as the median of the ratios
of each round, with its quartiles. Only the public interface is used, so that any two versions can
be compared.
"""

from __future__ import annotations

import argparse
import os
import random
import sys
from collections.abc import Sequence
from pathlib import Path

from benchmarks import server
from benchmarks.measure import Answering, Quartiles, log

TRIAL_S = 0.15
"""About how many seconds one case takes in one round."""
LARGEST_RATIO = 1.03
"""A case that costs more than this many times as much fails the comparison (exit 1)."""

# -- the parent -----------------------------------------------------------------------------------


class Checkout(Answering):
    """The child process of one checkout."""

    def __init__(self, folder: Path, url: str, name: str, core: int | None) -> None:
        if not (folder / "distwindow" / "__init__.py").is_file():
            raise SystemExit(f"{folder} is no checkout: it has no folder distwindow")
        script = Path(__file__).with_name("compare_child.py")
        environment = {**os.environ, "PYTHONPATH": str(folder)}
        command = [sys.executable, script, url, name]
        super().__init__(command, cwd=folder, env=environment)
        if core is not None:
            os.sched_setaffinity(self.pid, {core})
        self.cases: list[str] = self.read()

    def trial(self, case: str, count: int) -> float:
        """Make `count` calls. Return the seconds that each took."""
        seconds: float = self.ask([case, count])
        return seconds


def compare(
    before: Path, after: Path, rounds: int, names: Sequence[str] = ("",)
) -> dict[str, Quartiles]:
    """Return the cost of `after` over that of `before`, for each case with one of `names` in its
    name.
    """
    ratios: dict[str, list[float]] = {}
    cores = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []
    with server.running(cores[-1] if len(cores) > 1 else None) as redis_server:
        old, new = (
            Checkout(folder, redis_server.url, name, cores[0] if len(cores) > 1 else None)
            for folder, name in ((before, "before"), (after, "after"))
        )
        cases = [case for case in old.cases if any(name in case for name in names)]
        counts = {case: _calls_in_a_trial(old, case) for case in cases}
        for number in range(rounds):
            log(f"round {number + 1} of {rounds}")
            for case in random.sample(cases, len(cases)):
                first, second = random.sample([old, new], 2)
                seconds = {one: one.trial(case, counts[case]) for one in (first, second)}
                ratios.setdefault(case, []).append(seconds[new] / seconds[old])
        for one in (old, new):
            one.close()
    return {case: Quartiles.of(values) for case, values in ratios.items()}


def _calls_in_a_trial(checkout: Checkout, case: str) -> int:
    count = 50
    while (seconds := checkout.trial(case, count)) * count < TRIAL_S / 2:
        count *= 2
    return max(50, round(TRIAL_S / seconds / 50) * 50)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.compare", description=__doc__)
    parser.add_argument("before", type=Path, help="folder of a checkout")
    parser.add_argument("after", type=Path, help="folder of another")
    parser.add_argument("--rounds", type=int, default=41)
    parser.add_argument("--case", action="append", help="measure only cases with this in the name")
    options = parser.parse_args()
    stats = compare(
        options.before.resolve(), options.after.resolve(), options.rounds, options.case or [""]
    )
    print(f"cost after / before, median (quartiles) of {options.rounds} rounds")
    for case, stat in stats.items():
        verdict = "" if stat.median <= LARGEST_RATIO else f"  above {LARGEST_RATIO}"
        print(f"{case:<26}{stat.median:.3f}  ({stat.low:.3f} to {stat.high:.3f}){verdict}")
    return int(any(stat.median > LARGEST_RATIO for stat in stats.values()))


if __name__ == "__main__":
    sys.exit(main())
