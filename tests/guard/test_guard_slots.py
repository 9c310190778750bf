"""The contract of slots: what `enter` and `exit` may be and return, and when they are called."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from distwindow import (
    AsyncGuard,
    ChainSlot,
    ConfigurationError,
    FlowRule,
    Guard,
    GuardCall,
    Outcome,
)
from tests.guard.guard_worlds import WORLDS, Recorder, World, fail

THREAD = FlowRule("r", 1, grade="thread")
EACH_WORLD = pytest.mark.parametrize("kind", WORLDS)


class Handing(ChainSlot):
    """Hands out a token, and keeps what it gets back."""

    order = 350

    def __init__(self, token: Any) -> None:
        self.token = token
        self.returned: list[Any] = []

    def enter(self, call: GuardCall) -> Any:
        return self.token

    def exit(self, call: GuardCall, token: Any, outcome: Outcome) -> None:
        self.returned.append(token)


def count(run: list[str]) -> Iterator[int]:
    run.append("the token was run")
    yield 1


@EACH_WORLD
async def test_a_token_of_any_type_comes_back_as_it_is(kind: Any) -> None:
    run: list[str] = []

    async def sleep() -> None:
        run.append("the token was awaited")

    generator = count(run)
    future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    future.set_result(None)
    task = asyncio.create_task(sleep())
    task.cancel()
    tokens: list[Any] = [generator, future, task, [], None, ()]
    for token in tokens:
        slot = Handing(token)
        await World(kind, [], slots=[slot]).call()
        assert [one is token for one in slot.returned] == [True]
    assert run == []


async def test_coroutine_functions_are_awaited() -> None:
    class Plain:
        """No `ChainSlot`, and its `exit` is an object that is called."""

        async def enter(self, call: GuardCall) -> str:
            await asyncio.sleep(0)
            return "token"

        class Exit:
            async def __call__(self, call: GuardCall, token: Any, outcome: Outcome) -> None:
                await asyncio.sleep(0)
                told.append((token, outcome.failed))

        exit = Exit()

    told: list[Any] = []
    await World(AsyncGuard, [], slots=[Plain()]).call()
    assert told == [("token", False)]


class AwaitedEnter(ChainSlot):
    async def enter(self, call: GuardCall) -> None: ...


class AwaitedExit(ChainSlot):
    async def exit(self, call: GuardCall, token: Any, outcome: Outcome) -> None: ...


@pytest.mark.parametrize("slot", [AwaitedEnter(), AwaitedExit()])
async def test_a_guard_of_threads_takes_no_coroutine_functions(slot: ChainSlot) -> None:
    with pytest.raises(ConfigurationError, match=r"is a coroutine function, which only AsyncGuard"):
        Guard("memory://", slots=[slot])
    await AsyncGuard("memory://", slots=[slot]).aclose()


async def _nothing() -> None: ...


def test_a_slot_that_returns_a_coroutine_to_a_guard_of_threads_gives_back_what_was_taken() -> None:
    returns_it = SimpleNamespace(enter=lambda call: _nothing(), exit=lambda *_: None)
    world = World(Guard, [THREAD, FlowRule("r", 10)], slots=[returns_it])
    with pytest.raises(ConfigurationError, match="only AsyncGuard awaits"):
        world.guard.entry("r").__enter__()
    assert (world.stats().passed, world.held()) == (0, 0)


def test_an_exit_that_returns_a_coroutine_is_logged_and_the_result_stays(caplog: Any) -> None:
    returns_it = SimpleNamespace(enter=lambda call: None, exit=lambda *_: _nothing())
    world = World(Guard, [THREAD, FlowRule("r", 10)], slots=[returns_it])
    with world.guard.entry("r"):
        assert world.held() == 1
    assert "only AsyncGuard awaits" in caplog.text
    assert (world.stats().success, world.held()) == (1, 0)


class Raising(ChainSlot):
    order = 350

    def exit(self, call: GuardCall, token: Any, outcome: Outcome) -> None:
        raise ZeroDivisionError("exit")


@EACH_WORLD
async def test_what_an_exit_raises_reaches_the_caller_when_all_others_are_left(kind: Any) -> None:
    """It replaces the block's exception, which is its context."""
    first, last = Recorder(50), Recorder(900)
    world = World(kind, [THREAD, FlowRule("r", 10)], slots=[first, Raising(), last])
    error = OSError("of the block")
    with pytest.raises(ZeroDivisionError) as raised:
        await world.call(body=fail(error))
    assert raised.value.__context__ is error
    with pytest.raises(ZeroDivisionError):
        await world.call()
    assert [len(one.told) for one in (first, last)] == [2, 2]
    assert (world.stats().error, world.stats().success, world.held()) == (1, 1, 0)


PACED = FlowRule("r", 1, control_behavior="rate_limiter", max_queueing_time_ms=2000)


@EACH_WORLD
@pytest.mark.parametrize("rules", [[PACED, THREAD], [THREAD, PACED]])
async def test_a_call_that_is_held_back_holds_no_slot_meanwhile(kind: Any, rules: Any) -> None:
    """In whatever order the rules are given."""
    held: list[int] = []

    class Look(ChainSlot):
        """Stands between the two kinds of flow rules, after the wait."""

        order = 305

        def enter(self, call: GuardCall) -> None:
            held.append(world.held())

    world = World(kind, rules, slots=[Look()])
    started = world.clock.monotonic()
    await world.call()
    await world.call(body=lambda: held.append(world.held()))
    assert world.clock.monotonic() - started == pytest.approx(1.0, abs=0.01)
    assert held == [0, 0, 1]
