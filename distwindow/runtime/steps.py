"""Operations: generators that yield what has to be done, and their drivers (threads and tasks).

What an operation may yield, and what it is given for each step:

  step       given
  Command    its reply; for an `Acquire` the `Decision`, as stores build that directly
  Pipeline   a list of replies, with an error in place of each reply that did not come
  Fetch      the reply
  Sleep      None, after that time
  WaitFor    None, when the completion is complete or after that time

An operation is a generator that is written once and driven by `run_blocking` or `run_async`. It
reads time only from the clock it was given, holds no lock across a yield, never in `finally`.
"""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable, Generator
from typing import Any, NamedTuple, TypeAlias, TypeVar

from ..errors import ConfigurationError, StoreError
from ..ring.command import Command
from ..ring.replies import LeaseReply
from ..support.async_use import running_loop
from ..support.locks import OneShotEvent

T = TypeVar("T")
Reply = TypeVar("Reply")


class Sleep(NamedTuple):
    """Sleep for `seconds`."""

    seconds: float


class Pipeline(NamedTuple):
    """Send many commands in one exchange."""

    commands: tuple[Command[Any], ...]


class Fetch(NamedTuple):
    """Send a lease, whose permits must not be lost. If the reply comes after the task
    that sent it was cancelled or has given up, `on_late_reply` is called with it. (A thread that
    gives up drops its connection, and the reply with it.)
    """

    command: Command[LeaseReply]
    on_late_reply: Callable[[LeaseReply], object]


class WaitFor(NamedTuple):
    """Wait until `completion` is complete, for `seconds` at most."""

    completion: Completion
    seconds: float


StoreStep: TypeAlias = "Command[Any] | Fetch | Pipeline"
"""The steps that a store executes."""
Step: TypeAlias = "StoreStep | Sleep | WaitFor"
Operation: TypeAlias = Generator[Step, Any, T]


def send(command: Command[Reply]) -> Operation[Reply]:
    """Send `command`, which is not an `Acquire`, and return its reply."""
    reply: Reply = yield command
    return reply


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
                failure = None  # see below
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
                failure = None
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


class Completion:
    """Completed once. Waits that begin after that return at once."""

    __slots__ = ("_done", "_waiters", "failure")

    def __init__(self) -> None:
        self.failure: StoreError | None = None
        """Why there is no result; None if there is one."""
        self._done = OneShotEvent()
        self._waiters: list[Callable[[], object]] = []
        """One function for each waiting task, which wakes it."""

    @property
    def is_complete(self) -> bool:
        return self._done.is_set

    def complete(self, failure: StoreError | None = None) -> None:
        """Wake all that wait. Idempotent."""
        self.failure = failure
        self._done.set()
        while self._waiters:
            self._waiters.pop()()

    def wait(self, seconds: float) -> None:
        self._done.wait(seconds)

    async def wait_async(self, seconds: float) -> None:
        loop = running_loop()
        ended = loop.create_future()  # with `wait_for` a burst of tasks takes nearly twice as long

        def end() -> None:
            if not ended.done():
                ended.set_result(None)

        def wake() -> None:
            if not loop.is_closed():
                loop.call_soon_threadsafe(end)

        self._waiters.append(wake)
        if self._done.is_set:  # after the append, as `complete` may have emptied the list before it
            return
        timer = loop.call_later(seconds, end)
        try:
            await ended
        finally:
            timer.cancel()
