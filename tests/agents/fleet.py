"""Processes that share a limit, and when it admitted their calls by the clock of Redis."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from typing import Any

PROCESSES = 4


def in_processes(function: Callable[..., list[Any]], *arguments: Any) -> list[Any]:
    """Return all that `function(*arguments)` has returned in each of `PROCESSES` processes."""
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(PROCESSES, context) as processes:
        calls = [processes.submit(function, *arguments) for _ in range(PROCESSES)]
        return [each for call in calls for each in call.result()]


def admissions(limiter: Any) -> list[int]:
    """Return a list that has the moment of each call that the store admits from now on, ms."""
    decider = limiter.decider
    answered, moments = decider.answered, []

    def noted(decision: Any) -> Any:
        if decision.allowed:
            moments.append(decision.now_ms)
        return answered(decision)

    decider.answered = noted
    return moments


def most_in_any(moments: Sequence[int], window_ms: int) -> int:
    """Return the most moments that are in one window, wherever it begins."""
    return max(sum(first <= each < first + window_ms for each in moments) for first in moments)
