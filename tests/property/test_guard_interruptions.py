"""Exceptions of signal handlers at every place of guarded calls: each arrives, and nothing that a
call has taken stays taken.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

import pytest

from distwindow import (
    Blocked,
    ChainSlot,
    Concurrency,
    DegradeRule,
    FlowRule,
    Guard,
    GuardCall,
    SystemRule,
)
from distwindow.guard.entry import GuardEntry
from distwindow.guard.system_slot import SystemSlot
from distwindow.rules import Rule
from distwindow.store.memory import MemoryStore
from tests.interruptions import interrupt_at
from tests.property.test_interruptions import Remote
from tests.property.test_slot_interruptions import Uninterrupted
from tests.unit.clock_and_stores import ManualClock

Rules = Sequence[Rule]

TAKING: Rules = [
    SystemRule(max_thread=3, qps=6, avg_rt=1000),
    FlowRule("r", 100),
    FlowRule("r", 1, grade="thread"),
]
BREAKING: Rules = [
    SystemRule(max_thread=3),
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

    def __init__(self, rules: Rules, store: type[MemoryStore], consistency: Any) -> None:
        self.clock = ManualClock()
        self.store = store(self.clock)
        self.noting = Noting()
        self.guard = Guard(
            self.store, rules, consistency=consistency, slots=[self.noting], time=self.clock,
            installed_slots=False,  # to look for them takes longer than everything else here
        )  # fmt: skip

    def taking(self) -> None:
        """One call, and one that is refused by the last rule."""
        with self.guard.entry("r"), suppress(Blocked), self.guard.entry("r"):
            raise AssertionError("the slot is held")

    def breaking(self) -> None:
        """A failure, and the probe after it."""
        with suppress(OSError), self.guard.entry("r"):
            raise OSError
        self.clock.advance(2.5)
        with self.guard.entry("r"):
            pass

    def settle(self) -> None:
        for _ in range(2):
            self.guard.flush()
            self.clock.advance(11)

    def check(self, place: str | None) -> None:
        system = next(
            one.slot for one in self.guard._chain_of_others if isinstance(one.slot, SystemSlot)
        )
        assert len(system._running) == 0, place
        assert system._passed == sum(one.cost for one in system._passes), place
        assert Concurrency(self.store, 1, time=self.clock).stats("r").held == 0, place
        left, entered = self.noting.left, self.noting.entered
        if place is None or LOST not in place:
            assert sorted(map(id, left)) == sorted(map(id, entered)), place
        assert len(set(left)) == len(left), place
        # The guard works on, and its breaker lets a probe through.
        self.clock.advance(30)
        self.guard.flush()
        with self.guard.entry("r"):
            assert len(system._running) == 1, place


@pytest.mark.parametrize(
    ("scenario", "rules", "store", "consistency"),
    [
        (Run.taking, TAKING, Uninterrupted, "direct"),
        pytest.param(Run.taking, TAKING, Remote, "eventual", marks=pytest.mark.slow),
        (Run.breaking, BREAKING, Uninterrupted, "direct"),
        (Run.breaking, BREAKING, Remote, "direct"),
    ],
)
def test_nothing_is_held_wherever_a_signal_handler_raises(
    scenario: Callable[[Run], None], rules: Rules, store: Any, consistency: Any
) -> None:
    number, places = 1, set()
    while True:
        run = Run(rules, store, consistency)
        place = interrupt_at(number, partial(scenario, run), "distwindow")
        run.settle()
        run.check(place)
        if place is None:
            break
        places.add(place)
        number += 1
    assert len(places) > 30
