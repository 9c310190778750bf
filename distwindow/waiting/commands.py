"""The command of a call that takes a place in the virtual line, and its reply.

Such calls are not shared, because each gets a turn of its own.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

from ..ring.command import Command, ScriptReply, ring_arguments, time_argument
from ..ring.decision import Decision, Source, with_bucket_starts
from ..ring.decisions import decision_of
from ..ring.key import line_name
from ..ring.replies import AcquireReply, parse_acquire_reply


class TurnReply(NamedTuple):
    """The reply of `acquire_turn`."""

    acquire_reply: AcquireReply
    """As of `acquire`."""
    turn_in_ms: int = 0
    """Time until the refused call's turn; with `takes_next`, the next waiter's; else 0."""
    queued: int = 0
    """With `takes_next`, the permits for which others in the line wait; otherwise 0."""


@dataclass(slots=True, eq=False)
class AcquireTurn(Command[TurnReply]):
    """A call that takes a place in the line if it is refused."""

    script: ClassVar[str] = "acquire_turn"

    held_ms: int = 0
    """The turn that the caller was told before, ms since the epoch, store's clock; 0: none."""
    takes_next: bool = False
    """Take a place for the next waiter of the same process, if the call is admitted."""

    @property
    def keys(self) -> list[bytes]:
        rings = [charge.ring for charge in self.charges]
        return [*rings, *map(line_name, rings)]

    def arguments(self) -> list[bytes | int | str]:
        rings = ring_arguments(self.charges)
        return [*rings, time_argument(self.now_ms), self.held_ms, int(self.takes_next)]

    def reply(self, raw: ScriptReply) -> TurnReply:
        if raw[1] < 0:
            *of_acquire, turn_in_ms = raw
            return TurnReply(parse_acquire_reply([*of_acquire, 0], 1), turn_in_ms)
        return TurnReply(parse_acquire_reply([*raw[:5], *raw[7:]], 1), raw[5], raw[6])


def turn_decision(command: AcquireTurn, reply: TurnReply, source: Source) -> Decision:
    """Return the decision of `reply`. A refusal's `retry_after` is when there is room."""
    decision = decision_of(command, reply.acquire_reply, source)
    if not decision.allowed:
        return decision
    starts = reply.acquire_reply.bucket_starts_ms
    charges = command.charges
    return decision._replace(
        charged=charges if starts is None else with_bucket_starts(charges, starts)
    )


WAITING_COMMANDS: tuple[type[Command[Any]], ...] = (AcquireTurn,)
