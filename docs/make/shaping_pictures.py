"""The pictures of limits that are paced or warm up, drawn from runs."""

from __future__ import annotations

from drawing import (
    FILL,
    INK,
    MUTED,
    PALE_FILL,
    WARM,
    Clock,
    cross,
    dot,
    line,
    path,
    steps,
    svg,
    text,
)

from distwindow import Decision, Limiter

EPOCH = 1_700_000_040_000
PACED, PACED_CALLS = "10/second paced 300ms", (0, 0, 0, 0, 0, 650, 660)
WARMING = "100/second warmup 10s"
DEMAND_STEP_MS, IDLE, SECONDS = 5, range(16, 27), 33


def paced() -> list[tuple[int, Decision]]:
    """Return each call: when it came, ms, and its decision."""
    clock = Clock(EPOCH)
    limiter = Limiter("memory://", PACED, time=clock)
    calls = []
    for at in PACED_CALLS:
        clock.ms = EPOCH + at
        calls.append((at, limiter.try_acquire("partner")))
    return calls


def pacing() -> str:
    left, scale, top, tall = 60, 0.56, 72, 26
    calls = paced()
    low = top + len(calls) * tall

    def x(ms: float) -> float:
        return left + ms * scale

    parts = [text(16, 26, f"{PACED}: five calls at once, and two after idle time", size=14)]
    for ms in range(0, 1000, 100):
        parts.append(line(x(ms), top - 12, x(ms), low))
        parts.append(text(x(ms), top - 18, f"{ms}", anchor="middle", size=11, fill=MUTED))
    parts.append(text(x(950), top - 18, "ms", size=11, fill=MUTED))
    for row, (at, decision) in enumerate(calls):
        y = top + 8 + row * tall
        parts.append(text(left - 26, y + 4, f"{row + 1}", anchor="end", fill=MUTED))
        if not decision.allowed:
            again = round(decision.retry_after * 1000)
            words = f"refused: its wait would be above 300 ms; retry_after is {again} ms"
            parts += [cross(x(at), y, WARM), text(x(at) + 12, y + 4, words, fill=WARM)]
            continue
        wait = round(decision.wait * 1000)
        end = x(at + wait)
        if wait:
            parts += [line(x(at), y, end, y, FILL, 2), dot(x(at), y, INK, 3)]
        parts.append(dot(end, y, FILL, 6))
        words = f"waits for {wait} ms" if wait else "proceeds at once"
        parts.append(text(end + 12, y + 4, words))
    parts += [
        dot(left, low + 24, INK, 3),
        text(left + 12, low + 28, "a call comes"),
        dot(left + 130, low + 24, FILL, 6),
        text(left + 142, low + 28, "it proceeds: 100 ms after the one before it, or at once"),
    ]
    return svg(700, low + 44, "Calls under a paced limit, and when they proceed", parts)


def warmed() -> tuple[list[int], list[float], float, float]:
    """Return how many calls each second has admitted, the stored tokens at each tenth of a second,
    and the tokens at the warning line and of a cold limit.
    """
    clock = Clock(EPOCH)
    limiter = Limiter("memory://", WARMING, time=clock)
    admitted, tokens, sizes = [], [], (0.0, 0.0)
    for second in range(SECONDS):
        admitted.append(0)
        for ms in range(0, 1000, DEMAND_STEP_MS):
            clock.ms = EPOCH + second * 1000 + ms
            if second not in IDLE:
                admitted[-1] += bool(limiter.try_acquire("search"))
            if ms % 100 == 0:
                shaping = limiter.stats("search").windows[0].shaping
                tokens.append(shaping.stored_tokens)
                sizes = shaping.warning_tokens, shaping.max_tokens
    return admitted, tokens, *sizes


def warm_up() -> str:
    admitted, tokens, warning, most = warmed()
    left, scale, low, tall, tokens_low = 110, 17.5, 190, 1.2, 330

    def x(second: float) -> float:
        return left + second * scale

    parts = [
        text(
            16,
            26,
            f"{WARMING}: {1000 // DEMAND_STEP_MS} calls per second, but none "
            f"from {IDLE.start} s to {IDLE.stop} s",
            size=14,
        ),
        text(16, low - 62, "admitted", size=13),
        text(16, low - 46, "per second", size=13),
        text(16, tokens_low - 62, "stored", size=13),
        text(16, tokens_low - 46, "tokens", size=13),
        line(x(0), low - 100 * tall, x(SECONDS), low - 100 * tall),
        text(x(SECONDS) + 4, low - 100 * tall + 4, "100", fill=MUTED),
        line(x(0), low, x(SECONDS), low, INK, 1.5),
        line(x(0), tokens_low, x(SECONDS), tokens_low, INK, 1.5),
    ]
    for second, count in enumerate(admitted):
        if count:
            parts.append(
                f"<rect x='{x(second) + 1:.1f}' y='{low - count * tall:.1f}' "
                f"width='{scale - 2:.1f}' height='{count * tall:.1f}' fill='{FILL}'/>"
            )
        if second in (0, IDLE.start - 1, IDLE.stop):
            y = low - count * tall - 5
            parts.append(text(x(second) + scale / 2, y, f"{count}", anchor="middle"))
    for at, name in ((warning, "warning"), (most, "max")):
        y = tokens_low - at * 0.1
        parts.append(line(x(0), y, x(SECONDS), y))
        parts.append(text(x(SECONDS) + 4, y + 4, f"{name} {at:,.0f}", fill=MUTED))
    outline = steps([(x(i / 10), tokens_low - value * 0.1) for i, value in enumerate(tokens)])
    area = [(x(0), tokens_low), *outline, (x(SECONDS), tokens_low)]
    parts.append(path(area, "none", 0, PALE_FILL))
    parts.append(path(outline, FILL, 2))
    for second in range(0, SECONDS + 1, 5):
        parts.append(line(x(second), tokens_low, x(second), tokens_low + 5, INK))
        parts.append(text(x(second), tokens_low + 20, f"{second} s", anchor="middle", fill=MUTED))
    words = (
        "Demand uses tokens up: the fewer, the higher the rate. Below the warning line: all of it."
    )
    parts.append(text(16, tokens_low + 46, words))
    return svg(800, tokens_low + 62, "A limit that warms up, cools down and warms up again", parts)
