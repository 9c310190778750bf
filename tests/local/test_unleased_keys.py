"""In leased mode, a key that is called too seldom for a lease has no key state: the store decides
its calls as in direct mode.
"""

from __future__ import annotations

from typing import Any

import pytest

from distwindow import Key
from distwindow.local.leased import Leased
from distwindow.local.leases import Demand
from distwindow.runtime.command_cache import CommandCache
from distwindow.runtime.options import Options
from distwindow.testing import ManualClock

FAR_APART_S, CLOSE_S = 0.1, 0.001


class Setup:
    def __init__(self) -> None:
        self.clock = ManualClock()
        self.commands = CommandCache("p", "1000/second")
        self.strategy = Leased(self.commands, self.clock, Options(max_local_keys=10))

    def goes_straight(self, key: Any = "k", cost: int = 1) -> bool:
        """True if the store alone decides the next call."""
        command = self.strategy.store_command(key, cost)
        assert command is None or command.charges[0].cost == cost
        return command is not None


def test_calls_far_apart_get_no_key_state() -> None:
    setup = Setup()
    for _ in range(100):
        assert setup.goes_straight()
        setup.clock.advance(FAR_APART_S)
    assert len(setup.strategy._key_states) == 0


@pytest.mark.parametrize("key", ["k", b"k", b"\xff", Key("k", "t")])
def test_calls_close_together_lead_to_a_lease(key: Any) -> None:
    setup = Setup()
    for _ in range(5):
        if not setup.goes_straight(key):
            break
        setup.clock.advance(CLOSE_S)
    else:
        raise AssertionError("five calls in five ms are not worth a lease")
    steps = setup.strategy.acquire_remote(key, 1)
    assert type(next(steps)).__name__ == "Fetch", "the demand is that of the calls before"
    steps.close()
    assert not setup.goes_straight(key), "it has a key state now"
    assert not setup.goes_straight(key, 7), "its lease is given back before a call that costs more"


def test_a_long_key_always_goes_straight_and_nothing_is_kept_of_it() -> None:
    setup = Setup()
    for _ in range(10):
        assert setup.goes_straight("x" * 10_000)
    assert len(setup.commands._commands) == 0


def test_a_high_cost_counts_for_the_demand_at_once() -> None:
    setup = Setup()
    assert setup.goes_straight(cost=10)
    assert setup.goes_straight(cost=10), "the first call is not observed"
    assert not setup.goes_straight(cost=10)


def test_the_demand_is_taken_over_by_the_key_state() -> None:
    setup = Setup()
    while setup.goes_straight():
        setup.clock.advance(CLOSE_S)
    demand = setup.commands.acquire_command("k").unleased_demand
    assert isinstance(demand, Demand)
    next(setup.strategy.acquire_remote("k", 1))
    state = setup.strategy._key_states.get("k")
    assert state is not None
    assert state.demand is demand
    assert not isinstance(setup.commands.acquire_command("k").unleased_demand, Demand)
