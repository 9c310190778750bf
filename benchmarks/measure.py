"""Medians over interleaved rounds: every contender once per round, in shuffled order.

Other load on the machine then affects all contenders alike, and a ratio is taken between two trials
of the same round.
"""

from __future__ import annotations

import gc
import json
import random
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

_started_at = time.monotonic()


def log(text: str) -> None:
    """Print a line of progress on stderr."""
    print(f"[{time.monotonic() - _started_at:6.1f}s] {text}", file=sys.stderr, flush=True)


@dataclass(frozen=True)
class Quartiles:
    """A median with the quartiles around it."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Quartiles:
        ordered = sorted(values)
        return cls(statistics.median(ordered), percentile(ordered, 0.25), percentile(ordered, 0.75))

    def over(self, divisor: float) -> Quartiles:
        return Quartiles(self.median / divisor, self.low / divisor, self.high / divisor)


def percentile(ordered: Sequence[float], share: float) -> float:
    """Return the value below which `share` of the sorted values lie."""
    return ordered[min(len(ordered) - 1, int(len(ordered) * share))]


def error_text(error: BaseException) -> str:
    """Return an error in one line."""
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text}"[:300]


def in_threads(works: Iterable[Callable[[], object]]) -> None:
    """Run each of these in a thread of its own, until all have ended."""
    threads = [threading.Thread(target=work) for work in works]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


Trial = Callable[[], float]


class Answering:
    """A process that answers each line of JSON with another."""

    def __init__(self, command: Sequence[object], **options: Any) -> None:
        self._process = subprocess.Popen(
            list(map(str, command)),
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, **options,
        )  # fmt: skip

    @property
    def pid(self) -> int:
        return self._process.pid

    def ask(self, question: Any) -> Any:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(question) + "\n")
        self._process.stdin.flush()
        return self.read()

    def read(self) -> Any:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"{self._process.args!r} has ended: exit {self._process.wait(10)}")
        return json.loads(line)

    def close(self) -> None:
        self._process.communicate(timeout=10)


@dataclass
class Results:
    """The values of each contender, one per round, and the error of each that failed."""

    values: dict[str, list[float]] = field(default_factory=dict)
    errors: dict[str, str] = field(default_factory=dict)

    def extend(self, other: Results) -> None:
        """Add the rounds of `other`. What failed in one of both has failed."""
        self.errors |= other.errors
        for name, values in other.values.items():
            self.values.setdefault(name, []).extend(values)
        for name in self.errors:
            self.values.pop(name, None)

    def stat(self, name: str) -> Quartiles:
        return Quartiles.of(self.values[name])

    def median(self, name: str) -> float:
        return statistics.median(self.values[name])

    def ratio(self, name: str, base: str) -> Quartiles:
        """Return `name` over `base`, round by round."""
        pairs = zip(self.values[name], self.values[base], strict=True)
        return Quartiles.of([value / other for value, other in pairs])

    def best(self, names: Sequence[str]) -> str | None:
        """Return the contender with the highest median, or None if all failed."""
        return max((name for name in names if name in self.values), key=self.median, default=None)


def run_rounds(section: str, contenders: Mapping[str, Trial], count: int) -> Results:
    """Run `count` rounds. A contender that raises is omitted from then on, and its error is kept.

    The objects that exist before the rounds are excluded from garbage collections. Otherwise a
    collection during one contender's trial would traverse the objects of all. The garbage of a
    trial itself is collected as usual.
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
        remaining = [name for name in contenders if name not in results.errors]
        log(f"{section}: round {number}/{count}, {len(remaining)} contenders")
        random.shuffle(remaining)
        for name in remaining:
            try:
                results.values.setdefault(name, []).append(contenders[name]())
            except Exception as error:
                results.errors[name] = error_text(error)
                results.values.pop(name, None)
                log(f"{section}: {name} failed: {results.errors[name]}")
    return results
