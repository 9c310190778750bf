"""The most calls of several processes that were admitted in one window.

The times in the decisions are estimates, so windows are taken from the machine's clock, which the
server uses, too. A call is counted in a window only if it began and ended inside: so no call is
counted that may have been outside, and every excess that is found is real.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from typing import Any

from distwindow import Limit
from tests.attack.fleet import called

PROCESSES = 4

Span = tuple[float, float]
"""When an admitted call began and ended, ms since 1970."""


def call_in_processes(
    url: str, options: dict[str, Any], seconds: float, kill: int = 0, pause_s: float = 0.0003
) -> tuple[list[Span], Counter[str]]:
    """Return what four processes are admitted in so many seconds, and the number of decisions by
    source; `kill` of them are killed meanwhile.
    """
    history = called(
        url,
        {"w": options},
        {},
        seconds,
        ["sync"] * PROCESSES,
        threads=2,
        pause_s=pause_s,
        kill=kill,
    )
    spans = [(call["wall"], call["wall"] + call["took"]) for call in history.calls if call["ok"]]
    return spans, Counter(f"{call['by']} {call['ok']}" for call in history.calls)


def most_aligned(spans: list[Span], limit: Limit) -> int:
    """Return the most calls that were certainly admitted in one window of whole buckets."""
    width = limit.bucket_ms
    passed: Counter[int] = Counter()
    for began, ended in spans:
        if began // width == (ended + 1) // width:  # the server's clock shows whole ms
            passed[int(began // width)] += 1
    first, last = min(passed), max(passed)
    window = [sum(passed[n - i] for i in range(limit.buckets)) for n in range(first, last + 1)]
    return max(window)


def most_anywhere(spans: list[Span], limit: Limit) -> int:
    """Return the most calls that were certainly admitted within one interval, wherever it
    begins.
    """
    starts = sorted(began for began, _ in spans)
    ends = sorted(ended for _, ended in spans)
    return max(
        bisect_left(ends, began + limit.interval_ms - 1) - bisect_left(starts, began)
        for began in starts
    )
