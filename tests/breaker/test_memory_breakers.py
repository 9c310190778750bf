"""A breaker that has made its own store (`memory://`) does not ask it in every call. It decides as
one that does, whose store is given.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from distwindow import (
    BreakerOpen,
    CircuitBreaker,
    ConsecutiveFailures,
    ErrorCount,
    ErrorRatio,
    SlowRatio,
)
from distwindow.breaker.rules import RULES, BreakerRule
from distwindow.stores.memory import MemoryStore
from tests.clock_and_stores import ManualClock

OPTIONS: dict[str, Any] = {"window": 1.0, "open_for": 0.7, "probes": 2, "min_calls": 4}
MADE: dict[str, BreakerRule] = {
    rule.kind: rule
    for rule in (
        ErrorRatio(0.5, **OPTIONS),
        SlowRatio(0.05, **OPTIONS),
        ErrorCount(3, **OPTIONS),
        ConsecutiveFailures(3, open_for=0.7, probes=2),
    )
}
assert set(MADE) == {rule.kind for rule in RULES}
calls = st.tuples(st.booleans(), st.sampled_from([0, 10, 90]), st.sampled_from([0, 1, 120, 700]))


def run(breaker: CircuitBreaker, clock: ManualClock, steps: list[tuple[bool, int, int]]) -> Any:
    """Return what each call meets: its end, or the refusal; and the state after all."""
    met: list[Any] = []
    for fails, takes_ms, pause_ms in steps:
        try:
            with breaker.call("k") as call:
                clock.move(takes_ms)
                if fails:
                    call.fail()
            met.append(fails)
        except BreakerOpen as refused:
            met.append((refused.state, refused.retry_after))
        clock.move(pause_ms)
    return [*met, breaker.state("k")]


@pytest.mark.parametrize("kind", list(MADE))
@settings(max_examples=75, deadline=None)
@given(steps=st.lists(calls, max_size=40))
def test_it_decides_as_one_that_asks_in_every_call(
    kind: str, steps: list[tuple[bool, int, int]]
) -> None:
    ours, theirs = ManualClock(auto_advance=False), ManualClock(auto_advance=False)
    own = CircuitBreaker("memory://", MADE[kind], time=ours)
    asking = CircuitBreaker(MemoryStore(theirs), MADE[kind], time=theirs)
    assert run(own, ours, steps) == run(asking, theirs, steps)


def test_a_closed_breaker_tells_of_good_calls_by_the_bucket() -> None:
    clock = ManualClock(auto_advance=False)
    breaker = CircuitBreaker("memory://", MADE["error_ratio"], time=clock)
    asked: Counter[str] = Counter()
    execute = breaker._store.execute_many

    def counted(commands: Any, deadline: Any = None) -> Any:
        asked.update(type(command).__name__ for command in commands)
        return execute(commands, deadline)

    breaker._store.execute_many = counted  # type: ignore[method-assign]  # it counts
    for _ in range(100):
        with breaker.call("k"):
            pass
    assert sum(asked.values()) <= 3
    assert breaker.state("k") == "closed"
