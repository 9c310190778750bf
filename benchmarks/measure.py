"""Medians over interleaved rounds: every contender once per round, in shuffled order.

Whatever else the machine does then falls on all of them alike, and a ratio is taken between two
trials of the same round.
"""

from __future__ import annotations

import gc
import random
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

_began = time.monotonic()


def say(text: str) -> None:
    """A progress line, on stderr."""
    print(f"[{time.monotonic() - _began:6.1f}s] {text}", file=sys.stderr, flush=True)


@dataclass(frozen=True)
class Stat:
    """A median with its quartiles."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Stat:
        ordered = sorted(values)
        return cls(statistics.median(ordered), percentile(ordered, 0.25), percentile(ordered, 0.75))


def percentile(ordered: Sequence[float], share: float) -> float:
    """The value below which `share` of the sorted values lie."""
    return ordered[min(len(ordered) - 1, int(len(ordered) * share))]


def said(error: BaseException) -> str:
    """An error in one line."""
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text}"[:300]


Trial = Callable[[], float]


@dataclass
class Results:
    """What each contender measured, one value per round; the error of each that failed."""

    values: dict[str, list[float]] = field(default_factory=dict)
    errors: dict[str, str] = field(default_factory=dict)

    def stat(self, name: str) -> Stat:
        return Stat.of(self.values[name])

    def median(self, name: str) -> float:
        return statistics.median(self.values[name])

    def ratio(self, name: str, base: str) -> Stat:
        """`name` over `base`, round by round."""
        pairs = zip(self.values[name], self.values[base], strict=True)
        return Stat.of([value / other for value, other in pairs])

    def best(self, names: Sequence[str]) -> str | None:
        """The contender with the highest median among those that did not fail."""
        return max((name for name in names if name in self.values), key=self.median, default=None)


def rounds(section: str, contenders: Mapping[str, Trial], count: int) -> Results:
    """Run `count` rounds. A contender that raises is left out from then on, with its error.

    What all contenders have set up is kept out of garbage collections: else each would pay, at
    random, for the objects of the others. Its own garbage is collected in its own time.
    """
    gc.collect()
    gc.freeze()
    try:
        return _rounds(section, contenders, count)
    finally:
        gc.unfreeze()


def _rounds(section: str, contenders: Mapping[str, Trial], count: int) -> Results:
    results = Results()
    for number in range(1, count + 1):
        racing = [name for name in contenders if name not in results.errors]
        say(f"{section}: round {number}/{count}, {len(racing)} contenders")
        random.shuffle(racing)
        for name in racing:
            try:
                results.values.setdefault(name, []).append(contenders[name]())
            except Exception as error:
                results.errors[name] = said(error)
                results.values.pop(name, None)
                say(f"{section}: {name} failed: {results.errors[name]}")
    return results
