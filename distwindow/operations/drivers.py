"""The two drivers of dialogues: the only code that knows both worlds, blocking and awaiting."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

from ..core.interrupts import is_interruption
from .steps import Operation, Sleep, WaitFor

T = TypeVar("T")


def run_blocking(
    operation: Operation[T],
    execute: Callable[[Any], Any],
    sleep: Callable[[float], object],
) -> T:
    """Drive `dialogue` to its end, blocking. `execute` takes commands: plain ones, `Fetch`, and
    `Together`.

    However it ends, the dialogue is closed before this raises: somebody may keep the exception, and
    with it the dialogue and whatever that still had to settle.
    """
    answer: Any = None
    failure: Exception | None = None
    try:
        while True:
            try:
                step = operation.send(answer) if failure is None else operation.throw(failure)
            except StopIteration as end:
                if is_interruption(end):
                    raise
                value: T = end.value
                return value
            answer = failure = None
            try:
                if isinstance(step, WaitFor):
                    step.completion.wait(step.seconds)
                elif isinstance(step, Sleep):
                    sleep(step.seconds)
                else:
                    answer = execute(step)
            except Exception as exc:
                failure = exc
    except BaseException:
        operation.close()
        raise


async def run_async(
    operation: Operation[T],
    execute: Callable[[Any], Awaitable[Any]],
    sleep: Callable[[float], Awaitable[object]],
) -> T:
    """Drive `dialogue` to its end, awaiting; else as `run`."""
    answer: Any = None
    failure: Exception | None = None
    try:
        while True:
            try:
                step = operation.send(answer) if failure is None else operation.throw(failure)
            except StopIteration as end:
                if is_interruption(end):
                    raise
                value: T = end.value
                return value
            answer = failure = None
            try:
                if isinstance(step, WaitFor):
                    await step.completion.wait_async(step.seconds)
                elif isinstance(step, Sleep):
                    await sleep(step.seconds)
                else:
                    answer = await execute(step)
            except Exception as exc:
                failure = exc
    except BaseException:
        operation.close()
        raise
