"""The command of a priority call, and its reply."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

from ..ring.command import Command, ScriptReply, ring_arguments, time_argument
from ..ring.decision import BorrowedCharge, Decision, Source
from ..ring.decisions import decision_of
from ..ring.replies import AcquireReply, parse_acquire_reply


class BorrowReply(NamedTuple):
    """The reply of `borrow`."""

    acquire_reply: AcquireReply
    """As of `acquire`; of a borrowing call, `bucket_starts_ms` has the buckets that count it."""
    wait_ms: int = 0
    """Time until the call may proceed; 0 if it may at once."""
    borrowed: tuple[bool, ...] = ()
    """For each ring, whether that bucket had not begun; empty if the call has not borrowed."""


@dataclass(slots=True, eq=False)
class Borrow(Command[BorrowReply]):
    """A call that borrows from coming buckets if the present ones have no room."""

    script: ClassVar[str] = "borrow"

    max_wait_ms: int = 0
    max_borrowed: tuple[int, ...] = ()
    """For each ring, how many borrowed permits a window may hold."""

    def arguments(self) -> list[bytes | int | str]:
        rings = ring_arguments(self.charges)
        now = time_argument(self.now_ms)
        return [*rings, 1, now, self.max_wait_ms, *self.max_borrowed]

    def reply(self, raw: ScriptReply) -> BorrowReply:
        if raw[1] < 0:
            return BorrowReply(parse_acquire_reply(raw, 1))
        count = len(self.charges)
        starts, borrowed = raw[6 : 6 + count], raw[6 + count :]
        reply = parse_acquire_reply([*raw[:5], *starts], 1)
        return BorrowReply(reply, raw[5], tuple(map(bool, borrowed)))


def borrow_decision(command: Borrow, reply: BorrowReply, source: Source) -> Decision:
    """Return the decision that `reply` is."""
    decision = decision_of(command, reply.acquire_reply, source)
    if not decision.allowed:
        return decision
    charges, starts = command.charges, reply.acquire_reply.bucket_starts_ms
    if starts is not None:
        borrowed = reply.borrowed or (False,) * len(charges)
        charges = tuple(
            [
                (BorrowedCharge if is_borrowed else type(charge))(*charge[:4], start)
                for charge, start, is_borrowed in zip(charges, starts, borrowed, strict=True)
            ]
        )
    return decision._replace(
        charged=charges,
        wait=reply.wait_ms / 1000,
        reason="borrowed" if reply.wait_ms else "ok",
    )


BORROW_COMMANDS: tuple[type[Command[Any]], ...] = (Borrow,)
