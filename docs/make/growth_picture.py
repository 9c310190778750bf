"""The picture of how the cost of a call grows, from the rows of docs/make/benchmarks.json."""

from __future__ import annotations

import math

from drawing import FAINT, FILL, INK, MUTED, WARM, dot, line, path, svg, text
from sections import Growth, growth_figures, load

WIDTH, LEFT, GAP, PANEL, TALL, TOP = 760, 64, 24, 212, 170, 78
COLOURS = {1: FILL, 8: INK, 64: WARM}
DASHED = " stroke-dasharray='5 4'/>"


def growth() -> str:
    """Client time and calls per second by keys, threads, limits and shards."""
    figures = growth_figures(load("growth"))
    limits = sorted({limit for _, limit, _, _ in figures})
    parts = [text(LEFT, 24, "What one call costs, by the keys in use", size=14)]
    left = LEFT
    for threads, colour in COLOURS.items():
        parts += [line(left, 42, left + 24, 42, colour, 2)]
        parts += [text(left + 30, 46, f"{threads} thread{'s' * (threads > 1)}", fill=colour)]
        left += 116
    parts.append(text(left, 46, "solid: one server; dashed: three shards on its core", fill=MUTED))
    rows = (("µs of the client", _us), ("calls per second", _rate))
    for row, (title, value) in enumerate(rows):
        top = TOP + row * (TALL + 56)
        unit = _round_up(max(map(value, figures.values())))
        for column, limit in enumerate(limits):
            left = LEFT + column * (PANEL + GAP)
            heading = f"{title}, {limit} limit{'s' * (limit > 1)}"
            parts.append(text(left, top - 8, heading, fill=MUTED))
            shown = {
                (place, threads, keys): value(one)
                for (place, number, threads, keys), one in figures.items()
                if number == limit
            }
            parts += _panel(left, top, shown, unit, labels=column == 0)
    return svg(WIDTH, TOP + 2 * (TALL + 56), "How the cost of a call grows", parts)


def _panel(
    left: float, top: float, shown: dict[tuple[str, int, int], float], unit: float, *, labels: bool
) -> list[str]:
    keys = sorted({number for _, _, number in shown})
    base = top + TALL

    def x(number: int) -> float:
        return left + 10 + keys.index(number) * (PANEL - 20) / (len(keys) - 1)

    parts = []
    for quarter in range(5):
        y = base - quarter * TALL / 4
        parts.append(line(left, y, left + PANEL, y, FAINT, 0.5 if quarter else 1))
        if labels:
            parts.append(text(left - 8, y + 4, f"{unit * quarter / 4:,.0f}", anchor="end", size=11))
    parts += [text(x(n), base + 18, f"{n:,}", anchor="middle", size=11) for n in keys]
    for place, threads in dict.fromkeys((place, threads) for place, threads, _ in shown):
        points = [(x(n), base - shown[place, threads, n] / unit * TALL) for n in keys]
        drawn = path(points, COLOURS[threads], 2)
        if place == "one server":
            parts += [drawn, *(dot(*point, COLOURS[threads], 2.5) for point in points)]
        else:
            parts.append(drawn.replace("/>", DASHED))
    return parts


def _us(one: Growth) -> float:
    return one.us


def _rate(one: Growth) -> float:
    return one.rate


def _round_up(value: float) -> float:
    """Return the next number that is four times a round one."""
    step = 10 ** math.floor(math.log10(value))
    return next(step * n for n in (1, 2, 4, 8, 10, 20) if step * n >= value)
