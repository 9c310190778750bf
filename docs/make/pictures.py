"""Draws the pictures of the docs from real runs of the library: python docs/make/pictures.py

Time is moved by hand, so the same pictures come out each time; a test compares.
"""

from __future__ import annotations

import math
from pathlib import Path

from distwindow import Limit, Limiter

PICTURES = Path(__file__).resolve().parent.parent / "pictures"

INK, FAINT, FILL, WARM, PAPER = "#1f2937", "#9ca3af", "#3b82f6", "#ea580c", "#ffffff"
FONT = "font-family='ui-sans-serif, system-ui, sans-serif'"


class Clock:
    """Time that is moved by hand."""

    def __init__(self, ms: int) -> None:
        self.ms = ms

    def now_ms(self) -> int:
        return self.ms

    def monotonic(self) -> float:
        return self.ms / 1000

    def sleep(self, seconds: float, /) -> None:
        self.ms += round(seconds * 1000)


def svg(width: int, height: int, title: str, parts: list[str]) -> str:
    body = "\n".join(parts)
    return (
        f"<svg xmlns='http://www.w3.org/2000/svg' viewBox='0 0 {width} {height}' "
        f"width='{width}' height='{height}' role='img' {FONT}>\n<title>{title}</title>\n"
        f"<rect width='{width}' height='{height}' rx='8' fill='{PAPER}'/>\n{body}\n</svg>\n"
    )


def text(x: float, y: float, words: str, *, size: int = 12, anchor: str = "start", fill: str = INK):
    return (
        f"<text x='{x:.1f}' y='{y:.1f}' font-size='{size}' text-anchor='{anchor}' "
        f"fill='{fill}'>{words}</text>"
    )


def line(x1: float, y1: float, x2: float, y2: float, stroke: str = FAINT, width: float = 1) -> str:
    return (
        f"<line x1='{x1:.1f}' y1='{y1:.1f}' x2='{x2:.1f}' y2='{y2:.1f}' stroke='{stroke}' "
        f"stroke-width='{width}'/>"
    )


LIMIT, FIRST, STEP, END = 10, 990, 10, 4990


def admissions(bound: str) -> tuple[Limit, list[int]]:
    """When calls are admitted that begin at 0.99 s and then press on, ten at once, each 10 ms."""
    limit = Limit(LIMIT, per=1.0, buckets=5, bound=bound)
    clock = Clock(FIRST)
    limiter = Limiter("memory://", limit, time=clock)
    admitted = []
    for clock.ms in range(FIRST, END, STEP):
        admitted += [clock.ms for _ in range(LIMIT) if limiter.try_acquire("user:42")]
    return limit, admitted


def fullest(stamps: list[int], interval: int) -> tuple[int, int, int]:
    """Of all windows of `interval` ms: the most that one holds, its first stamp, its last."""
    best = (0, 0, 0)
    for first in sorted(set(stamps)):
        held = [stamp for stamp in stamps if first <= stamp < first + interval]
        best = max(best, (len(held), -first, held[-1]))
    return best[0], -best[1], best[2]


def leap_and_strict() -> str:
    left, scale, width, lane = 90, 0.16, 820, 165

    def x(ms: float) -> float:
        return left + (ms - 600) * scale

    parts = [
        text(
            left,
            24,
            f"{LIMIT} per second, 5 buckets of 200 ms. Calls press on from 0.99 s.",
            size=14,
        )
    ]
    for row, bound in enumerate(("leap", "strict")):
        limit, stamps = admissions(bound)
        base = 150 + row * lane
        parts.append(text(16, base - 40, bound, size=16))
        parts.append(text(16, base - 22, f"sums {limit.span}", fill=FAINT))
        parts.append(line(x(600), base, x(5000), base, INK, 1.5))
        for start in range(600, 5001, limit.bucket_ms):
            tall = 8 if start % 1000 == 0 else 4
            parts.append(line(x(start), base, x(start), base + tall, INK))
            if start < 5000:
                parts.append(line(x(start), base, x(start), base - 90))
        parts += [text(x(s * 1000), base + 22, f"{s} s", anchor="middle") for s in range(1, 6)]
        height: dict[int, int] = {}
        for stamp in stamps:
            height[stamp] = height.get(stamp, 0) + 1
            y = base - height[stamp] * 8
            parts.append(f"<circle cx='{x(stamp):.1f}' cy='{y:.1f}' r='3.2' fill='{FILL}'/>")
        most, first, last = fullest(stamps, limit.interval_ms)
        colour = WARM if most > LIMIT else INK
        y = base - 98
        parts.append(line(x(first), y, x(first + 1000), y, colour, 2))
        parts += [line(x(edge), y - 5, x(edge), y + 5, colour, 2) for edge in (first, first + 1000)]
        within = f", {(last - first) / 1000:.2f} s apart" if last > first else ""
        words = f"the fullest 1 s holds {most}{within}"
        parts.append(text(x(first) + 4, y - 7, words, fill=colour))
        parts.append(text(x(5000) - 4, base - 98, f"{len(stamps)} admitted", anchor="end"))
    return svg(width, 2 * lane + 30, "The same calls under leap and under strict", parts)


def ring() -> str:
    limit = Limit(100, per=60, buckets=6)
    start = 1_700_000_040_000  # bucket numbers 170000004 to 170000009
    clock = Clock(start)
    limiter = Limiter("memory://", limit, time=clock)
    for offset, cost in ((10, 20), (20, 12), (30, 6), (40, 8), (54, 9)):
        clock.ms = start + offset * 1000
        assert limiter.try_acquire("user:42", cost)
    stats = limiter.stats("user:42")
    counts = {bucket.start // limit.bucket_ms: bucket.passed for bucket in stats.buckets}
    newest = clock.ms // limit.bucket_ms
    cx, cy, outer, inner = 190, 190, 150, 82
    parts = []
    for slot in range(limit.buckets):
        number = next(
            n for n in range(newest, newest - limit.buckets, -1) if n % limit.buckets == slot
        )
        a, b = (2 * math.pi * (slot + i) / limit.buckets - math.pi / 2 for i in (0, 1))
        points = [(cx + r * math.cos(t), cy + r * math.sin(t)) for r, t in
                  ((outer, a), (outer, b), (inner, b), (inner, a))]  # fmt: skip
        (x1, y1), (x2, y2), (x3, y3), (x4, y4) = points
        age = newest - number
        fill = FILL if age == 0 else "#dbeafe"
        parts.append(
            f"<path d='M{x1:.1f} {y1:.1f} A{outer} {outer} 0 0 1 {x2:.1f} {y2:.1f} "
            f"L{x3:.1f} {y3:.1f} A{inner} {inner} 0 0 0 {x4:.1f} {y4:.1f} Z' fill='{fill}' "
            f"stroke='{PAPER}' stroke-width='3'/>"
        )
        middle = (a + b) / 2
        mx, my = (cx + 116 * math.cos(middle), cy + 116 * math.sin(middle))
        ink = PAPER if age == 0 else INK
        parts.append(text(mx, my, str(counts.get(number, "-")), size=20, anchor="middle", fill=ink))
        parts.append(text(mx, my + 17, f"slot {slot}", size=11, anchor="middle", fill=ink))
        mx, my = (cx + 168 * math.cos(middle), cy + 168 * math.sin(middle) + 4)
        parts.append(text(mx, my, f":{number * 10 % 60:02d}", anchor="middle", fill=FAINT))
    parts += [
        text(cx, cy - 6, f"used {stats.passed}", size=20, anchor="middle"),
        text(cx, cy + 18, f"{stats.remaining} left of {limit.amount}", anchor="middle"),
        text(390, 60, f"100/minute, 6 buckets of {limit.bucket_ms // 1000} s", size=16),
        text(390, 92, "bucket number = start / width", size=13),
        text(390, 114, "slot = number % 6", size=13),
        text(390, 152, "dark: the newest bucket, where calls", size=13),
        text(390, 172, f"count now. Its number is {newest}.", size=13),
        text(390, 204, "Ten seconds later the next slot is", size=13),
        text(390, 224, "taken over: what lies there leaves.", size=13),
        text(390, 256, "used: the sum, kept up to date, so", size=13),
        text(390, 276, "that a call never walks the buckets.", size=13),
    ]
    return svg(720, 390, "A ring of six buckets", parts)


def pictures() -> dict[str, str]:
    """Every picture by its file name."""
    return {"leap-and-strict.svg": leap_and_strict(), "ring.svg": ring()}


def main() -> None:
    PICTURES.mkdir(exist_ok=True)
    for name, drawn in pictures().items():
        (PICTURES / name).write_text(drawn, encoding="utf-8")
        print(PICTURES / name)


if __name__ == "__main__":
    main()
