"""Rows of what was measured, against their targets: as text, as Markdown, as JSON."""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from importlib import metadata
from typing import Any

from benchmarks.measure import Stat

PACKAGES = ("redis", "hiredis", "limits", "throttled-py", "pyrate-limiter", "coredis", "valkey")


@dataclass(frozen=True)
class Target:
    """What a row is to reach: at most `bound`, or at least."""

    bound: float
    at_least: bool = False

    def holds(self, value: float) -> bool:
        return value >= self.bound if self.at_least else value <= self.bound


@dataclass(frozen=True)
class Row:
    """One line of the report. `unit` is `x` (a ratio) or `B`."""

    what: str
    measured: Stat | float | None = None
    target: Target | None = None
    detail: str = ""
    unit: str = "x"
    error: str = ""

    @property
    def value(self) -> float | None:
        return self.measured.median if isinstance(self.measured, Stat) else self.measured

    @property
    def verdict(self) -> str:
        if self.error:
            return "FAILED"
        if self.target is None or self.value is None:
            return ""
        return "met" if self.target.holds(self.value) else "MISSED"

    def shown(self) -> str:
        if self.value is None:
            return ""
        if self.unit == "B":
            return f"{self.value:,.0f} B"
        if isinstance(self.measured, Stat):
            low, high = number(self.measured.low), number(self.measured.high)
            return f"{number(self.value)}x ({low}..{high})"
        return f"{number(self.value)}x"

    def aim(self) -> str:
        if self.target is None:
            return ""
        unit = " B" if self.unit == "B" else "x"
        return f"{'>=' if self.target.at_least else '<='} {self.target.bound:g}{unit}"


def number(value: float) -> str:
    """Three digits that matter."""
    return f"{value:.2f}" if value < 10 else f"{value:.1f}" if value < 100 else f"{value:,.0f}"


@dataclass
class Section:
    """A table of the report."""

    name: str
    title: str
    rows: list[Row] = field(default_factory=list)

    def add(self, what: str, measured: Stat | float | None = None, **more: Any) -> None:
        self.rows.append(Row(what, measured, **more))

    def failed(self, errors: dict[str, str], prefix: str = "") -> None:
        """A row for every contender that could not be measured, with its error."""
        self.rows += [Row(prefix + name, error=error) for name, error in errors.items()]


def environment(server: str) -> dict[str, str]:
    """What the numbers depend on."""
    import distwindow

    found = {
        "python": f"{platform.python_implementation()} {platform.python_version()}",
        "distwindow": getattr(distwindow, "__version__", "?"),
        "server": server,
        "machine": f"{platform.machine()}, {os.cpu_count()} cores, {platform.system()}",
    }
    for name in PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            found[name] = "not installed"
    return found


HEADINGS = ("what", "target", "measured (quartiles)", "verdict", "detail")


def _cells(row: Row) -> tuple[str, ...]:
    return row.what, row.aim(), row.shown(), row.verdict, row.error or row.detail


def text(section: Section) -> str:
    """A table for a terminal."""
    lines = [HEADINGS, *map(_cells, section.rows)]
    widths = [max(len(line[i]) for line in lines) for i in range(4)]
    return "\n".join(
        [f"\n{section.title}"]
        + [
            "  ".join([*(cell.ljust(w) for cell, w in zip(line, widths, strict=False)), line[4]])
            for line in lines
        ]
    )


def tally(sections: Sequence[Section]) -> list[str]:
    """How many targets are met, then every one that is not."""
    rows = [(section, row) for section in sections for row in section.rows]
    missed = [(s, row) for s, row in rows if row.verdict == "MISSED"]
    failed = [(s, row) for s, row in rows if row.verdict == "FAILED"]
    met = sum(row.verdict == "met" for _, row in rows)
    return [
        f"{met} met, {len(missed)} missed, {len(failed)} failed",
        *(f"  missed: {s.name}: {row.what}: {row.shown()}, {row.aim()}" for s, row in missed),
        *(f"  failed: {s.name}: {row.what}: {row.error}" for s, row in failed),
    ]


def markdown(command: str, about: dict[str, str], sections: Sequence[Section]) -> str:
    """The whole report, for a file."""
    facts = ", ".join(
        value if name in ("server", "machine") else f"{name} {value}"
        for name, value in about.items()
    )
    parts = [f"`{command}`: {facts}"]
    for section in sections:
        table = [HEADINGS, ("---",) * 5, *map(_cells, section.rows)]
        lines = [_line(cells) for cells in table]
        parts.append(f"### {section.title}\n\n" + "\n".join(lines))
    return "\n\n".join([*parts, "\n".join(tally(sections))]) + "\n"


def _line(cells: Iterable[str]) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def as_json(command: str, about: dict[str, str], sections: Sequence[Section]) -> str:
    rows = [
        {"section": section.name, **asdict(row), "verdict": row.verdict}
        for section in sections
        for row in section.rows
    ]
    return json.dumps({"command": command, "environment": about, "rows": rows}, indent=1) + "\n"
