"""Turns of refused tasks: a fleet of workers, simulated on one store with a clock that is moved."""

from __future__ import annotations

import heapq
from collections import Counter

from hypothesis import given, settings
from hypothesis import strategies as st

from distwindow import Limit, Limiter
from distwindow.contrib.tasks import TaskGate, TaskLimits
from distwindow.stores.memory import MemoryStore
from distwindow.testing import ManualClock


def job() -> None: ...


def run_fleet(workers: int, jobs: int, limit: Limit, late_ms: int, *, turns: bool) -> list[int]:
    """Run `jobs`, which are all there at once, and come back up to `late_ms` after their delay.
    Return when each was admitted, ms after the first, and last how often they were sent back.
    """
    clock = ManualClock()
    store = MemoryStore(clock)
    task = TaskLimits("job", job, limit)
    gates = [TaskGate(store, time=clock) for _ in range(workers)]
    for gate in gates:
        gate.add(task)
    limiter = Limiter(store, limit, time=clock)
    began_ms = clock.now_ms()
    waiting = [(0.0, number) for number in range(jobs)]
    admitted: list[int] = []
    requeues = 0
    while waiting:
        due_ms, number = heapq.heappop(waiting)
        clock.advance(max(0.0, due_ms - (clock.now_ms() - began_ms)) / 1000)
        now_ms = clock.now_ms() - began_ms
        if turns:
            delay = gates[(number + requeues) % workers].delay(task, (), {})
        else:
            delay = limiter.try_acquire("job").retry_after
        if delay:
            requeues += 1
            heapq.heappush(waiting, (now_ms + delay * 1000 + number * 7 % (late_ms + 1), number))
        else:
            admitted.append(clock.now_ms())
    return [*admitted, requeues]


@settings(max_examples=25, deadline=None)
@given(
    workers=st.integers(1, 8),
    jobs=st.integers(1, 120),
    amount=st.integers(1, 20),
    late_ms=st.sampled_from([0, 50, 1000]),
)
def test_each_job_runs_once_within_the_bound_and_is_seldom_sent_back(
    workers: int, jobs: int, amount: int, late_ms: int
) -> None:
    limit = Limit(amount, per=1.0)
    *admitted, requeues = run_fleet(workers, jobs, limit, late_ms, turns=True)
    assert len(admitted) == jobs
    counts = Counter(ms // limit.bucket_ms for ms in admitted)
    assert (
        max(sum(counts[first + offset] for offset in range(limit.buckets)) for first in counts)
        <= amount
    )
    assert requeues <= 3 * jobs


def test_without_turns_a_crowd_comes_back_together() -> None:
    limit = Limit(20, per=1.0)
    *_, with_turns = run_fleet(2, 200, limit, 0, turns=True)
    *_, without = run_fleet(2, 200, limit, 0, turns=False)
    assert with_turns < 200 * 1.5 < 200 * 4 < without
