"""The results as a table, as JSON, and as a picture."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from benchmarks.celery_workers.fleet import IDEAL_S, SETUPS, TASKS, Run
from benchmarks.celery_workers.project import PER_SECOND, WORKERS

WIDTH, LEFT, RIGHT, TOP, ROW = 760, 24, 24, 64, 88
INK, FAINT, FILL, WARM = "#1f2937", "#9ca3af", "#3b82f6", "#ea580c"
FONT = "font-family='ui-sans-serif, system-ui, sans-serif'"


def table(runs: list[Run]) -> str:
    """Return the table of docs/howto/celery.md."""
    lines = [
        f"| {TASKS} tasks at {PER_SECOND}/s, {WORKERS} workers x `-c 2` | started "
        "| most in a second "
        f"| first to last start (ideal {IDEAL_S:.1f} s) | requeues per task | asks per task |",
        "|---|---:|---:|---:|---:|---:|",
    ]
    for one in runs:
        count = len(one.starts_s)
        asks = f"{one.asks / count:.2f}" if one.asks else ""
        lines.append(
            f"| {SETUPS[one.setup]} | {count} | {one.most} | {one.span_s:.1f} s "
            f"| {one.requeues / count:.2f} | {asks} |"
        )
    return "\n".join(lines) + "\n"


def as_json(runs: list[Run], environment: dict[str, str]) -> str:
    data = {
        "environment": environment,
        "runs": [
            {
                "setup": one.setup,
                "most": one.most,
                "requeues": one.requeues,
                "asks": one.asks,
                "starts_ms": [round(at_s * 1000) for at_s in one.starts_s],
            }
            for one in runs
        ],
    }
    return json.dumps(data) + "\n"


def from_json(path: Path) -> list[Run]:
    """Return the runs of a file that `as_json` has written."""
    data: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return [
        Run(
            one["setup"], [at_ms / 1000 for at_ms in one["starts_ms"]], one["most"],
            one["requeues"], one["asks"],
        )
        for one in data["runs"]
    ]  # fmt: skip


def picture(runs: list[Run]) -> str:
    """Return an SVG: for each way, how many tasks started in each half second."""
    longest_s = max([IDEAL_S + 1, *(one.starts_s[-1] for one in runs)])
    scale = (WIDTH - LEFT - RIGHT) / (longest_s + 0.5)
    height = TOP + ROW * len(runs) + 24
    parts = [
        f"<text x='{LEFT}' y='28' font-size='15' fill='{INK}'>Starts in each half second: "
        f"{TASKS} tasks, one limit of {PER_SECOND}/s, {WORKERS} workers</text>",
        f"<text x='{LEFT}' y='46' font-size='12' fill='{FAINT}'>dashed: {PER_SECOND} starts; "
        f"vertical line: the ideal end, {IDEAL_S:.0f} s</text>",
    ]
    for row, one in enumerate(runs):
        base = TOP + ROW * (row + 1) - 16
        counts: dict[int, int] = {}
        for at_s in one.starts_s:
            counts[int(at_s * 2)] = counts.get(int(at_s * 2), 0) + 1
        unit = (ROW - 38) / max(PER_SECOND * 1.2, *counts.values())
        for half, count in sorted(counts.items()):
            colour = WARM if count > PER_SECOND else FILL
            parts.append(
                f"<rect x='{LEFT + half / 2 * scale:.1f}' y='{base - count * unit:.1f}' "
                f"width='{max(0.6, scale / 2 - 0.6):.1f}' height='{count * unit:.1f}' "
                f"fill='{colour}'/>"
            )
        mark = base - PER_SECOND * unit
        end = LEFT + (IDEAL_S + 0.5) * scale
        parts += [
            f"<line x1='{LEFT}' y1='{mark:.1f}' x2='{WIDTH - RIGHT}' y2='{mark:.1f}' "
            f"stroke='{FAINT}' stroke-dasharray='3 3'/>",
            f"<line x1='{LEFT}' y1='{base}' x2='{WIDTH - RIGHT}' y2='{base}' stroke='{FAINT}'/>",
            f"<line x1='{end:.1f}' y1='{base - ROW + 38}' x2='{end:.1f}' y2='{base}' "
            f"stroke='{INK}'/>",
            f"<text x='{LEFT}' y='{base - ROW + 32}' font-size='12' fill='{INK}'>"
            f"{SETUPS[one.setup]}: {len(one.starts_s)} started in {one.span_s:.1f} s, "
            f"{one.requeues / len(one.starts_s):.2f} requeues per task</text>",
        ]
    body = "\n".join(parts)
    return (
        f"<svg xmlns='http://www.w3.org/2000/svg' viewBox='0 0 {WIDTH} {height}' width='{WIDTH}' "
        f"height='{height}' role='img' {FONT}>\n<title>Starts of Celery tasks under one limit"
        f"</title>\n<rect width='{WIDTH}' height='{height}' rx='8' fill='#ffffff'/>\n{body}\n"
        "</svg>\n"
    )
