"""What a dialogue may ask for: a command's reply, or time to pass. Nothing else.

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


Effect: TypeAlias = "Command[Any] | Sleep"
Dialogue: TypeAlias = Generator[Effect, Any, T]
