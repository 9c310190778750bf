"""The picture of one limit over four processes, drawn from calls of real limiters on a clock that
the program moves.
"""

from __future__ import annotations

import random

from drawing import FAINT, FILL, INK, MUTED, PALE_FILL, PALE_WARM, WARM, Clock, box, line, svg, text

from distwindow import Limiter
from distwindow.stores.memory import MemoryStore

WIDTH, LEFT, RIGHT, TALL = 760, 24, 24, 96
LIMIT, SECONDS, STEP_MS, PROCESSES = 100, 8, 5, 4
COLOURS = (FILL, PALE_FILL, WARM, PALE_WARM)


def _admitted(shared: bool) -> list[list[int]]:
    """Return when each process was admitted (ms), with one limit for all or one for each."""
    clock, chance = Clock(1_700_000_000_000), random.Random(4)
    stores = [MemoryStore(clock)] * PROCESSES
    if not shared:
        stores = [MemoryStore(clock) for _ in range(PROCESSES)]
    limiters = [Limiter(store, f"{LIMIT}/second strict", time=clock) for store in stores]
    times: list[list[int]] = [[] for _ in limiters]
    for at in range(0, SECONDS * 1000, STEP_MS):
        clock.ms = 1_700_000_000_000 + at
        for process in chance.sample(range(PROCESSES), PROCESSES):
            # Each process has its busy seconds, in which it alone asks for more than the limit.
            busy = (at // 1000 + process) % PROCESSES < 2
            if chance.random() < (0.9 if busy else 0.25) and limiters[process].try_acquire("api"):
                times[process].append(at)
    return times


def one_limit() -> str:
    """What four processes were admitted in the last second, with one limit and with four."""
    parts = []
    top = 24
    for title, shared in (
        (f"distwindow: one limit of {LIMIT} per second for four processes", True),
        ("a limiter in each process, with the same limit", False),
    ):
        times = _admitted(shared)
        unit, width = TALL / (PROCESSES * LIMIT), (WIDTH - LEFT - RIGHT) / (SECONDS * 10)
        seconds = [
            [sum(end - 1000 <= at < end for at in one) for one in times]
            for end in range(100, SECONDS * 1000 + 1, 100)
        ]
        most = max(map(sum, seconds))
        base = top + 20 + most * unit
        for tenth, counts in enumerate(seconds):
            left, height = LEFT + tenth * width, 0
            for colour, count in zip(COLOURS, counts, strict=True):
                above = base - (height + count) * unit
                parts.append(box(left, above, left + width - 1, base - height * unit, colour))
                height += count
        mark = base - LIMIT * unit
        parts += [
            text(LEFT, top + 6, f"{title}: {most} at most in a second", size=14),
            line(LEFT, mark, WIDTH - RIGHT, mark, INK),
            line(LEFT, base, WIDTH - RIGHT, base, FAINT),
        ]
        top = base + 28
    parts.append(text(LEFT, top, "Bars: calls let through in the last second, a colour for each "
                      f"process. Line: {LIMIT}.", fill=MUTED))  # fmt: skip
    return svg(WIDTH, top + 16, "Four processes under one limit", parts)
