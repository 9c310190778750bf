"""The worker's operation: send what is pending of all keys of a limiter in one exchange, and take
in the replies.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from ..core.errors import DistwindowError, StoreTimeout, StoreUnavailable
from .flush_source import FlushSource, OutgoingCommand
from .steps import Operation, Pipeline

_NOT_SENT = StoreUnavailable("the exchange was interrupted before it was sent", charged=False)
_OUTCOME_UNKNOWN = StoreTimeout(
    "the exchange was interrupted, and its outcome is unknown", charged=None
)


def was_interrupted(reply: object) -> bool:
    """True for the outcome of a command whose exchange was cancelled, or interrupted by a signal
    handler: it says nothing about the store.
    """
    return reply is _NOT_SENT or reply is _OUTCOME_UNKNOWN


class FlushResult(NamedTuple):
    """How a flush ended."""

    failure: DistwindowError | None
    """The first error; None if there is none."""
    has_sent: bool
    """False if there was nothing to send, which says nothing about the store."""


def flush_due(
    strategy: FlushSource, monotonic: Callable[[], float], *, everything: bool = False
) -> Operation[FlushResult]:
    """Send what is due; with `everything`, all that is pending."""
    probe = strategy.clock_probe()
    failure = yield from send_all(probe, monotonic)
    outgoing: list[OutgoingCommand] = []
    try:
        strategy.collect_commands(monotonic(), outgoing, everything=everything)
        later = yield from send_all(outgoing, monotonic)
    except BaseException:  # raised by a signal handler, anywhere
        # Where `send_all` has called `on_reply` already, a second call does nothing.
        for each in outgoing:
            each.on_reply(_NOT_SENT, 0.0)
        raise
    finally:
        strategy.reschedule(monotonic())
    return FlushResult(failure or later, bool(probe or outgoing))


def send_all(
    outgoing: Sequence[OutgoingCommand], monotonic: Callable[[], float]
) -> Operation[DistwindowError | None]:
    """Send these commands in one exchange, and call each `on_reply`, whatever happens. Return the
    first error, None if there is none.
    """
    if not outgoing:
        return None
    sent_at = monotonic()
    replies: Sequence[object] = [_NOT_SENT] * len(outgoing)
    try:
        pipeline = Pipeline(tuple([each.command for each in outgoing]))
        replies = [_OUTCOME_UNKNOWN] * len(outgoing)
        replies = yield pipeline
        for each, reply in zip(outgoing, replies, strict=True):
            each.on_reply(reply, sent_at)
    except BaseException:  # a cancellation, or raised by a signal handler
        for each, reply in zip(outgoing, replies, strict=True):
            each.on_reply(reply, sent_at)  # a second call does nothing
        raise
    failures = (reply for reply in replies if isinstance(reply, DistwindowError))
    return next(failures, None)
