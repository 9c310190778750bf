"""One script call may stand for several equal calls: what each of their callers gets of its reply.

Both stores recognize short replies here, split a reply into shares, and make the decision of each.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

from ...core.decision import Decision
from ...core.limit import expires_in_ms
from ...protocol.decisions import admitted_decision, decision_of
from ...protocol.frames import Command
from ...protocol.replies import AcquireReply, split_reply
from .attempts import RawReply

ShortReply: TypeAlias = "tuple[int, int]"
"""`left` and `now_ms` of the reply `[guard, left, now_ms]`, which `acquire` gives when a call has
one ring and every call is admitted. That is nearly every reply.
"""

CallShare: TypeAlias = "ShortReply | AcquireReply"
"""What one caller gets. A share is cheaper to make than a decision: where threads share a call, one
thread makes all shares while the others wait, and then each makes its own decision.
"""


def short_reply(raw: RawReply, guard: bytes | None) -> ShortReply | None:
    """The short reply to the call with this guard; None if `raw` is anything else."""
    if type(raw) is list and len(raw) == 3 and raw[0] == guard and raw[1] >= 0:
        return raw[1], raw[2]
    return None


def short_reply_time_ms(raw: RawReply) -> int | None:
    """`now_ms` of the short reply to any call; None if `raw` is anything else."""
    return raw[2] if type(raw) is list and len(raw) == 3 else None


def split_share(share: CallShare, calls: int, costs: Sequence[int]) -> Sequence[CallShare]:
    """The shares that `calls` equal calls would have got one after the other. `share` is the reply
    to the one call that stood for them; `costs` is what a single call charges each ring.
    """
    if isinstance(share, AcquireReply):
        return split_reply(share, calls, costs)
    left, now_ms = share
    return [(each, now_ms) for each in _permits_left(left, calls, costs[0])]


def decision_of_share(command: Command[AcquireReply], share: CallShare) -> Decision:
    """The decision on one call."""
    if isinstance(share, AcquireReply):
        return decision_of(command, share, "store")
    left, now_ms = share
    reset_ms = expires_in_ms(command.charges[0].limit, now_ms)
    return admitted_decision(command, 0, left, reset_ms, now_ms, "store")


def decisions_of_reply(
    command: Command[AcquireReply], reply: CallShare, calls: int
) -> list[Decision]:
    """The decisions on `calls` calls that one call stood for. They are those of `decision_of_share`
    on each of `split_share`, and cost less, because what the calls have in common is done once.
    """
    if isinstance(reply, AcquireReply):
        costs = [charge.cost for charge in command.charges]
        return [decision_of(command, each, "store") for each in split_reply(reply, calls, costs)]
    left, now_ms = reply
    reset_ms = expires_in_ms(command.charges[0].limit, now_ms)
    return [
        admitted_decision(command, 0, each, reset_ms, now_ms, "store")
        for each in _permits_left(left, calls, command.charges[0].cost)
    ]


def _permits_left(left: int, calls: int, cost: int) -> range:
    """The permits left after each of the calls, of which the last one leaves `left`."""
    return range(left + cost * (calls - 1), left - 1, -cost)
