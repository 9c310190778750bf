"""What a dialogue may ask for: a command's reply, those of many, or time to pass. Nothing else.

The reply to an `Acquire` is the `Decision` it came to, as stores make that on their shortest way.

A dialogue is a generator written once and driven twice (`drive.run`, `drive.arun`). It never reads
a clock, holds no lock across a yield, and never yields inside `finally`.
"""

from __future__ import annotations

from collections.abc import Generator
from typing import Any, NamedTuple, TypeAlias, TypeVar

from ..wire.command import Command

T = TypeVar("T")


class Sleep(NamedTuple):
    """Let `seconds` pass."""

    seconds: float


class Together(NamedTuple):
    """The replies to many commands; an error stands in the place of the reply it came to."""

    commands: tuple[Command[Any], ...]


Effect: TypeAlias = "Command[Any] | Together | Sleep"
Dialogue: TypeAlias = Generator[Effect, Any, T]
