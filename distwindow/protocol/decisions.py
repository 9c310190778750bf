"""Decisions from the replies of scripts."""

from __future__ import annotations

from ..core.charge import charged_in
from ..core.decision import Decision, Source
from .commands import Acquire, Command
from .replies import AcquireReply


def decision_of(command: Command[AcquireReply], reply: AcquireReply, source: Source) -> Decision:
    """Return the decision that `reply` to one call is."""
    admitted, index, left, reset_ms, retry_ms, now_ms, _, starts = reply
    if admitted:
        decision = admitted_decision(command, index, left, reset_ms, now_ms, source)
        if starts is not None and decision.charged:
            decision = decision._replace(charged=charged_in(command.charges, starts))
        return decision
    _, limit, cost, key, _ = command.charges[index]
    return Decision(
        allowed=False,
        key=key,
        cost=cost,
        limit=limit,
        remaining=max(0, left),
        retry_after=retry_ms / 1000,
        reset_after=reset_ms / 1000,
        wait=0.0,
        reason="over_limit",
        source=source,
        now_ms=now_ms,
    )


def admitted_decision(
    command: Command[AcquireReply],
    index: int,
    left: int,
    reset_ms: int,
    now_ms: int,
    source: Source,
) -> Decision:
    """Return the decision of an admitted call. Stores call this directly on their hot paths."""
    charges = command.charges
    _, limit, cost, key, _ = charges[index]
    charged = charges if type(command) is Acquire else None
    # `Decision(...)` takes twice as long.
    return _new_tuple(
        Decision,
        (True, key, cost, limit, left, 0.0, reset_ms / 1000, 0.0, "ok", source, now_ms, charged),
    )


_new_tuple = tuple.__new__
