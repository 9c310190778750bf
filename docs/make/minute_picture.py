"""The picture of a minute view: what entries did in each second, of all and of each origin."""

from __future__ import annotations

import contextlib

from drawing import FAINT, FILL, INK, MUTED, WARM, Clock, box, line, svg, text

from distwindow import Limiter, MinuteStats, RateLimitExceeded

EPOCH = 1_700_000_040_000
LIMIT, KEY = "12/second", "payments"
BURST, FAILING = range(38, 46), range(20, 26)
"""Seconds in which `search` calls more, and in which calls of `checkout` fail."""


def run() -> tuple[MinuteStats, dict[str, MinuteStats]]:
    """Return what the entries of a minute did: of all, and by origin."""
    clock = Clock(EPOCH)
    limiter = Limiter("memory://", LIMIT, time=clock)
    for second in range(60):
        calls = {"checkout": 3 + second % 4, "search": 12 if second in BURST else second // 9}
        for origin, count in calls.items():
            for number in range(count):
                clock.ms = EPOCH + second * 1000 + number * 80
                with contextlib.suppress(RateLimitExceeded, OSError):
                    with limiter.entry(KEY, origin=origin):
                        if origin == "checkout" and second in FAILING:
                            raise OSError
    return limiter.minute(KEY), limiter.origins(KEY)


def minute_view() -> str:
    total, by_origin = run()
    left, scale, top, tall, height = 110, 10.6, 60, 108, 4.4

    def x(second: float) -> float:
        return left + second * scale

    parts = [
        text(16, 26, f"{LIMIT} on the key {KEY!r}: the last minute, second by second", size=14)
    ]
    views = {"all entries": total, **by_origin}
    for row, (name, view) in enumerate(views.items()):
        low = top + row * tall + 78
        parts.append(text(16, low - 34, name, size=13))
        words = f"{view.passed} passed"
        parts.append(text(16, low - 17, words, size=11, fill=MUTED))
        parts.append(text(16, low - 3, f"{view.blocked} blocked", size=11, fill=MUTED))
        parts.append(line(x(0), low, x(60), low, INK, 1.5))
        for bucket in view.seconds:
            second = (bucket.start - EPOCH) // 1000
            y = low
            for count, fill in ((bucket.passed, FILL), (bucket.blocked, FAINT)):
                if count:
                    parts.append(box(x(second) + 1, y - count * height, x(second + 1) - 1, y, fill))
                y -= count * height
            if bucket.error:
                deep = low + 2 + bucket.error * 2.4
                parts.append(box(x(second) + 1, low + 2, x(second + 1) - 1, deep, WARM))
    low = top + len(views) * tall
    for second in range(0, 61, 10):
        words = "now" if second == 60 else f"-{60 - second} s"
        parts.append(text(x(second), low + 2, words, anchor="middle", size=11, fill=MUTED))
    legend = ((FILL, "passed"), (FAINT, "blocked"), (WARM, "ended with an error (below the line)"))
    for number, (fill, words) in enumerate(legend):
        at = left + number * 110
        parts.append(box(at, low + 16, at + 14, low + 28, fill))
        parts.append(text(at + 20, low + 26, words))
    return svg(780, low + 44, "What entries did in the last minute, by second and origin", parts)
