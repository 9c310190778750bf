"""Replay golden traces: run the operations of a file in order, and compare every result.

A driver is one class per kind of trace. It is made from the file's `params`, and each operation of
the trace is a method `op_<name>(now, args)`, which returns the result in the form of the trace.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from distwindow.errors import DistwindowError

Args = Mapping[str, Any]

# Errors that distwindow documents, and NotImplementedError of structures that lend no permits.
# Any other error is a bug and must not be taken for the error that upstream raised.
DOCUMENTED = (DistwindowError, NotImplementedError)


class Driver(Protocol):
    """One replay of one file; its operations are methods named `op_<name>`."""

    def __init__(self, params: Args) -> None:
        """Make what the recording began with."""


@dataclass(frozen=True)
class Raised:
    """In place of a result: the operation raised a documented error."""

    error: str


class Mismatch(AssertionError):
    """A step whose result is not that of upstream, or that could not be run."""


class NotATrace(Exception):
    """A file that is not a complete golden trace of format 1."""


@dataclass(frozen=True)
class Trace:
    """One golden file. `file` is its path inside the golden folder."""

    file: str
    kind: str
    params: Args
    steps: list[dict[str, Any]]


def trace_files(folder: Path) -> list[Path]:
    """Return every JSON file in `folder` and its subfolders but `index.json`, sorted."""
    return sorted(path for path in folder.rglob("*.json") if path.name != "index.json")


def load(path: Path, folder: Path) -> Trace:
    """Read one file; raises `NotATrace` if it is not a complete trace of format 1."""
    file = path.relative_to(folder).as_posix()
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
        trace = Trace(file, data["kind"], data["params"], data["steps"])
        made_for, steps = data["format"], data["step_count"]
    except (ValueError, KeyError, TypeError) as exc:
        raise NotATrace(f"{file}: not a golden trace: {exc!r}") from exc
    if made_for != 1:
        raise NotATrace(f"{file}: format {made_for!r}, this replay reads 1")
    # A file cut short would otherwise pass.
    if steps != len(trace.steps) or not trace.steps:
        raise NotATrace(f"{file}: {len(trace.steps)} steps, should be {steps!r} and at least 1")
    return trace


def result_of(operation: Callable[[], object]) -> object:
    """Return the result of `operation`, or `Raised` for a documented error."""
    try:
        return operation()
    except DOCUMENTED as exc:
        return Raised(repr(exc))


def figures(of: object, names: str, *args: object) -> dict[str, object]:
    """Return what `of` has under these names: what its methods return, and other attributes."""
    values = {name: getattr(of, name) for name in names.split()}
    return {name: value(*args) if callable(value) else value for name, value in values.items()}


def listed(of: Iterable[object], names: str) -> list[list[object]]:
    """Return the attributes of these names of each, in order."""
    return [list(figures(each, names).values()) for each in of]


def same(expected: object, got: object) -> bool:
    """Return True if `got` is what the trace expects, to the last bit.

    5 and 5.0 are the same value, 1 and true are not. NaN and infinity are strings in a trace.
    """
    if isinstance(expected, Mapping) and expected.keys() == {"raises"}:
        return isinstance(got, Raised)
    if isinstance(expected, Mapping):
        return (
            isinstance(got, Mapping)
            and expected.keys() == got.keys()
            and all(same(value, got[name]) for name, value in expected.items())
        )
    if isinstance(expected, list):
        return (
            isinstance(got, (list, tuple))
            and len(expected) == len(got)
            and all(same(one, other) for one, other in zip(expected, got, strict=True))
        )
    if isinstance(got, float) and not math.isfinite(got):
        return expected == _name(got)
    if isinstance(expected, bool) or isinstance(got, bool):
        return expected is got
    if isinstance(expected, (int, float)):
        return isinstance(got, (int, float)) and expected == got
    return type(expected) is type(got) and expected == got


def replay(trace: Trace, make: Callable[[Args], Driver]) -> int:
    """Run and compare every step; return their number. Raise `Mismatch` at the first difference."""
    try:
        driver = make(trace.params)
    except Exception as exc:
        raise Mismatch(f"{trace.file}: no {trace.kind} of {trace.params}: {exc!r}") from exc
    for number, step in enumerate(trace.steps):
        _run(trace, number, step, driver)
    return len(trace.steps)


def _run(trace: Trace, number: int, step: dict[str, Any], driver: Driver) -> None:
    name, args = step.get("op"), step.get("args", {})
    # A file has the time in ms, or in ns under another name.
    now = step.get("now", step.get("now_ns"))
    where = f"{trace.file}: step {number}: {name} {json.dumps(args)} at {now}"
    operation = getattr(driver, f"op_{name}", None)
    if operation is None:
        raise Mismatch(f"{where}: unknown operation {name!r} of kind {trace.kind!r}")
    try:
        got = result_of(lambda: operation(now, args))
    except Exception as exc:
        raise Mismatch(f"{where}: the replay itself failed: {exc!r}") from exc
    expected = step.get("expect")
    # A step without `expect` has no result to compare, but upstream raised no error there.
    unchecked = "expect" not in step and not isinstance(got, Raised)
    if not unchecked and not same(expected, got):
        wanted = json.dumps(expected) if "expect" in step else "no error"
        parts = "".join(f"\n  {line}" for line in _differences("", expected, got))
        raise Mismatch(f"{where}\n  expected: {wanted}\n  got:      {_shown(got)}{parts}")


def _differences(path: str, expected: object, got: object) -> Iterator[str]:
    """Yield one line for each value that differs, with its path in the result."""
    if isinstance(expected, Mapping) and isinstance(got, Mapping):
        for name in [*expected, *(name for name in got if name not in expected)]:
            if name not in expected:
                yield f"{path}.{name}: not expected, got {_shown(got[name])}"
            elif name not in got:
                yield f"{path}.{name}: expected {json.dumps(expected[name])}, got nothing"
            elif not same(expected[name], got[name]):
                yield from _differences(f"{path}.{name}", expected[name], got[name])
    elif path:
        yield f"{path}: expected {json.dumps(expected)}, got {_shown(got)}"


def _shown(got: object) -> str:
    return json.dumps(got, default=str)


def _name(value: float) -> str:
    if math.isnan(value):
        return "NaN"
    return "Infinity" if value > 0 else "-Infinity"
