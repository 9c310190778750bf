"""A summary of the golden traces at the end of a run: which were replayed, and which failed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping

import pytest
from _pytest.terminal import TerminalReporter

from .kinds import DRIVERS


def pytest_terminal_summary(terminalreporter: TerminalReporter) -> None:
    # From the reports and not from a global variable, which pytest-xdist would not share.
    files = {outcome: Counter[str]() for outcome in ("passed", "failed")}
    steps = {outcome: Counter[str]() for outcome in ("passed", "failed")}
    for outcome in files:
        for report in terminalreporter.getreports(outcome):
            properties = dict(report.user_properties)
            if "golden_kind" in properties and report.when == "call":
                kind = str(properties["golden_kind"])
                files[outcome][kind] += 1
                steps[outcome][kind] += int(str(properties["golden_steps"]))
    if not any(files.values()):
        return
    terminalreporter.section("golden traces")
    for line in _summary("replayed exactly", DRIVERS, files["passed"], steps["passed"]):
        terminalreporter.write_line(line, green=True)
    if files["failed"]:
        failed = sorted(files["failed"])
        for line in _summary("FAILED", failed, files["failed"], steps["failed"]):
            terminalreporter.write_line(line, red=True)


def _summary(
    title: str, kinds: Iterable[str], files: Mapping[str, int], steps: Mapping[str, int]
) -> list[str]:
    lines = [f"{title}: {sum(files.values())} files, {sum(steps.values()):,} steps"]
    for kind in kinds:
        count, length = files.get(kind, 0), steps.get(kind, 0)
        lines.append(f"  {kind:<26} {count:>3} files {length:>7,} steps")
    return lines


@pytest.fixture
def golden_properties(request: pytest.FixtureRequest) -> list[tuple[str, object]]:
    """Where a test puts the kind and the number of steps of its trace, for the summary."""
    properties: list[tuple[str, object]] = request.node.user_properties
    return properties
