"""What a `Guard` refuses, in which order, and what it gives back."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from distwindow import (
    AsyncGuard,
    AuthorityDenied,
    AuthorityRule,
    Blocked,
    BreakerOpen,
    ChainSlot,
    ConcurrencyExceeded,
    DegradeRule,
    FlowRule,
    Guard,
    GuardCall,
    RateLimitExceeded,
)
from tests.guard.guard_worlds import WORLDS, Recorder, World, entered, fail

EACH_WORLD = pytest.mark.parametrize("kind", WORLDS)
FLOW = FlowRule("r", 10)
THREAD = FlowRule("r", 1, grade="thread")
BREAKER = DegradeRule("r", 0, grade="error_count", time_window_s=2, min_request_amount=1)
AUTHORITY = AuthorityRule("r", "app-a, app-b")


@EACH_WORLD
async def test_each_slot_refuses_with_an_error_of_its_own_that_names_the_rule(kind: Any) -> None:
    nested = Recorder()
    world = World(kind, [FLOW, THREAD, BREAKER, AUTHORITY], slots=[nested])
    with pytest.raises(AuthorityDenied, match=r"'app-c' may not call 'r'.*AuthorityRule") as denied:
        await world.call(origin="app-c")
    assert denied.value.rule is AUTHORITY
    for _ in range(10):
        await world.call(origin="app-a")
    with pytest.raises(RateLimitExceeded, match="refused by FlowRule") as limited:
        await world.call()
    assert limited.value.rule is FLOW
    assert isinstance(limited.value, Blocked)
    world.clock.advance(1.0)
    held = Guard(world.store, [THREAD], time=world.clock)
    with held.entry("r"), pytest.raises(ConcurrencyExceeded) as full:
        await world.call()
    assert full.value.rule is THREAD
    with pytest.raises(OSError, match="broken"):
        await world.call(body=fail(OSError("broken")))
    with pytest.raises(BreakerOpen) as opened:
        await world.call()
    assert opened.value.rule is BREAKER


@EACH_WORLD
@pytest.mark.parametrize("refusal", [BreakerOpen("x", "open", 1.0), OSError("a bug of a slot")])
async def test_what_earlier_slots_took_is_given_back(kind: Any, refusal: Exception) -> None:
    later = Recorder()
    later.refusal = refusal
    world = World(kind, [FLOW, THREAD, BREAKER], slots=[later])
    with pytest.raises(type(refusal)):
        await world.call(cost=3)
    assert (world.stats().passed, world.stats().success, world.stats().error) == (0, 0, 0)
    assert world.held() == 0
    later.refusal = None
    assert await world.outcome() == "passed"


@EACH_WORLD
async def test_a_probe_that_a_later_slot_refuses_goes_to_another_call(kind: Any) -> None:
    later = Recorder()
    world = World(kind, [BREAKER], slots=[later])
    assert await world.outcome(body=fail(OSError())) == "OSError"
    assert await world.outcome() == "BreakerOpen"
    world.clock.advance(2.0)
    later.refusal = OSError("refused after the breaker")
    assert await world.outcome() == "OSError"
    later.refusal = None
    assert await world.outcome() == "passed"
    assert await world.outcome() == "passed"


async def test_a_call_that_is_cancelled_on_its_way_gives_back_what_it_took() -> None:
    class Waiting(ChainSlot):
        async def enter(self, call: GuardCall) -> None:
            await asyncio.Event().wait()

    world = World(AsyncGuard, [FLOW, THREAD], slots=[Waiting()])
    task = asyncio.ensure_future(world.call(cost=4))
    for _ in range(5):
        await asyncio.sleep(0)
    assert (world.stats().passed, world.held()) == (4, 1)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert (world.stats().passed, world.held()) == (0, 0)


async def test_a_paced_call_that_is_cancelled_while_it_waits_gives_its_permit_back() -> None:
    rule = FlowRule("r", 10, control_behavior="rate_limiter")
    world = World(AsyncGuard, [rule])
    world.clock.auto_advance = False
    await world.call()
    task = asyncio.ensure_future(world.call())
    for _ in range(5):
        await asyncio.sleep(0)
    assert world.clock.slept == [0.1]
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert world.stats(limit="10/second paced 500ms").passed == 1


async def test_an_entry_that_is_cancelled_while_it_is_left_is_left_to_the_end() -> None:
    let_go = asyncio.Event()
    ended = []

    class Slow(ChainSlot):
        async def exit(self, call: GuardCall, token: Any, outcome: Any) -> None:
            await let_go.wait()
            ended.append(outcome.admitted)

    world = World(AsyncGuard, [THREAD], slots=[Slow()])
    task = asyncio.ensure_future(world.call())
    for _ in range(5):
        await asyncio.sleep(0)
    task.cancel()
    await asyncio.sleep(0)
    task.cancel()
    let_go.set()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert (ended, world.held()) == ([True], 0)


@EACH_WORLD
async def test_a_paced_call_waits_before_its_block_and_the_breaker_is_asked_after_it(
    kind: Any,
) -> None:
    after = Recorder(order=399)
    world = World(kind, [FlowRule("r", 10, control_behavior="rate_limiter")], slots=[after])
    start = world.clock.monotonic()
    for _ in range(3):
        await world.call()
    assert world.clock.monotonic() - start == pytest.approx(0.2)
    assert [round(told.rt, 3) for told in after.told] == [0.0, 0.1, 0.1]


@EACH_WORLD
async def test_rules_for_origins_count_each_origin_alone(kind: Any) -> None:
    named = FlowRule("r", 2, limit_app="app-a")
    other = FlowRule("r", 1, limit_app="other")
    default = FlowRule("r", 7)
    world = World(kind, [default, named, other])
    origins = ["app-a"] * 3 + ["app-b"] * 2 + ["app-c"] * 2 + [None] * 4
    outcomes = [await world.outcome(origin=origin) for origin in origins]
    passed, refused = "passed", "RateLimitExceeded"
    assert outcomes == [
        *(passed, passed, refused), *(passed, refused), *(passed, refused),
        *(passed, passed, passed, refused),
    ]  # fmt: skip


@EACH_WORLD
async def test_names_of_resources_and_origins_never_share_a_count(kind: Any) -> None:
    rules = [FlowRule("a@b", 1), FlowRule("a", 1, limit_app="b"), FlowRule("a%40b", 1)]
    world = World(kind, rules)
    assert await world.outcome("a@b") == "passed"
    assert await world.outcome("a", origin="b") == "passed"
    assert await world.outcome("a%40b") == "passed"


@EACH_WORLD
async def test_the_end_of_a_block_is_recorded(kind: Any) -> None:
    world = World(kind, [FLOW], ignore=(KeyError, Blocked))
    await world.call(body=lambda: world.clock.advance(0.25))
    await world.outcome(body=fail(OSError()))
    await world.outcome(body=fail(KeyError()))
    await world.outcome(body=fail(BreakerOpen("of another guard", "open", 1.0)))
    async with entered(world.guard.entry("r")) as entry:
        entry.fail()
    with suppress(KeyError):
        async with entered(world.guard.entry("r")) as entry:
            entry.fail()
            raise KeyError
    stats = world.stats()
    assert (stats.passed, stats.success, stats.error, stats.rt_min_ms) == (6, 1, 3, 0)
    assert stats.rt_sum_ms == 250


@EACH_WORLD
async def test_a_resource_without_rules_passes_and_only_common_slots_see_it(kind: Any) -> None:
    common = Recorder()
    world = World(kind, [FLOW], slots=[common])
    assert await world.outcome("another") == "passed"
    assert common.entered == ["another"]


@EACH_WORLD
async def test_slots_are_entered_in_their_order_and_left_in_reverse(kind: Any) -> None:
    seen: list[str] = []

    class Named(ChainSlot):
        def __init__(self, name: str, order: int) -> None:
            self.name, self.order = name, order

        def enter(self, call: GuardCall) -> None:
            seen.append(self.name)

        def exit(self, call: GuardCall, token: Any, outcome: Any) -> None:
            seen.append("-" + self.name)

    last = Named("last", 600)
    world = World(kind, [FLOW], slots=[last, Named("first", 50), Named("second", 50)])
    await world.call()
    assert seen == ["first", "second", "last", "-last", "-second", "-first"]


CALLS = st.lists(
    st.tuples(
        st.sampled_from(["", "app-a", "app-c"]),
        st.integers(1, 3),
        st.sampled_from(["end", "raise", "refuse later", "cancel later"]),
    ),
    max_size=25,
)


@pytest.mark.parametrize("kind", WORLDS)
@settings(max_examples=60, deadline=None)
@given(calls=CALLS)
def test_what_is_counted_is_what_was_admitted(kind: Any, calls: list[Any]) -> None:
    """Whatever refuses or raises, the ring holds the admitted costs, and no slot stays held."""

    async def play() -> None:
        later = Recorder()
        world = World(kind, [FLOW, THREAD, AUTHORITY], slots=[later])
        admitted = ended = failed = 0
        for origin, cost, what in calls:
            later.refusal = {
                "refuse later": OSError("refused"),
                "cancel later": asyncio.CancelledError(),
            }.get(what)
            body = fail(ValueError()) if what == "raise" else lambda: None
            try:
                outcome = await world.outcome(body=body, origin=origin or None, cost=cost)
            except asyncio.CancelledError:
                outcome = "cancelled"
            if origin == "app-c":
                assert outcome == "AuthorityDenied"
            elif admitted + cost > 10:
                assert outcome == "RateLimitExceeded"
            elif what in ("end", "raise"):
                assert outcome == ("passed" if what == "end" else "ValueError")
                admitted += cost
                ended, failed = ended + (what == "end"), failed + (what == "raise")
            else:
                assert outcome in ("OSError", "cancelled")
        stats = world.stats()
        assert stats.passed == admitted
        assert (stats.success > 0, stats.error > 0) == (ended > 0, failed > 0)
        assert world.held() == 0

    asyncio.run(play())
