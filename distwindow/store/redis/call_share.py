"""One script call may stand for several equal calls: what each of their callers gets of its reply.

Both stores ask here whether a reply is the short one, which share each caller gets, and which
decision a share is.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

from ...core.decision import Decision
from ...protocol.commands import Acquire
from ...protocol.decisions import admitted_decision, decision_of
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
    to the one call that stood for them; `costs` are what a single call charges, ring by ring.
    """
    if isinstance(share, AcquireReply):
        return split_reply(share, calls, costs)
    left, now_ms = share
    cost = costs[0]
    return [(left + cost * later, now_ms) for later in range(calls - 1, -1, -1)]


def decision_of_share(command: Acquire, share: CallShare) -> Decision:
    """The decision on one call."""
    if isinstance(share, AcquireReply):
        return decision_of(command, share, "store")
    left, now_ms = share
    limit = command.charges[0].limit
    bucket_ms = limit.bucket_ms
    reset_ms = limit.span * bucket_ms - now_ms % bucket_ms
    return admitted_decision(command, 0, left, reset_ms, now_ms, "store")
