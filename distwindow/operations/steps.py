"""The steps of an operation: what it may yield, and what it is given for each.

    step       given
    Command    its reply; for an `Acquire` the `Decision`, as stores build that directly
    Pipeline   a list of replies, with an error in place of each reply that did not come
    Fetch      the reply
    Sleep      None, after that time
    WaitFor    None, when the completion is complete or after that time

An operation is a generator that is written once and driven by `run_blocking` or `run_async`. It
reads time only from the clock it was given, holds no lock across a yield, and never yields inside
`finally`.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from typing import Any, NamedTuple, TypeAlias, TypeVar

from ..protocol.frames import Command
from ..protocol.replies import LeaseReply
from .completion import Completion

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
