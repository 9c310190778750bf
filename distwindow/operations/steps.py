"""What a dialogue may ask for: a command's reply, those of many, time to pass, or a gate to open.
Nothing else.

The reply to an `Acquire` is the `Decision` it came to, as stores make that on their shortest way.

A dialogue is a generator written once and driven twice (`drive.run`, `drive.arun`). It never reads
a clock, holds no lock across a yield, and never yields inside `finally`.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from typing import Any, NamedTuple, TypeAlias, TypeVar

from ..protocol.commands import Command
from .completion import Completion

T = TypeVar("T")


class Sleep(NamedTuple):
    """Let `seconds` pass."""

    seconds: float


class Pipeline(NamedTuple):
    """The replies to many commands; an error stands in the place of the reply it came to."""

    commands: tuple[Command[Any], ...]


class Fetch(NamedTuple):
    """The reply to a command that brings something to keep. Where it comes after its caller was
    cancelled or has given up, `on_late_reply` is told of it.
    """

    command: Command[Any]
    on_late_reply: Callable[[Any], object]


class WaitFor(NamedTuple):
    """WaitFor for a gate to open, or for `seconds` to pass."""

    completion: Completion
    seconds: float


Step: TypeAlias = "Command[Any] | Fetch | Pipeline | Sleep | WaitFor"
Operation: TypeAlias = Generator[Step, Any, T]
