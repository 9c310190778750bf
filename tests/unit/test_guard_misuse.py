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
    GuardCall,
)
from distwindow.sentinel import Rule

from .guard_worlds import WORLDS, World

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
        ([AuthorityRule("r", "a"), AuthorityRule("r", "b")], "in the same place"),
        ([FlowRule("r", 1, control_behavior="warm_up")], "FlowRule of 'r': .*cold_factor"),
        ([DegradeRule("r", 1, time_window_s=700_000)], "DegradeRule of 'r': open_for="),
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
        (("r", "a", "white"), "strategy must be one of 'allow', 'deny', not 'white'"),
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
        ({"resource": "r", "origin": None}, TypeError),
        ({"resource": "r", "cost": 0}, ValueError),
        ({"resource": "r", "cost": True}, ValueError),
    ],
)
def test_bad_arguments_of_an_entry(kind: Any, arguments: Any, error: Any) -> None:
    with pytest.raises(error):
        World(kind, [FlowRule("r", 10)]).guard.entry(**arguments)


def test_an_entry_is_entered_once_and_left_once() -> None:
    world = World(Guard, [THREAD, FlowRule("r", 10)])
    entry = world.guard.entry("r")
    with pytest.raises(RuntimeError, match="has not been entered"):
        entry.__exit__(None, None, None)
    with entry:
        with pytest.raises(RuntimeError, match="was entered before"):
            entry.__enter__()
        assert (world.stats().passed, world.held()) == (1, 1)
    with pytest.raises(RuntimeError, match="was left before"):
        entry.__exit__(None, None, None)
    assert (world.stats().passed, world.stats().success, world.held()) == (1, 1, 0)


async def test_an_entry_of_a_task_is_entered_once_and_left_once() -> None:
    world = World(AsyncGuard, [THREAD, FlowRule("r", 10)])
    entry = world.guard.entry("r")
    with pytest.raises(RuntimeError, match="has not been entered"):
        await entry.__aexit__(None, None, None)
    async with entry:
        with pytest.raises(RuntimeError, match="was entered before"):
            await entry.__aenter__()
    with pytest.raises(RuntimeError, match="was left before"):
        await entry.__aexit__(None, None, None)
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


def test_a_coroutine_slot_in_a_guard_of_threads_gives_back_what_was_taken() -> None:
    class ForTasks(ChainSlot):
        async def enter(self, call: GuardCall) -> None: ...

    world = World(Guard, [THREAD, FlowRule("r", 10)], slots=[ForTasks()])
    with pytest.raises(ConfigurationError, match="only AsyncGuard awaits"):
        world.guard.entry("r").__enter__()
    assert (world.stats().passed, world.held()) == (0, 0)


async def test_a_closed_guard_says_so() -> None:
    guard = Guard("memory://", [FlowRule("r", 1)])
    guard.close()
    guard.close()
    with pytest.raises(ConfigurationError, match="closed"):
        guard.entry("r")
    async_guard = AsyncGuard("memory://", [FlowRule("r", 1)])
    await async_guard.aclose()
    with pytest.raises(ConfigurationError, match="closed"):
        async_guard.entry("r")


@pytest.mark.parametrize("kind", WORLDS)
def test_a_guard_is_neither_pickled_nor_copied(kind: Any) -> None:
    guard = World(kind, []).guard
    for attempt in (pickle.dumps, copy.copy):
        with pytest.raises(TypeError, match="make one in each process"):
            attempt(guard)
