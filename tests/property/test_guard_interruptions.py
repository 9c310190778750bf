"""Exceptions of signal handlers at every place of guarded calls: each arrives, and nothing that a
call has taken stays taken.
"""

from __future__ import annotations

import gc
from contextlib import suppress
from functools import partial
from typing import Any

import pytest

from distwindow import Blocked, ChainSlot, DegradeRule, FlowRule, Guard, GuardCall, SystemRule
from distwindow.guard.entry import GuardEntry
from distwindow.guard.system_slot import SystemSlot
from distwindow.store.memory import MemoryStore
from tests.interruptions import interrupt_at
from tests.property.test_interruptions import Remote
from tests.property.test_slot_interruptions import Uninterrupted
from tests.unit.clock_and_stores import ManualClock

RULES = [
    SystemRule(max_thread=3, qps=6, avg_rt=1000),
    FlowRule("r", 100),
    FlowRule("r", 2, grade="thread"),
    FlowRule("r", 1, grade="thread", limit_app="app-a"),
    DegradeRule("r", 0, grade="error_count", time_window_s=2, min_request_amount=1),
]

LOST = f"{GuardEntry.__exit__.__code__.co_firstlineno} call "
"""Where Python has not begun `__exit__` yet, nothing can leave what is told by `exit` alone."""


class Noting(ChainSlot):
    """A slot of the application: it is told of each end once."""

    order = 350

    def __init__(self) -> None:
        self.entered: list[object] = []
        self.left: list[object] = []

    def enter(self, call: GuardCall) -> object:
        token = object()
        self.entered.append(token)
        return token

    def exit(self, call: GuardCall, token: Any, outcome: Any) -> None:
        self.left.append(token)


class Run:
    """One guard, and how many blocks have begun."""

    def __init__(self, store: type[MemoryStore], consistency: Any) -> None:
        self.clock = ManualClock()
        self.store = store(self.clock)
        self.noting = Noting()
        self.guard = Guard(
            self.store, RULES, consistency=consistency, slots=[self.noting], time=self.clock
        )
        self.blocks = 0

    def calls(self) -> None:
        with self.guard.entry("r", "app-a"):
            self.blocks += 1
            with suppress(Blocked), self.guard.entry("r", "app-a"):
                raise AssertionError("all slots of app-a are held")
        with suppress(Blocked), self.guard.entry("r", cost=7):
            raise AssertionError("more than qps")
        with suppress(OSError), self.guard.entry("r"):
            self.blocks += 1
            raise OSError
        self.clock.advance(2.5)
        with self.guard.entry("r"):  # the probe of the breaker
            self.blocks += 1

    def settle(self) -> None:
        gc.collect()
        for _ in range(2):
            self.guard.flush()
            self.clock.advance(11)

    def part(self, kind: str) -> Any:
        """Return the first limiter, concurrency limit or breaker of this kind."""
        return next(one for one in self.guard._parts.values() if type(one).__name__ == kind)

    def check(self, place: str | None) -> None:
        system = next(
            one.slot for one in self.guard._chain_of_others if isinstance(one.slot, SystemSlot)
        )
        assert len(system._running) == 0, place
        assert system._passed == sum(one.cost for one in system._passes), place
        for key in ("r", "r@app-a"):
            assert self.part("Concurrency").stats(key).held == 0, place
        left, entered = self.noting.left, self.noting.entered
        assert len(set(left)) == len(left), place
        if place is None or LOST not in place:
            assert left == sorted(left, key=left.index), place
            assert set(left) == set(entered), place
        # A guard that was interrupted works on, and its breaker lets a probe through.
        with suppress(Blocked), self.guard.entry("r"):
            pass
        self.clock.advance(30)
        self.guard.flush()
        with self.guard.entry("r", "app-a"), self.guard.entry("r"):
            assert len(system._running) == 2


@pytest.mark.parametrize(
    ("store", "consistency"),
    [(Uninterrupted, "direct"), (Remote, "direct"), (Remote, "leased"), (Remote, "eventual")],
)
def test_nothing_is_held_wherever_a_signal_handler_raises(store: Any, consistency: Any) -> None:
    number, places = 1, set()
    while True:
        run = Run(store, consistency)
        place = interrupt_at(number, partial(run.calls), "distwindow")
        run.settle()
        run.check(place)
        if place is None:
            break
        places.add(place)
        number += 1
    assert len(places) > 100
