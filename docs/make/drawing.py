"""What all pictures are drawn with: a clock that the program moves, and parts of an SVG.

The colours of a dark page are set by a style in each picture, so a picture never depends on the
page around it: its paper is opaque in both.
"""

from __future__ import annotations

from itertools import pairwise

INK, MUTED, FAINT, PAPER = "#1f2937", "#6b7280", "#9ca3af", "#ffffff"
FILL, WARM, PALE_FILL, PALE_WARM = "#3b82f6", "#ea580c", "#dbeafe", "#fed7aa"
FONT = "font-family='ui-sans-serif, system-ui, sans-serif'"
_ON_DARK = {
    INK: "#e6edf3",
    MUTED: "#9ca3af",
    FAINT: "#6b7280",
    PAPER: "#0d1117",
    FILL: "#60a5fa",
    WARM: "#fb923c",
    PALE_FILL: "#1e3a5f",
    PALE_WARM: "#7c2d12",
}
_DARK = "".join(
    f"[{name}='{light}']{{{name}:{dark}}}"
    for light, dark in _ON_DARK.items()
    for name in ("fill", "stroke")
)
STYLE = f"<style>@media (prefers-color-scheme:dark){{{_DARK}}}</style>"


class Clock:
    """A clock that stands still until the program moves it."""

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
        f"width='{width}' height='{height}' role='img' {FONT}>\n<title>{title}</title>\n{STYLE}\n"
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


def box(x1: float, y1: float, x2: float, y2: float, fill: str, stroke: str = "none") -> str:
    return (
        f"<rect x='{x1:.1f}' y='{y1:.1f}' width='{x2 - x1:.1f}' height='{y2 - y1:.1f}' "
        f"fill='{fill}' stroke='{stroke}'/>"
    )


def dot(x: float, y: float, fill: str, radius: float = 4) -> str:
    return f"<circle cx='{x:.1f}' cy='{y:.1f}' r='{radius}' fill='{fill}'/>"


def cross(x: float, y: float, stroke: str, size: float = 4) -> str:
    return line(x - size, y - size, x + size, y + size, stroke, 2) + line(
        x - size, y + size, x + size, y - size, stroke, 2
    )


def path(points: list[tuple[float, float]], stroke: str, width: float = 1.5, fill: str = "none"):
    way = " L".join(f"{x:.1f} {y:.1f}" for x, y in points)
    return f"<path d='M{way}' fill='{fill}' stroke='{stroke}' stroke-width='{width}'/>"


def steps(values: list[tuple[float, float]]) -> list[tuple[float, float]]:
    """Return the points of a line that keeps each value until the next one."""
    found = values[:1]
    for (_, before), (x, y) in pairwise(values):
        found += [(x, before), (x, y)] if y != before else [(x, y)]
    return found
