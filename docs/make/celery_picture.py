"""The picture of Celery workers under one limit, from docs/make/celery_workers.json, which
`python -m benchmarks.celery_workers --write` has measured.
"""

from __future__ import annotations

import json
from pathlib import Path

from drawing import FAINT, FILL, INK, MUTED, WARM, box, line, svg, text

RESULTS = Path(__file__).with_name("celery_workers.json")
WIDTH, LEFT, RIGHT, TOP, ROW, BARS = 760, 24, 24, 64, 88, 50
PER_SECOND, IDEAL_S = 20, 29
NAMES = {
    "distwindow": "distwindow's gate",
    "rate_limit": "Celery's rate_limit, half of it in each worker",
    "retry": "a task that asks a limiter and retries",
    "heimdall": "celery-heimdall",
}


def celery_starts() -> str:
    """For each way to limit, how many tasks started in each half second."""
    runs = json.loads(RESULTS.read_text(encoding="utf-8"))["runs"]
    longest_s = max([IDEAL_S + 1, *(one["starts_ms"][-1] / 1000 for one in runs)])
    scale = (WIDTH - LEFT - RIGHT) / (longest_s + 0.5)
    parts = [
        text(
            LEFT, 28, "Starts in each half second: 600 tasks, one limit of 20/s, two workers",
            size=14,
        ),
        text(LEFT, 46, "vertical line: the ideal end; dashed: 20 starts; longer bars are in the "
             "other colour", fill=MUTED),
    ]  # fmt: skip
    for row, one in enumerate(runs):
        base = TOP + ROW * (row + 1) - 16
        counts: dict[int, int] = {}
        for at_ms in one["starts_ms"]:
            counts[at_ms // 500] = counts.get(at_ms // 500, 0) + 1
        unit = BARS / max(PER_SECOND * 1.2, *counts.values())
        for half, count in sorted(counts.items()):
            left = LEFT + half / 2 * scale
            width = max(0.6, scale / 2 - 0.6)
            fill = WARM if count > PER_SECOND else FILL
            parts.append(box(left, base - count * unit, left + width, base, fill))
        mark = base - PER_SECOND * unit
        end = LEFT + (IDEAL_S + 0.5) * scale
        dashed = line(LEFT, mark, WIDTH - RIGHT, mark).replace("/>", " stroke-dasharray='3 3'/>")
        started, span_s = len(one["starts_ms"]), one["starts_ms"][-1] / 1000
        parts += [
            dashed,
            line(LEFT, base, WIDTH - RIGHT, base, FAINT),
            line(end, base - BARS, end, base, INK),
            text(
                LEFT, base - BARS - 6,
                f"{NAMES[one['setup']]}: {started} started in {span_s:.1f} s, "
                f"{one['requeues'] / started:.2f} requeues per task",
            ),
        ]  # fmt: skip
    return svg(WIDTH, TOP + ROW * len(runs) + 16, "Starts of Celery tasks under one limit", parts)
