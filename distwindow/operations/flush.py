"""The dialogues of the background: carry what is nearby to the store, and bring back what it says.

One exchange for all keys of a limiter, however many.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from ..core.errors import DistwindowError, StoreTimeout, StoreUnavailable
from .steps import Operation, Pipeline
from .strategy import PendingCommand, Strategy


def flush_due(
    strategy: Strategy, monotonic: Callable[[], float], *, last: bool = False
) -> Operation[DistwindowError | None]:
    """Carry what is due; with `last`, everything. The first failure there was."""
    failure = yield from send_all(strategy.clock_probe(), monotonic)
    found: list[PendingCommand] = []
    try:
        strategy.pending_commands(monotonic(), found, last=last)
        later = yield from send_all(found, monotonic)
    except BaseException:  # a signal handler's exception, anywhere
        for command in found:  # those that `carry` has settled ignore this
            command.on_reply(_NOT_SENT, 0.0)
        raise
    finally:
        strategy.reschedule(monotonic())
    return failure or later


_NOT_SENT = StoreUnavailable("the exchange was broken off before it was sent", charged=False)
_BROKEN_OFF = StoreTimeout("the exchange was broken off; its outcome is unknown", charged=None)


def send_all(
    pending: Sequence[PendingCommand], monotonic: Callable[[], float]
) -> Operation[DistwindowError | None]:
    """Carry these. The first failure there was."""
    if not pending:
        return None
    sent_at = monotonic()
    replies: Sequence[Any] = [_NOT_SENT] * len(pending)
    try:
        together = Pipeline(tuple([command.command for command in pending]))
        replies = [_BROKEN_OFF] * len(pending)
        replies = yield together
        for command, reply in zip(pending, replies, strict=True):
            command.on_reply(reply, sent_at)
    except BaseException:  # a cancellation or a signal handler's exception, too
        for command, reply in zip(pending, replies, strict=True):
            command.on_reply(reply, sent_at)  # nothing happens where this was done before
        raise
    failures = (reply for reply in replies if isinstance(reply, DistwindowError))
    return next(failures, None)
