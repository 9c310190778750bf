"""The measured rows and their targets, as text, Markdown or JSON."""

from __future__ import annotations

import json
import os
import platform
import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any

from benchmarks.measure import Quartiles

PACKAGES = (
    "redis", "hiredis", "limits", "throttled-py", "pyrate-limiter", "coredis", "valkey",
    "langchain-core", "fastmcp",
)  # fmt: skip


@dataclass(frozen=True)
class Target:
    """The value that a row shall reach: at most `bound`, or at least `bound`."""

    bound: float
    at_least: bool = False

    def is_met(self, value: float) -> bool:
        return value >= self.bound if self.at_least else value <= self.bound


@dataclass(frozen=True)
class Row:
    """One line of the report. `unit` is `x` (a ratio), `B` (bytes), `µs` or `/s`."""

    what: str
    measured: Quartiles | float | None = None
    target: Target | None = None
    detail: str = ""
    unit: str = "x"
    error: str = ""

    @property
    def value(self) -> float | None:
        return self.measured.median if isinstance(self.measured, Quartiles) else self.measured

    @property
    def verdict(self) -> str:
        if self.error:
            return "FAILED"
        if self.target is None or self.value is None:
            return ""
        return "met" if self.target.is_met(self.value) else "MISSED"

    def measured_text(self) -> str:
        if self.value is None:
            return ""
        if self.unit == "B":
            return f"{self.value:,.0f} B"
        unit = " µs" if self.unit == "µs" else self.unit
        if isinstance(self.measured, Quartiles):
            low, high = number(self.measured.low), number(self.measured.high)
            return f"{number(self.value)}{unit} ({low}..{high})"
        return f"{number(self.value)}{unit}"

    def target_text(self) -> str:
        if self.target is None:
            return ""
        unit = "x" if self.unit == "x" else f" {self.unit}"
        return f"{'>=' if self.target.at_least else '<='} {self.target.bound:g}{unit}"


def number(value: float) -> str:
    """Return a number with three significant digits."""
    return f"{value:.2f}" if value < 10 else f"{value:.1f}" if value < 100 else f"{value:,.0f}"


@dataclass
class Section:
    """A table of the report."""

    name: str
    title: str
    rows: list[Row] = field(default_factory=list)

    def add(self, what: str, measured: Quartiles | float | None = None, **more: Any) -> None:
        self.rows.append(Row(what, measured, **more))

    def add_failures(self, errors: dict[str, str], prefix: str = "") -> None:
        """Add a row with the error for every contender that could not be measured."""
        self.rows += [Row(prefix + name, error=error) for name, error in errors.items()]


def environment(server: str) -> dict[str, str]:
    """Return what the numbers depend on: versions and the machine."""
    import distwindow

    found = {
        "python": f"{platform.python_implementation()} {platform.python_version()}",
        "distwindow": getattr(distwindow, "__version__", "?"),
        "server": server,
        "machine": f"{platform.machine()}, {os.cpu_count()} cores, {platform.system()}",
        "load": f"load average {os.getloadavg()[0]:.2f} at the start",
        "date": time.strftime("%Y-%m-%d"),
    }
    for name in PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            found[name] = "not installed"
    return found


HEADINGS = ("what", "target", "measured (quartiles)", "verdict", "detail")


def _cells(row: Row) -> tuple[str, ...]:
    return row.what, row.target_text(), row.measured_text(), row.verdict, row.error or row.detail


def text(section: Section) -> str:
    """Return a table for a terminal."""
    lines = [HEADINGS, *map(_cells, section.rows)]
    widths = [max(len(line[i]) for line in lines) for i in range(4)]
    return "\n".join(
        [f"\n{section.title}"]
        + [
            "  ".join([*(cell.ljust(w) for cell, w in zip(line, widths, strict=False)), line[4]])
            for line in lines
        ]
    )


def summary(sections: Sequence[Section]) -> list[str]:
    """Return how many targets are met, and a line for each that is not."""
    rows = [(section, row) for section in sections for row in section.rows]
    missed = [(s, row) for s, row in rows if row.verdict == "MISSED"]
    failed = [(s, row) for s, row in rows if row.verdict == "FAILED"]
    met = sum(row.verdict == "met" for _, row in rows)
    return [
        f"{met} met, {len(missed)} missed, {len(failed)} failed",
        *(
            f"  missed: {s.name}: {row.what}: {row.measured_text()}, {row.target_text()}"
            for s, row in missed
        ),
        *(f"  failed: {s.name}: {row.what}: {row.error}" for s, row in failed),
    ]


def markdown(command: str, environment: dict[str, str], sections: Sequence[Section]) -> str:
    """Return the whole report in Markdown."""
    facts = ", ".join(
        value if name in ("server", "machine", "load", "date") else f"{name} {value}"
        for name, value in environment.items()
    )
    parts = [f"`{command}`: {facts}"]
    for section in sections:
        table = [HEADINGS, ("---",) * 5, *map(_cells, section.rows)]
        lines = [_line(cells) for cells in table]
        parts.append(f"### {section.title}\n\n" + "\n".join(lines))
    return "\n\n".join([*parts, "\n".join(summary(sections))]) + "\n"


def _line(cells: Iterable[str]) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def page_with(page: Path, name: str, text: str) -> str:
    """Return the page with `text` between its marks of this name."""
    begin, end = f"<!-- {name} -->\n", f"<!-- /{name} -->"
    before, rest = page.read_text(encoding="utf-8").split(begin)
    return f"{before}{begin}\n{text}\n{end}{rest.split(end)[1]}"


def as_json(command: str, environment: dict[str, str], sections: Sequence[Section]) -> str:
    rows = [
        {"section": section.name, **asdict(row), "verdict": row.verdict}
        for section in sections
        for row in section.rows
    ]
    return (
        json.dumps({"command": command, "environment": environment, "rows": rows}, indent=1) + "\n"
    )
