"""The picture of a circuit breaker that two processes share, drawn from a run."""

from __future__ import annotations

from contextvars import Context
from itertools import pairwise
from typing import Any, NamedTuple

from drawing import (
    FAINT,
    FILL,
    INK,
    MUTED,
    PALE_FILL,
    PALE_WARM,
    WARM,
    Clock,
    box,
    cross,
    dot,
    line,
    svg,
    text,
)

from distwindow import BreakerOpen, CircuitBreaker, ErrorCount
from distwindow.stores.memory import MemoryStore

EPOCH = 1_700_000_040_000
RULE = ErrorCount(8, window=10.0, open_for=2.0)
BROKEN = (1000, 4600)
"""A call that ends between these ms fails."""
END, CALL_EVERY, TAKES, FLUSH_EVERY, ROUND_MS = 7500, 200, 120, 250, 10


class Shared(MemoryStore):
    """A store that processes use like one outside of them: what they count, they flush."""

    decided_by = "store"


class Run(NamedTuple):
    """What two processes have seen: by process, the calls with how they ended, and the changes."""

    calls: dict[str, list[tuple[int, str]]]
    changes: dict[str, list[tuple[int, str]]]


def run() -> Run:
    clock = Clock(EPOCH)
    store = Shared(clock)
    found = Run({}, {})
    fleet = {name: CircuitBreaker(store, RULE, time=clock) for name in ("A", "B")}
    for name, breaker in fleet.items():
        found.calls[name], found.changes[name] = [], [(0, "closed")]
        breaker.on_change(
            lambda change, name=name: found.changes[name].append((clock.ms - EPOCH, change.state))
        )
    under_way: list[tuple[int, int, str, Any]] = []
    for ms in range(0, END + TAKES, ROUND_MS):
        clock.ms = EPOCH + ms
        while under_way and under_way[0][0] == ms:
            _, began, name, call = under_way.pop(0)
            failure = OSError() if BROKEN[0] <= ms < BROKEN[1] else None
            call.__exit__(type(failure) if failure else None, failure, None)
            found.calls[name].append((began, "failed" if failure else "answered"))
        for number, (name, breaker) in enumerate(fleet.items()):
            if (ms - 120 * number) % FLUSH_EVERY == 0:
                breaker.flush()  # the worker's round
            if (ms - 90 * number) % CALL_EVERY == 0 and ms < END:
                call = breaker.call("payments")
                try:
                    Context().run(call.__enter__)  # each process calls on its own
                except BreakerOpen:
                    found.calls[name].append((ms, "refused"))
                else:
                    under_way.append((ms + TAKES, ms, name, call))
    return found


def breakers() -> str:
    calls, changes = run()
    left, scale, top, tall = 80, 0.096, 92, 84

    def x(ms: float) -> float:
        return left + ms * scale

    low = top + 2 * tall
    begin, end = BROKEN
    parts = [
        text(
            16,
            26,
            f"ErrorCount({RULE.count}), open_for {RULE.open_for:g} s. Two processes call every "
            f"{CALL_EVERY} ms, and flush every {FLUSH_EVERY} ms.",
            size=14,
        ),
        text(16, top - 24, "service", size=13),
        box(x(begin), top - 36, x(end), top - 18, PALE_WARM),
        text(x((begin + end) / 2), top - 23, "broken", anchor="middle"),
        line(x(0), top - 18, x(END), top - 18, INK),
    ]
    for second in range(END // 1000 + 1):
        parts.append(line(x(second * 1000), top - 18, x(second * 1000), low))
        parts.append(text(x(second * 1000), low + 16, f"{second} s", anchor="middle", fill=MUTED))
    for row, name in enumerate(calls):
        y = top + row * tall + 32
        parts.append(text(30, y + 14, name, size=16))
        states = [*changes[name], (END, "")]
        for (since, state), (until, _) in pairwise(states):
            if state == "closed":
                continue
            fill = PALE_WARM if state == "open" else PALE_FILL
            parts.append(box(x(since), y - 24, x(until), y - 8, fill))
            if until - since > 500:
                parts.append(text(x(since) + 4, y - 12, state.replace("_", "-"), size=11))
        probes = [
            (since, until)
            for (since, state), (until, _) in pairwise(states)
            if state == "half_open"
        ]
        for ms, ended in calls[name]:
            if ended != "refused" and any(since <= ms < until for since, until in probes):
                parts.append(text(x(ms), y + 30, "probe", anchor="middle", size=11))
            if ended == "refused":
                parts.append(line(x(ms), y + 4, x(ms), y + 14, FAINT, 2))
            elif ended == "failed":
                parts.append(cross(x(ms), y + 9, WARM))
            else:
                parts.append(dot(x(ms), y + 9, FILL))
    failed = sum(ended == "failed" for each in calls.values() for _, ended in each)
    words = (
        (dot(left, low + 40, FILL), "answered"),
        (cross(left, low + 40, WARM), f"failed ({failed})"),
        (line(left, low + 35, left, low + 45, FAINT, 2), "refused in memory"),
        (box(left - 14, low + 33, left + 2, low + 47, PALE_FILL), "half-open"),
    )
    for number, (mark, name) in enumerate(words):
        parts.append(f"<g transform='translate({number * 150} 0)'>{mark}</g>")
        parts.append(text(left + number * 150 + 10, low + 44, name))
    return svg(820, low + 62, "Two processes that share a circuit breaker", parts)
