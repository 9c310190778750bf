"""What an observer is told of the tasks that one process has: for all task queues.

    a task                               is counted as        by
    starts                               allowed              the limit that had least left
    begins to wait for its limits here   refused, once        the limit that refuses
    is sent back to its queue            refused, unless it   the same; "sent_back" where it has
                                         has waited here      waited for something else
    has a key that cannot be asked for   an error, of the     all of its limits
                                         reason "key_error"

Tasks start and wait while the store is away, too: of the reason "store_down". A task of taskiq or
arq that starts within the time for which it may wait in its worker is counted as one that starts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import NamedTuple

from ..observer import Level, Result, Tally
from ..ring.decision import Decision
from ..ring.key import AnyKey
from ..ring.limit import Limit
from ..rules.shadow import as_enforced


class DecidedTask(NamedTuple):
    """What was decided about a task."""

    key: AnyKey
    limit: Limit | str
    cost: int
    result: Result
    reason: str
    source: str


def decided_task(decision: Decision) -> DecidedTask:
    """Return what a limit has decided about a task, also where that is not enforced."""
    allowed, reason = as_enforced(decision)
    _, key, cost, limit, *_ = decision
    result: Result = "allowed" if allowed else "refused"
    return DecidedTask(key, limit, cost, result, reason, decision.source)


def count_task(
    tally: Tally | None, task: str, asked: DecidedTask, waited: tuple[float, ...] = ()
) -> None:
    """Count a task that starts, or begins to wait."""
    if tally is not None:
        key, limit, cost, result, reason, source = asked
        tally.counted(key, limit, result, reason, source, 1, cost, waited, name=task)


def text_of(limits: Iterable[Limit]) -> str:
    """Return the limits as one text, where none of them decides."""
    return ", ".join(map(str, limits))


class WaitingTasks(NamedTuple):
    """Tasks that wait for their limits."""

    task: str
    reason: str
    tasks: int
    oldest_wait_s: float


def tell_waiting(tally: Tally, waiting: Callable[[], Iterable[WaitingTasks]]) -> None:
    """Have `tally` told how many tasks wait in this process, and how long the oldest has, by task
    and reason. `waiting` is called by the worker.
    """
    told: set[tuple[str, str]] = set()

    def levels() -> list[Level]:
        """Return the levels of now; 0 for what has just ended."""
        found: dict[tuple[str, str], tuple[int, float]] = dict.fromkeys(told, (0, 0.0))
        for task, reason, tasks, oldest_s in waiting():
            others, oldest_other_s = found.get((task, reason), (0, 0.0))
            found[task, reason] = others + tasks, max(oldest_s, oldest_other_s)
        told.clear()
        levels = []
        for (task, reason), (tasks, oldest_s) in found.items():
            if tasks:
                told.add((task, reason))
            levels.append(Level("queue", task, "tasks_waiting", reason, float(tasks)))
            levels.append(Level("queue", task, "oldest_wait_s", reason, oldest_s))
        return levels

    tally.levels = levels
