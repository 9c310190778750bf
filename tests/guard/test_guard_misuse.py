"""What cannot be right is an error that says why, and the counts stay right."""

from __future__ import annotations

import asyncio
import copy
import pickle
from typing import Any

import pytest

from distwindow import (
    AsyncGuard,
    AuthorityRule,
    ChainSlot,
    ConfigurationError,
    DegradeRule,
    FlowRule,
    Guard,
    Limiter,
    SystemRule,
    call_context,
)
from distwindow.sentinel import Rule
from tests.guard.guard_worlds import WORLDS, World, entered

THREAD = FlowRule("r", 1, grade="thread")


@pytest.mark.parametrize(
    ("rules", "message"),
    [
        (["r"], "'r' is no rule of a guard"),
        (FlowRule("r", 1), "is not a list of rules"),
        ("rules.toml", "for a file, use from_file"),
        ([Rule()], "is no rule of a guard"),
        ([FlowRule("r", 0)], r"FlowRule of 'r': count=0 would refuse every call"),
        ([FlowRule("r", 1.23456789)], "is no whole number of calls in any interval"),
        ([FlowRule("r", 1.5, grade="thread")], "not a whole number of running calls"),
        ([FlowRule("r", 1), FlowRule("r", 2)], "count the same calls in the same place"),
        ([AuthorityRule("r", "a"), AuthorityRule("r", "b")], "'r': there are two; list all its"),
        ([SystemRule(qps=1), SystemRule(qps=2)], "SystemRule: there are two; give all thresholds"),
        ([FlowRule("r", 1)] * 2, "FlowRule of 'r': one with count=1 and one with count=1"),
        (
            [DegradeRule("r", 1, grade="error_count", time_window_s=1)] * 2,
            "DegradeRule of 'r': there are two with the same terms",
        ),
        ([FlowRule("r", 1, limit_app="a,b")], "about one origin; write a rule for each"),
        ([FlowRule("r", 1, ref_resource="s")], "ref_resource='s' has no effect with strategy"),
        ([FlowRule("r ", 1)], "resource='r ' has spaces around it"),
        ([FlowRule("r", 1, limit_app=" a")], "limit_app=' a' has spaces around it"),
        ([DegradeRule("r\t", 1, time_window_s=1)], "has spaces around it"),
        ([AuthorityRule(" r", "a")], "AuthorityRule of ' r': resource=' r' has spaces"),
        ([FlowRule("\ud800", 1)], "cannot be encoded as UTF-8"),
        ([FlowRule("r", 1, control_behavior="warm_up")], "FlowRule of 'r': .*cold_factor"),
        (
            [DegradeRule("r", 1, time_window_s=700_000)],
            "DegradeRule of 'r': time_window_s=700000 is above",
        ),
    ],
)
def test_rules_that_cannot_work_are_errors_that_name_them(rules: Any, message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        Guard("memory://", rules)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (("", "a"), "AuthorityRule: resource must be a name"),
        (("r", ""), "AuthorityRule of 'r': limit_app must be origins separated by commas"),
        (("r", "a,,b"), "separated by commas"),
        (("r", "a", "white"), "one of 'allow', 'deny', not 'white'"),
        (("r", "a", None), "strategy must be one of 'allow', 'deny', not None"),
    ],
)
def test_bad_fields_of_an_authority_rule(fields: Any, message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        AuthorityRule(*fields)


@pytest.mark.parametrize("kind", WORLDS)
@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        ({"resource": ""}, ValueError),
        ({"resource": 7}, TypeError),
        ({"resource": "r", "origin": 7}, TypeError),
        ({"resource": "r", "origin": ""}, ValueError),
        ({"resource": "r", "origin": 129 * "a"}, ValueError),
        ({"resource": "r", "origin": "\ud800"}, ValueError),
        ({"resource": "r", "origin": "(other)"}, ValueError),
        ({"resource": "r", "cost": 0}, ValueError),
        ({"resource": "r", "cost": True}, ValueError),
    ],
)
def test_bad_arguments_of_an_entry(kind: Any, arguments: Any, error: Any) -> None:
    with pytest.raises(error):
        World(kind, [FlowRule("r", 10)]).guard.entry(**arguments)


@pytest.mark.parametrize("kind", WORLDS)
def test_an_origin_means_the_same_wherever_it_is_given(kind: Any) -> None:
    """None, and no origin, are a call without one; what else is none, is an error everywhere."""
    guard = World(kind, [FlowRule("r", 10)]).guard
    limiter = Limiter("memory://", "10/second")

    def of_context(origin: Any) -> None:
        with call_context("c", origin):
            pass

    places: list[Any] = [
        lambda origin: guard.entry("r", origin=origin),
        lambda origin: guard.entry("r", origin),
        lambda origin: limiter.entry("r", origin=origin),
        of_context,
    ]
    for place in places:
        place(None)
        place("é" * 128)
        for origin, error in [
            ("", ValueError), ("a" * 129, ValueError), ("\udcff", ValueError),
            ("(other)", ValueError), (7, TypeError), (b"a", TypeError),
        ]:  # fmt: skip
            with pytest.raises(error, match="origin="):
                place(origin)
    assert guard.entry("r", origin=None).origin == guard.entry("r").origin == ""


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"consistency": "eventual", "share": 0}, "share=0 is not a part"),
        ({"share": 0.5}, 'share=0.5 means nothing with consistency="direct"'),
        ({"consistency": "eventual", "sync_interval": 0}, "sync_interval=0 is not a number"),
        ({"consistency": "strong"}, "consistency='strong' is none of direct, leased, eventual"),
        ({"consistency": "leased", "clock": "client"}, 'consistency="leased" needs clock="server"'),
    ],
)
@pytest.mark.parametrize("kind", WORLDS)
def test_options_are_checked_whatever_the_rules(kind: Any, options: Any, message: str) -> None:
    for rules in ([], [FlowRule("r", 1)], [AuthorityRule("r", "a")]):
        with pytest.raises(ConfigurationError, match=message):
            kind("redis://localhost:1", rules, **options)


@pytest.mark.parametrize("kind", WORLDS)
async def test_an_entry_is_entered_once_and_left_once(kind: Any) -> None:
    world = World(kind, [THREAD, FlowRule("r", 10)])
    entry = world.guard.entry("r")
    with pytest.raises(RuntimeError, match="has not been entered"):
        await _leave_here(entry)
    async with entered(entry):
        with pytest.raises(RuntimeError, match="was entered before"):
            await _enter(entry)
        assert (world.stats().passed, world.held()) == (1, 1)
    with pytest.raises(RuntimeError, match="was left before"):
        await _leave_here(entry)
    assert (world.stats().passed, world.stats().success, world.held()) == (1, 1, 0)


@pytest.mark.parametrize("kind", [Guard, AsyncGuard])
async def test_leaving_an_entry_in_another_thread_is_an_error_and_frees_nothing(kind: Any) -> None:
    world = World(kind, [THREAD, FlowRule("r", 10)])
    entry = world.guard.entry("r")
    await _enter(entry)
    with pytest.raises(RuntimeError, match=r"'r' is left in another thread .* any_thread=True"):
        await asyncio.to_thread(_leave, entry)
    assert (world.stats().passed, world.stats().success, world.held()) == (1, 0, 1)
    await _leave_here(entry)
    assert (world.stats().passed, world.stats().success, world.held()) == (1, 1, 0)


@pytest.mark.parametrize("kind", [Guard, AsyncGuard])
async def test_with_any_thread_an_entry_is_left_anywhere_and_counted_once(kind: Any) -> None:
    world = World(kind, [THREAD, FlowRule("r", 10)])
    entry = world.guard.entry("r", any_thread=True)
    await _enter(entry)
    await asyncio.to_thread(_leave, entry)
    with pytest.raises(RuntimeError, match="was left before"):
        await asyncio.to_thread(_leave, entry)
    assert (world.stats().passed, world.stats().success, world.held()) == (1, 1, 0)


async def _enter(entry: Any) -> None:
    if hasattr(entry, "__aenter__"):
        await entry.__aenter__()
    else:
        entry.__enter__()


async def _leave_here(entry: Any) -> None:
    if hasattr(entry, "__aexit__"):
        await entry.__aexit__(None, None, None)
    else:
        entry.__exit__(None, None, None)


def _leave(entry: Any) -> None:
    """Leave in this thread; an asyncio entry in a loop of its own."""
    if hasattr(entry, "__aexit__"):
        asyncio.run(entry.__aexit__(None, None, None))
    else:
        entry.__exit__(None, None, None)


def test_a_slot_that_is_no_slot() -> None:
    with pytest.raises(ConfigurationError, match="is no slot"):
        Guard("memory://", slots=[object()])
    with pytest.raises(ConfigurationError, match="is no slot"):
        Guard("memory://", slots=[ChainSlot])


@pytest.mark.parametrize("kind", WORLDS)
async def test_a_closed_guard_says_so(kind: Any) -> None:
    guard = kind("memory://", [FlowRule("r", 1)])
    made_before = [guard.entry(resource) for resource in ("r", "without rules")]
    for _ in range(2):
        await guard.aclose() if kind is AsyncGuard else guard.close()
    with pytest.raises(ConfigurationError, match="this guard is closed"):
        guard.entry("r")
    for entry in made_before:
        with pytest.raises(ConfigurationError, match="this guard is closed"):
            await _enter(entry)


@pytest.mark.parametrize("kind", WORLDS)
async def test_fail_is_for_the_block(kind: Any) -> None:
    world = World(kind, [FlowRule("r", 10)])
    entry = world.guard.entry("r")
    with pytest.raises(RuntimeError, match="'r' is marked as failed, but has not been entered"):
        entry.fail()
    await _enter(entry)
    await _leave_here(entry)
    with pytest.raises(RuntimeError, match="'r' is marked as failed, but was left before"):
        entry.fail()
    assert (world.stats().success, world.stats().error) == (1, 0)


@pytest.mark.parametrize("kind", WORLDS)
def test_a_guard_is_neither_pickled_nor_copied(kind: Any) -> None:
    guard = World(kind, []).guard
    for attempt in (pickle.dumps, copy.copy):
        with pytest.raises(TypeError, match="make one in each process"):
            attempt(guard)
