"""The two drivers of operations: one for threads, one for tasks."""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

from ..errors import ConfigurationError
from .steps import Operation, Sleep, StoreStep, WaitFor

T = TypeVar("T")


def run_blocking(
    operation: Operation[T],
    execute: Callable[[StoreStep], Any],
    sleep: Callable[[float], object],
) -> T:
    """Run `operation` and return its result. `execute` returns the reply to a step that goes to the
    store; what it raises is raised in the operation.

    However this ends, the operation is closed before an exception leaves it. Whoever keeps the
    exception also keeps the frames in its traceback, and an open operation in them would run its
    `finally` blocks at some later time.
    """
    reply: Any = None
    failure: Exception | None = None
    try:
        while True:
            try:
                step = operation.send(reply) if failure is None else operation.throw(failure)
            except StopIteration as end:
                value: T = end.value
                return value
            reply = failure = None
            try:
                if isinstance(step, WaitFor):
                    step.completion.wait(step.seconds)
                elif isinstance(step, Sleep):
                    _check_slept(sleep(step.seconds))
                else:
                    reply = execute(step)
            except Exception as exc:
                failure = exc
    except BaseException:  # the operation is closed however this ends, see above
        operation.close()
        failure = None  # it refers to this frame: in a cycle, the caller's objects would live on
        raise


def _check_slept(returned: object) -> None:
    """Raise `ConfigurationError` if `sleep` has returned a coroutine, and so has not slept: a
    waiting caller would otherwise send its call again without a pause.
    """
    if inspect.iscoroutine(returned):
        returned.close()
        raise ConfigurationError(
            "the `sleep` of the clock given as `time` returns a coroutine, which nothing awaits; "
            "write it as a plain function"
        )


async def run_async(
    operation: Operation[T],
    execute: Callable[[StoreStep], Awaitable[Any]],
    sleep: Callable[[float], Awaitable[object]],
) -> T:
    """Do as `run_blocking`, for tasks."""
    reply: Any = None
    failure: Exception | None = None
    try:
        while True:
            try:
                step = operation.send(reply) if failure is None else operation.throw(failure)
            except StopIteration as end:
                value: T = end.value
                return value
            reply = failure = None
            try:
                if isinstance(step, WaitFor):
                    await step.completion.wait_async(step.seconds)
                elif isinstance(step, Sleep):
                    await sleep(step.seconds)
                else:
                    reply = await execute(step)
            except Exception as exc:
                failure = exc
    except BaseException:  # as in `run_blocking`
        operation.close()
        failure = None
        raise
