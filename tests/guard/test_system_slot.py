"""System rules: what all calls of a process together may do."""

from __future__ import annotations

from typing import Any

import pytest

from distwindow import (
    AuthorityRule,
    ChainSlot,
    ConfigurationError,
    FlowRule,
    Guard,
    GuardCall,
    SystemOverloaded,
    SystemRule,
)
from tests.guard.guard_worlds import WORLDS, Recorder, World, entered

EACH_WORLD = pytest.mark.parametrize("kind", WORLDS)


@EACH_WORLD
async def test_qps_is_that_of_all_resources_in_the_last_second(kind: Any) -> None:
    rule = SystemRule(qps=3)
    world = World(kind, [rule])
    await world.call("a", cost=2)
    world.clock.advance(0.5)
    await world.call("b")
    with pytest.raises(SystemOverloaded, match="qps would be 4, above 3; refused by") as refused:
        await world.call("c")
    assert refused.value.rule is rule
    world.clock.advance(0.5)  # the two permits of "a" have left the last second
    assert [await world.outcome("c") for _ in range(3)] == ["passed", "passed", "SystemOverloaded"]


@EACH_WORLD
async def test_a_call_that_a_later_slot_refuses_is_not_counted(kind: Any) -> None:
    later = Recorder()
    later.refusal = OSError("refused")
    world = World(kind, [SystemRule(qps=1, max_thread=1)], slots=[later])
    assert await world.outcome() == "OSError"
    later.refusal = None
    assert [await world.outcome(), await world.outcome()] == ["passed", "SystemOverloaded"]


@EACH_WORLD
async def test_the_number_of_running_calls(kind: Any) -> None:
    world = World(kind, [SystemRule(max_thread=2)])
    async with entered(world.guard.entry("r")), entered(world.guard.entry("r")):
        assert await world.outcome() == "SystemOverloaded"
    assert await world.outcome() == "passed"


@EACH_WORLD
async def test_the_average_rt_of_the_last_second(kind: Any) -> None:
    world = World(kind, [SystemRule(avg_rt=100)])
    await world.call(body=lambda: world.clock.advance(0.3))
    assert await world.outcome() == "SystemOverloaded"
    world.clock.advance(1.1)
    assert await world.outcome() == "passed"


@EACH_WORLD
async def test_calls_are_decided_by_the_last_sample(kind: Any) -> None:
    samples = [(0.0, 0.5), (0.0, 0.95), (0.0, 0.9)]
    world = World(kind, [SystemRule(highest_cpu_usage=0.9)], sampler=lambda: samples.pop(0))
    outcomes = []
    for _ in range(3):
        outcomes += [await world.outcome(), await world.outcome()]
        world.clock.advance(1.0)
        if samples:
            await world.flush()
    passed, refused = "passed", "SystemOverloaded"
    assert outcomes == [passed, passed, refused, refused, passed, passed]
    assert samples == []


def test_under_load_as_many_run_as_the_process_completes() -> None:
    """Sentinel's checkBbr: the best rate per second times the shortest rt."""
    world = World(Guard, [SystemRule(highest_system_load=2)], sampler=lambda: (5.0, 0.0))
    with world.guard.entry("r"):
        world.clock.advance(0.1)
    with world.guard.entry("r"), world.guard.entry("r"):
        with pytest.raises(SystemOverloaded, match="highest_system_load would be 5, above 2"):
            world.guard.entry("r").__enter__()


@EACH_WORLD
async def test_refused_calls_leave_nothing_behind(kind: Any) -> None:
    """So the time of a call does not depend on how many were refused in the last second."""
    later = Recorder()
    for rule in (SystemRule(qps=100), SystemRule(max_thread=5)):
        later.refusal = None
        world = World(kind, [rule], slots=[later])
        slot: Any = world.guard._chain_of_others[0].slot
        await world.call(cost=2)
        later.refusal = OSError("refused")
        for _ in range(200):
            assert await world.outcome() == "OSError"
        assert len(slot._passes) <= 1
        assert len(slot._running) == 0
        assert slot._passed == sum(one.cost for one in slot._passes)


def test_permits_that_have_expired_are_not_given_back_a_second_time() -> None:
    class Slow(ChainSlot):
        """Other calls pass meanwhile, and then this one is refused."""

        def enter(self, call: GuardCall) -> None:
            if call.cost == 2:
                world.clock.advance(1.5)
                with world.guard.entry("other"):
                    raise KeyError

    world = World(Guard, [SystemRule(qps=2)], slots=[Slow()])
    with pytest.raises(KeyError), world.guard.entry("r", cost=2):
        raise AssertionError("it was refused")
    with world.guard.entry("r"):
        pass
    with pytest.raises(SystemOverloaded, match="qps would be 3, above 2"):
        world.guard.entry("r").__enter__()


async def test_authority_is_asked_before_and_flow_after() -> None:
    rules = [SystemRule(qps=1), AuthorityRule("r", "app-a"), FlowRule("r", 1)]
    world = World(Guard, rules)
    assert await world.outcome(origin="app-b") == "AuthorityDenied"
    assert await world.outcome() == "passed"
    assert await world.outcome() == "SystemOverloaded"


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({}, "give at least one threshold"),
        ({"qps": -1}, "qps must be a finite number of at least 0, not -1"),
        ({"avg_rt": float("nan")}, "avg_rt must be a finite number"),
        ({"highest_cpu_usage": 80}, "highest_cpu_usage must be from 0 to 1, not 80"),
        ({"max_thread": 1.5}, "max_thread must be an int"),
        ({"max_thread": True}, "max_thread must be a finite number"),
    ],
)
def test_bad_fields(fields: Any, message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        SystemRule(**fields)
