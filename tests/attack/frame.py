"""What all scenarios share: the violation, the figures, derived seeds, and what an attack is."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]

EVENTS_SHOWN = 40
"""Events of a history that are printed: the last ones."""

FOREVER = "1000000000/day"
"""A limit that refuses nobody, and whose window outlives every run."""


class Violation(AssertionError):
    """Something that the documentation promises does not hold. `history`: the events of it."""

    def __init__(self, what: str, history: Iterable[Any] = ()) -> None:
        super().__init__(what)
        self.what = what
        self.history = list(history)

    def __str__(self) -> str:
        """The violation and the end of its history, one event a line."""
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
    """One run of a scenario: its seed, how long it may take, and what it counts."""

    seed: int
    seconds: float
    only: str | None = None
    """A variant of the scenario, such as one mode; None for all, or for one drawn by the seed."""
    figures: Counter[str] = field(default_factory=Counter)

    def count(self, name: str, number: int = 1) -> None:
        self.figures[name] += number

    def most(self, name: str, number: int) -> None:
        """The largest figure seen; by its name the table knows not to add it up."""
        name = f"{name} (max)"
        self.figures[name] = max(self.figures[name], number)

    def gather(self, figures: dict[str, int]) -> None:
        """The figures of a child or of a part of the run."""
        for name, number in figures.items():
            if name.endswith(" (max)"):
                self.figures[name] = max(self.figures[name], number)
            else:
                self.figures[name] += number


Scenario = Callable[[Run], None]


def derived(seed: int, *names: object) -> int:
    """A seed that follows from `seed` and `names`: the same on every machine and Python."""
    text = " ".join(map(str, (seed, *names)))
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=6).digest(), "big")


def between(what: str, number: float, least: float, most: float, history: Iterable[Any]) -> None:
    """`number` must lie between both, inclusive."""
    if not least <= number <= most:
        raise Violation(f"{what}: {number:g} is not between {least:g} and {most:g}", history)
