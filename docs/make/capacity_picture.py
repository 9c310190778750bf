"""The picture of what one key takes of its shard, by the number of processes that call it."""

from __future__ import annotations

import math

from drawing import FAINT, FILL, INK, MUTED, WARM, line, path, svg, text

from distwindow import Limit
from distwindow.cli.plan import BUSY, Fleet, make_plan

LEFT, TOP, WIDTH, HEIGHT = 70, 60, 560, 260
CALLS = 200_000
"""A second, of all processes."""
MOST = 10_000
LOWEST, HIGHEST = -3, 1
"""The powers of ten of the cores at the axis."""
COLOURS = {"direct": INK, "leased": FILL, "eventual": WARM}
LABELS = {"direct": 16, "leased": 4, "eventual": 0}
"""How far below the end of its line a name stands."""


def _x(processes: float) -> float:
    return LEFT + WIDTH * (math.log10(processes) - 1) / (math.log10(MOST) - 1)


def _y(cores: float) -> float:
    return TOP + HEIGHT * (HIGHEST - math.log10(cores)) / (HIGHEST - LOWEST)


def _cores(mode: str, processes: int) -> float:
    limit = Limit(2 * CALLS, per=1)
    return make_plan(Fleet(processes, CALLS / processes, 1, limit), mode).key_cores


def capacity() -> str:
    parts = [
        text(
            LEFT,
            26,
            f"{CALLS:,} calls a second on one key, at half of its limit, from ever more processes",
            size=14,
        ),
        text(LEFT, 46, "Cores of Redis, of which a key can use one", fill=MUTED),
    ]
    for power in range(LOWEST, HIGHEST + 1):
        y = _y(10**power)
        parts.append(line(LEFT, y, LEFT + WIDTH, y, FAINT, 0.5))
        parts.append(text(LEFT - 8, y + 4, f"{10**power:g}", anchor="end", fill=MUTED))
    for processes in (10, 100, 1000, MOST):
        x = _x(processes)
        parts.append(line(x, TOP + HEIGHT, x, TOP + HEIGHT + 6, INK))
        parts.append(text(x, TOP + HEIGHT + 22, f"{processes:,}", anchor="middle"))
    parts.append(line(LEFT, TOP + HEIGHT, LEFT + WIDTH, TOP + HEIGHT, INK, 1.5))
    parts.append(text(LEFT + WIDTH / 2, TOP + HEIGHT + 42, "processes", anchor="middle"))
    numbers = [round(10 ** (1 + step / 20)) for step in range(61)]
    for mode, colour in COLOURS.items():
        points = [(_x(n), _y(_cores(mode, n))) for n in numbers]
        parts.append(path(points, colour))
        parts.append(
            text(LEFT + WIDTH + 8, points[-1][1] + LABELS[mode], mode, size=14, fill=colour)
        )
    y = _y(BUSY)
    parts.append(line(LEFT, y, LEFT + WIDTH, y, MUTED, 2))
    parts.append(text(LEFT + 6, y + 16, f"a shard that is busy for {100 * BUSY:.0f} % of its time"))
    return svg(LEFT + WIDTH + 90, TOP + HEIGHT + 60, "What one key takes of its shard", parts)
