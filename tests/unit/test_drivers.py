"""One dialogue, two drivers: they do the same."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from distwindow.operations.drivers import run_async, run_blocking
from distwindow.operations.steps import Operation, Sleep
from distwindow.protocol.commands import Read

COMMAND = Read(())


class World:
    """Answers each effect from a list; an exception in it is raised."""

    def __init__(self, *answers: Any) -> None:
        self.answers = list(answers)
        self.asked: list[Any] = []

    def __call__(self, effect: Any) -> Any:
        self.asked.append(effect)
        answer = self.answers.pop(0)
        if isinstance(answer, BaseException):
            raise answer
        return answer

    async def awaited(self, effect: Any) -> Any:
        await asyncio.sleep(0)
        return self(effect)


@pytest.fixture(params=["run", "arun"])
def drive(request: pytest.FixtureRequest) -> Any:
    def both(dialogue: Operation[Any], world: World) -> Any:
        if request.param == "run":
            return run_blocking(dialogue, world, world)
        return asyncio.run(_finish(dialogue, world))

    async def _finish(dialogue: Operation[Any], world: World) -> Any:
        return await run_async(dialogue, world.awaited, world.awaited)

    return both


def test_answers_come_back_in_order(drive: Any) -> None:
    def dialogue() -> Operation[Any]:
        first = yield COMMAND
        slept = yield Sleep(1.5)
        second = yield COMMAND
        return first, slept, second

    world = World("a", None, "b")
    assert drive(dialogue(), world) == ("a", None, "b")
    assert world.asked == [COMMAND, 1.5, COMMAND]


def test_a_dialogue_may_ask_nothing(drive: Any) -> None:
    def dialogue() -> Operation[int]:
        return 7
        yield

    assert drive(dialogue(), World()) == 7


def test_a_failure_is_told_to_the_dialogue_which_may_go_on(drive: Any) -> None:
    def dialogue() -> Operation[Any]:
        try:
            yield COMMAND
        except OSError as exc:
            said = yield COMMAND
            return str(exc), said

    assert drive(dialogue(), World(OSError("down"), "up")) == ("down", "up")


def test_a_failure_nobody_catches_comes_out(drive: Any) -> None:
    ended = []

    def dialogue() -> Operation[Any]:
        try:
            yield Sleep(1)
        finally:
            ended.append(True)

    with pytest.raises(OSError, match="down"):
        drive(dialogue(), World(OSError("down")))
    assert ended == [True]


def test_an_interrupt_is_no_answer(drive: Any) -> None:
    def dialogue() -> Operation[Any]:
        try:
            yield COMMAND
        except Exception:
            return "swallowed"

    with pytest.raises(KeyboardInterrupt):
        drive(dialogue(), World(KeyboardInterrupt()))


@pytest.mark.parametrize("exception", [KeyboardInterrupt, asyncio.CancelledError])
def test_a_dialogue_has_ended_before_its_exception_arrives(
    drive: Any, exception: type[BaseException]
) -> None:
    """Whoever keeps the exception keeps the frames, and with them a dialogue that is not closed."""
    ended, kept = [], []

    def inner() -> Operation[Any]:
        try:
            yield COMMAND
        finally:
            ended.append(True)

    def dialogue() -> Operation[Any]:
        yield from inner()

    try:
        drive(dialogue(), World(exception()))
    except BaseException as exc:
        kept.append(exc)
        assert ended == [True]
    assert type(kept[0]) is exception
