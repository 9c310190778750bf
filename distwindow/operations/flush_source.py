"""What the worker and `flush_due` need of what they flush: a consistency strategy, or breakers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

from ..protocol.frames import Command


class OutgoingCommand(NamedTuple):
    """A command that is to be sent, and the function that takes its outcome."""

    command: Command[Any]
    on_reply: Callable[[Any, float], None]
    """Called with the reply or the error, and when the command was sent (monotonic seconds). A
    second call is harmless."""


class FlushSource(Protocol):
    """Something that counts in this process, and has to send it."""

    @property
    def next_due_at(self) -> float:
        """When the worker has to flush, monotonic seconds; infinite if there is nothing to send."""

    @property
    def dropped(self) -> int:
        """How many counts the store never received, and never will."""

    wake: Callable[[], object]
    """Called when `next_due_at` is earlier than it was. Set by the worker."""

    def clock_probe(self) -> list[OutgoingCommand]:
        """Return what has to be sent before any counts can be: its reply has the store's time."""

    def collect_commands(
        self, now: float, outgoing: list[OutgoingCommand], *, everything: bool = False
    ) -> None:
        """Add what is to be sent now to `outgoing`; with `everything`, all that is pending, and
        nothing that fetches. If this raises, the caller calls each `on_reply` of `outgoing` with
        "not sent".
        """

    def reschedule(self, now: float) -> None:
        """Set `next_due_at` after a flush."""

    def pause_calls(self, hold: Callable[[], object]) -> None:
        """Have every call run `hold` before it is decided."""

    def unreturned_permits(self) -> int:
        """Return how many leased permits are still to be given back."""

    def unacknowledged_counts(self) -> int:
        """Return how many counts the store has not acknowledged."""
