"""The results as a table and as JSON. docs/make/celery_picture.py draws them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from benchmarks.celery_workers.fleet import IDEAL_S, SETUPS, TASKS, Run
from benchmarks.celery_workers.project import PER_SECOND, WORKERS


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
