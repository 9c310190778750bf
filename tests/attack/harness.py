"""Definitions that all scenarios share: the run, its figures, seeds, and violations."""

from __future__ import annotations

import hashlib
import json
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

ROOT = Path(__file__).parents[2]
T = TypeVar("T")

EVENTS_SHOWN = 40
"""How many events of a history are printed; the last ones are."""

FOREVER = "1000000000/day"
"""A limit that admits every call of a run, and whose window is longer than any run."""

MODES = ["direct", "leased", "eventual"]


class Violation(AssertionError):
    """Something that the documentation promises does not hold. `history`: the events before."""

    def __init__(self, what: str, history: Iterable[Any] = ()) -> None:
        super().__init__(what)
        self.what = what
        self.history = list(history)

    def __str__(self) -> str:
        """Return the violation and the end of its history, one event a line."""
        lines = [self.what]
        skipped = len(self.history) - EVENTS_SHOWN
        if skipped > 0:
            lines.append(f"  ({skipped} earlier events are left out)")
        for event in self.history[-EVENTS_SHOWN:]:
            shown = event if isinstance(event, str) else json.dumps(event, default=str)
            lines.append("  " + shown.replace("\n", "\n  "))
        return "\n".join(lines)


@dataclass
class Run:
    """One run of a scenario: its seed, how long it may take, and the figures that it counts."""

    seed: int
    seconds: float
    only: str | None = None
    """A variant of the scenario, such as one consistency; None for all, or for a random one."""
    figures: Counter[str] = field(default_factory=Counter)

    def count(self, name: str, number: int = 1) -> None:
        self.figures[name] += number

    def maximum(self, name: str, number: int) -> None:
        """Keep the largest number. The name of the figure gets " (max)", and `gather` does not add
        such figures up.
        """
        name = f"{name} (max)"
        self.figures[name] = max(self.figures[name], number)

    def gather(self, figures: dict[str, int]) -> None:
        """Add the figures of a child or of a part of the run."""
        for name, number in figures.items():
            if name.endswith(" (max)"):
                self.figures[name] = max(self.figures[name], number)
            else:
                self.figures[name] += number


Scenario = Callable[[Run], None]


def derive_seed(seed: int, *names: object) -> int:
    """Return a seed made of `seed` and `names`: the same on every machine and Python."""
    text = " ".join(map(str, (seed, *names)))
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=6).digest(), "big")


def check_between(
    what: str, number: float, minimum: float, maximum: float, history: Iterable[Any] = ()
) -> None:
    """Raise `Violation` unless `number` lies between both, inclusive."""
    if not minimum <= number <= maximum:
        raise Violation(f"{what}: {number:g} is not between {minimum:g} and {maximum:g}", history)


def shrink(events: Sequence[T], fails: Callable[[Sequence[T]], bool], seconds: float) -> list[T]:
    """Return the fewest events that still fail, by delta debugging, as far as time allows."""
    left, parts, until = list(events), 2, time.monotonic() + seconds
    while left and time.monotonic() < until:
        size = -(-len(left) // parts)
        for at in range(0, len(left), size):
            fewer = left[:at] + left[at + size :]
            if time.monotonic() < until and fails(fewer):
                left, parts = fewer, max(parts - 1, 2)
                break
        else:
            if size == 1:
                break
            parts = min(len(left), parts * 2)
    return left
