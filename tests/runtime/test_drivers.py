"""Both drivers run an operation alike."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from distwindow.ring.commands import Read
from distwindow.runtime.steps import Operation, Sleep, run_async, run_blocking

COMMAND = Read(())


class World:
    """Returns the replies of a list, one for each step; an exception in it is raised."""

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
    def both(operation: Operation[Any], world: World) -> Any:
        if request.param == "run":
            return run_blocking(operation, world, world)
        return asyncio.run(run_async(operation, world.awaited, world.awaited))

    return both


def test_replies_are_given_in_order(drive: Any) -> None:
    def operation() -> Operation[Any]:
        first = yield COMMAND
        slept = yield Sleep(1.5)
        second = yield COMMAND
        return first, slept, second

    world = World("a", None, "b")
    assert drive(operation(), world) == ("a", None, "b")
    assert world.asked == [COMMAND, 1.5, COMMAND]


def test_an_operation_may_have_no_steps(drive: Any) -> None:
    def operation() -> Operation[int]:
        return 7
        yield

    assert drive(operation(), World()) == 7


def test_an_error_is_raised_in_the_operation_which_may_go_on(drive: Any) -> None:
    def operation() -> Operation[Any]:
        try:
            yield COMMAND
        except OSError as exc:
            reply = yield COMMAND
            return str(exc), reply

    assert drive(operation(), World(OSError("down"), "up")) == ("down", "up")


def test_an_error_that_the_operation_does_not_catch_is_raised(drive: Any) -> None:
    ended = []

    def operation() -> Operation[Any]:
        try:
            yield Sleep(1)
        finally:
            ended.append(True)

    with pytest.raises(OSError, match="down"):
        drive(operation(), World(OSError("down")))
    assert ended == [True]


def test_an_interruption_is_not_raised_in_the_operation(drive: Any) -> None:
    def operation() -> Operation[Any]:
        try:
            yield COMMAND
        except Exception:
            return "swallowed"

    with pytest.raises(KeyboardInterrupt):
        drive(operation(), World(KeyboardInterrupt()))


@pytest.mark.parametrize("exception", [KeyboardInterrupt, asyncio.CancelledError])
def test_an_operation_is_closed_before_its_exception_arrives(
    drive: Any, exception: type[BaseException]
) -> None:
    """An exception that is kept has references to its frames, which would keep an operation that is
    not closed."""
    ended, kept = [], []

    def inner() -> Operation[Any]:
        try:
            yield COMMAND
        finally:
            ended.append(True)

    def operation() -> Operation[Any]:
        yield from inner()

    try:
        drive(operation(), World(exception()))
    except BaseException as exc:  # KeyboardInterrupt and CancelledError are tested as well
        kept.append(exc)
        assert ended == [True]
    assert type(kept[0]) is exception
