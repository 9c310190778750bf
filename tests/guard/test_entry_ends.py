"""Entries that end in an unusual place: in a forked process, in a coroutine that is closed, in
another context.
"""

from __future__ import annotations

import asyncio
import contextvars
import os
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest

from distwindow import (
    AsyncGuard,
    AsyncLimiter,
    ChainSlot,
    CircuitBreaker,
    DegradeRule,
    ErrorRatio,
    FlowRule,
    Guard,
    GuardCall,
    Limiter,
    Outcome,
    SystemRule,
    call_context,
)
from distwindow.guard.chain import current_context
from tests.guard.guard_worlds import Recorder, World

THREAD = FlowRule("r", 1, grade="thread")


def in_child(work: Any) -> str:
    """Fork, call `work` in the child, and return what it returned as text, or its exception."""
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            answer = str(work())
        except BaseException as exc:
            answer = repr(exc)
        os.write(write, answer.encode())
        os._exit(0)
    os.close(write)
    os.waitpid(child, 0)
    with os.fdopen(read) as pipe:
        return pipe.read()


def ends(limiter: Limiter) -> tuple[int, int]:
    return limiter.stats("k").success, limiter.minute("k").success


@pytest.mark.parametrize("with_breaker", [False, True])
def test_the_end_of_an_entry_is_counted_by_the_process_that_has_entered_it(
    with_breaker: bool,
) -> None:
    breaker = CircuitBreaker("memory://", ErrorRatio(0.5)) if with_breaker else None
    with Limiter("memory://", "5/minute") as limiter:
        entry = limiter.entry("k", breaker=breaker)
        entry.__enter__()

        def leave() -> Any:
            entry.__exit__(None, None, None)
            return ends(limiter), breaker is None or entry._call.is_under_way  # type: ignore[attr-defined]

        assert in_child(leave) == str(((0, 0), True))
        assert ends(limiter) == (0, 0)
        entry.__exit__(None, None, None)
        assert ends(limiter) == (1, 1)

        def own() -> Any:
            with limiter.entry("k"):
                pass
            return ends(limiter)

        assert in_child(own) == "(2, 2)"


def test_a_forked_child_leaves_no_slot_of_its_parent() -> None:
    recorder = Recorder()
    rules = [SystemRule(max_thread=1), THREAD, FlowRule("r", 10)]
    world = World(Guard, rules, slots=[recorder])
    entry = world.guard.entry("r")
    entry.__enter__()

    def leave() -> Any:
        entry.__exit__(None, None, None)
        with World(Guard, rules).guard.entry("r"):
            return world.stats().success, len(recorder.told)

    assert in_child(leave) == "(0, 0)"
    entry.__exit__(None, None, None)
    assert (world.stats().success, world.held(), len(recorder.told)) == (1, 0, 1)


# -- coroutines that are closed -------------------------------------------------------------------


class Waiting(ChainSlot):
    """A slot whose `exit` waits."""

    order = 350

    def __init__(self) -> None:
        self.log: list[str] = []

    async def exit(self, call: GuardCall, token: Any, outcome: Outcome) -> None:
        self.log.append(type(outcome.error).__name__)
        await asyncio.sleep(0)
        self.log.append("waited")


RULES = [
    SystemRule(max_thread=1),
    FlowRule("r", 10),
    THREAD,
    DegradeRule("r", 0.5, grade="error_ratio", time_window_s=1),
]


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("in_generator", [False, True])
async def test_a_coroutine_that_is_closed_leaves_all_slots(in_generator: bool) -> None:
    first, waiting = Recorder(50), Waiting()
    world = World(AsyncGuard, RULES, slots=[first, waiting])

    async def work() -> None:
        async with world.guard.entry("r"):
            await asyncio.Event().wait()

    async def generate() -> AsyncIterator[int]:
        async with world.guard.entry("r"):
            yield 1

    if in_generator:
        generator: Any = generate()
        assert await generator.__anext__() == 1
        assert world.held() == 1
        await generator.aclose()
    else:
        coroutine = work()
        while world.held() == 0:
            coroutine.send(None)
        coroutine.close()
    assert waiting.log == ["GeneratorExit"]
    assert [type(one.error) for one in first.told] == [GeneratorExit]
    await world.flush()
    assert world.held() == 0
    await world.call()
    assert waiting.log == ["GeneratorExit", "NoneType", "waited"]


@pytest.mark.filterwarnings("error")
async def test_an_entry_of_a_limiter_in_a_coroutine_that_is_closed_is_an_error() -> None:
    async with AsyncLimiter("memory://", "5/minute") as limiter:

        async def work() -> None:
            async with limiter.entry("k"):
                await asyncio.Event().wait()

        coroutine = work()
        coroutine.send(None)
        coroutine.close()
        assert (await limiter.minute("k")).error == 1


# -- contexts that are left elsewhere -------------------------------------------------------------


def test_a_context_that_is_left_elsewhere_ends_where_it_was_entered() -> None:
    """As FastAPI does with dependencies that are generators and not async."""

    def dependency() -> Iterator[None]:
        with call_context("web", origin="app"):
            yield

    request = dependency()
    entered_in = contextvars.copy_context()
    entered_in.run(next, request)
    assert entered_in.run(lambda: current_context().name) == "web"
    contextvars.copy_context().run(next, request, None)
    assert entered_in.run(lambda: (current_context().name, current_context().origin)) == ("", "")

    def enter_again() -> str:
        with call_context("job"):
            return current_context().name

    assert entered_in.run(enter_again) == "job"
    assert current_context().name == ""


async def test_a_context_of_an_async_generator_that_another_task_closes() -> None:
    async def generate() -> AsyncIterator[None]:
        with call_context("web"):
            yield

    generator: Any = generate()
    await generator.__anext__()
    assert current_context().name == "web"
    await asyncio.create_task(generator.aclose())
    assert current_context().name == ""
