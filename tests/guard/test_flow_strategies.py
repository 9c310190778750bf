"""Flow rules that count other calls than all of a resource: `strategy="relate"` and `"chain"`.

The oracle is Sentinel's own chain (`distwindow.sentinel`), which replays recordings of such rules
(`chain_origin_thread_relate`). Its second has two buckets and the fleet's has ten, so both hold the
same calls where all of them are made at multiples of half a second.
"""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from distwindow import (
    AsyncGuard,
    ConcurrencyExceeded,
    ConfigurationError,
    FlowRule,
    Guard,
    Limiter,
    RateLimitExceeded,
    call_context,
    guarded,
)
from distwindow.sentinel import SlotChain
from tests.guard.guard_worlds import WORLDS, World, entered

IN_BOTH_WORLDS = pytest.mark.parametrize("kind", WORLDS)
READ = FlowRule("read", 3, strategy="relate", ref_resource="write")
WEB = FlowRule("read", 2, strategy="chain", ref_resource="web")


# -- the oracle -----------------------------------------------------------------------------------

RULES = st.lists(
    st.one_of(
        st.builds(FlowRule, st.sampled_from("abc"), st.integers(1, 4)),
        st.builds(
            FlowRule,
            st.sampled_from("abc"),
            st.integers(1, 4),
            limit_app=st.sampled_from(["default", "app", "other"]),
            strategy=st.just("relate"),
            ref_resource=st.sampled_from("abcd"),
        ),
        st.builds(
            FlowRule,
            st.sampled_from("abc"),
            st.integers(1, 4),
            strategy=st.just("chain"),
            ref_resource=st.sampled_from(["web", "job"]),
        ),
    ).filter(lambda rule: rule.ref_resource != rule.resource),
    max_size=6,
    unique_by=lambda rule: (rule.resource, rule.limit_app, rule.strategy, rule.ref_resource),
)
CALLS = st.lists(
    st.tuples(
        st.integers(0, 2),
        st.sampled_from("abcd"),
        st.sampled_from(["web", "job", ""]),
        st.sampled_from(["", "app", "app-2"]),
    ),
    max_size=60,
)


@given(RULES, CALLS)
def test_it_decides_as_sentinels_chain(
    rules: list[FlowRule], calls: list[tuple[int, str, str, str]]
) -> None:
    world = World(Guard, rules, installed_slots=False)
    chain = SlotChain(rules)
    world.clock.advance((-world.clock.now_ms() % 1000) / 1000)
    assert world.clock.now_ms() % 1000 == 0
    for halves, resource, context, origin in calls:
        world.clock.advance(halves / 2)
        now = world.clock.now_ms()
        expected = chain.enter(now, resource, context=context or "none", origin=origin)
        if expected.state == "passed":
            expected.exit(now)
        try:
            with world.guard.entry(resource, origin or None, context=context):
                pass
            refused_by = None
        except RateLimitExceeded as exc:
            refused_by = exc.rule
        assert refused_by == expected.blocked_by


# -- relate ---------------------------------------------------------------------------------------


@IN_BOTH_WORLDS
async def test_a_related_resource_without_a_rule_is_counted_for_the_rule(kind: Any) -> None:
    world = World(kind, [READ])
    for _ in range(3):
        assert await world.outcome("read") == "passed"
        assert await world.outcome("write") == "passed"
    assert await world.outcome("read") == "RateLimitExceeded", "write has passed 3 times"
    assert await world.outcome("write") == "passed", "it has no rule of its own"
    world.clock.advance(1.0)
    assert await world.outcome("read") == "passed"
    assert world.stats("read").passed == 0, "its calls count nothing"


@IN_BOTH_WORLDS
async def test_a_related_resource_with_a_rule_is_counted_once(kind: Any) -> None:
    world = World(kind, [READ, FlowRule("write", 5)])
    for _ in range(2):
        await world.call("write")
    assert world.stats("write").passed == 2
    assert await world.outcome("read") == "passed"
    assert await world.outcome("read", cost=2) == "RateLimitExceeded", "2 + 2 are above 3"


@IN_BOTH_WORLDS
async def test_the_refusal_names_the_rule_and_the_related_resource(kind: Any) -> None:
    world = World(kind, [READ])
    await world.call("write", cost=3)
    with pytest.raises(RateLimitExceeded, match=r"exceeded for 'write'.*ref_resource") as refused:
        await world.call("read")
    assert refused.value.rule is READ
    assert 0 < refused.value.retry_after <= 1


@IN_BOTH_WORLDS
async def test_a_cost_that_never_fits_is_an_error(kind: Any) -> None:
    world = World(kind, [READ])
    with pytest.raises(ValueError, match="cost"):
        await world.call("read", cost=4)


def test_a_rule_of_another_interval_does_not_count_for_it() -> None:
    """Half a call a second has a window of two seconds."""
    world = World(Guard, [FlowRule("read", 0.5, strategy="relate", ref_resource="write"),
                          FlowRule("write", 5)])  # fmt: skip
    with world.guard.entry("write"):
        pass
    world.clock.advance(1.5)
    with pytest.raises(RateLimitExceeded):
        world.guard.entry("read").__enter__()
    assert Limiter(world.store, "5/second", time=world.clock).stats("write").passed == 0
    world.clock.advance(0.6)
    with world.guard.entry("read"):
        pass


def test_what_a_refused_call_had_taken_of_the_related_window_is_given_back() -> None:
    world = World(Guard, [READ, FlowRule("write", 1, grade="thread")])
    with world.guard.entry("write"):
        with pytest.raises(ConcurrencyExceeded):
            world.guard.entry("write").__enter__()
    assert world.stats("write").passed == 1


# -- chain ----------------------------------------------------------------------------------------


@IN_BOTH_WORLDS
async def test_calls_of_a_context_are_counted_alone(kind: Any) -> None:
    world = World(kind, [WEB])
    for _ in range(3):
        assert await world.outcome("read") == "passed", "without a context"
        assert await world.outcome("read", context="job") == "passed"
    outcomes = [await world.outcome("read", context="web") for _ in range(3)]
    assert outcomes == ["passed", "passed", "RateLimitExceeded"]
    assert world.stats("read@context:web").passed == 2
    assert world.stats("read").passed == 0


@IN_BOTH_WORLDS
async def test_running_calls_of_a_context(kind: Any) -> None:
    rule = FlowRule("read", 1, grade="thread", strategy="chain", ref_resource="web")
    world = World(kind, [rule])
    async with entered(world.guard.entry("read", context="web")):
        assert await world.outcome("read", context="web") == "ConcurrencyExceeded"
        assert await world.outcome("read", context="job") == "passed"


def test_no_origin_has_the_key_of_a_context() -> None:
    rules = [WEB, FlowRule("read", 1, limit_app="other")]
    world = World(Guard, rules)
    with world.guard.entry("read", "context:web"):
        pass
    assert world.stats("read@context:web").passed == 0


@IN_BOTH_WORLDS
async def test_the_context_of_the_caller_and_its_origin_are_those_of_entries_in_it(
    kind: Any,
) -> None:
    world = World(kind, [WEB, FlowRule("read", 1, limit_app="app")])
    with call_context("web", origin="app"):
        assert await world.outcome("read") == "passed"
        assert await world.outcome("read") == "RateLimitExceeded", "that of the origin"
        assert await world.outcome("read", origin="app-2") == "passed", "said otherwise"
        assert await world.outcome("read", origin="app-2") == "RateLimitExceeded", "the context's"
        assert await world.outcome("read", origin="app-2", context="job") == "passed"
    assert await world.outcome("read") == "passed"
    assert (world.stats("read@context:web").passed, world.stats("read@app").passed) == (2, 1)


def test_the_outermost_context_holds_as_in_sentinel() -> None:
    world = World(Guard, [WEB])
    with call_context("web"), call_context("job"):
        for _ in range(2):
            with world.guard.entry("read"):
                pass
        with pytest.raises(RateLimitExceeded):
            world.guard.entry("read").__enter__()


def test_the_decorator_counts_in_the_context_of_its_caller() -> None:
    world = World(Guard, [WEB])

    @guarded(world.guard, "read", on_block=lambda: "refused")
    def read() -> str:
        return "read"

    with call_context("web"):
        assert [read() for _ in range(3)] == ["read", "read", "refused"]
    assert read() == "read"


async def test_each_task_and_each_thread_has_a_context_of_its_own() -> None:
    world = World(AsyncGuard, [WEB])

    async def calls(context: str) -> list[str]:
        with call_context(context):
            await asyncio.sleep(0)
            return [await world.outcome("read") for _ in range(3)]

    web, job = await asyncio.gather(calls("web"), calls("job"))
    assert (web[-1], job[-1]) == ("RateLimitExceeded", "passed")
    seen: list[str] = []
    guard = Guard(world.store, [WEB], time=world.clock)
    with call_context("web"):
        thread = threading.Thread(target=lambda: seen.append(guard.entry("r")._call.context))
        thread.start()
        thread.join()
    assert seen == [""], "a thread begins without a context"


# -- bad input ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"strategy": "relate", "ref_resource": "r"}, "'relate' is about another resource"),
        (
            {"strategy": "relate", "ref_resource": "s", "grade": "thread"},
            "works with grade 'qps' and control_behavior 'default'",
        ),
        (
            {"strategy": "relate", "ref_resource": "s", "control_behavior": "rate_limiter"},
            "FlowRule of 'r': strategy 'relate' works with grade 'qps'",
        ),
        (
            {"strategy": "chain", "ref_resource": "web", "limit_app": "app"},
            "FlowRule of 'r': strategy 'chain' works with limit_app 'default'",
        ),
    ],
)
def test_what_no_fleet_can_decide_is_an_error(fields: Any, message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        Guard("memory://", [FlowRule("r", 10, **fields)])


def test_two_rules_that_relate_to_one_resource_are_an_error() -> None:
    with pytest.raises(ConfigurationError, match="in the same place"):
        Guard("memory://", [READ, FlowRule("read", 5, strategy="relate", ref_resource="write")])
    other = FlowRule("read", 5, strategy="relate", ref_resource="delete")
    Guard("memory://", [READ, other, WEB, FlowRule("read", 5)]).close()


@pytest.mark.parametrize(
    ("arguments", "error"),
    [((1,), TypeError), (("web", 1), TypeError), (("web", ""), ValueError), (("",), ValueError)],
)
def test_what_is_no_context(arguments: Any, error: type[Exception]) -> None:
    with pytest.raises(error):
        call_context(*arguments).__enter__()
    with Guard("memory://") as guard, pytest.raises(TypeError, match="context=1 is not a str"):
        guard.entry("r", context=1)  # type: ignore[arg-type]
