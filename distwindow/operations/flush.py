"""The dialogues of the background: carry what is nearby to the store, and bring back what it says.

One exchange for all keys of a limiter, however many.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from ..consistency.base import Errand, Near
from ..core.errors import DistwindowError, StoreTimeout, StoreUnavailable
from .steps import Dialogue, Together


def work(
    near: Near, monotonic: Callable[[], float], *, last: bool = False
) -> Dialogue[DistwindowError | None]:
    """Carry what is due; with `last`, everything. The first failure there was."""
    failure = yield from carry(near.greeting(), monotonic)
    found: list[Errand] = []
    try:
        near.errands(monotonic(), found, last=last)
        later = yield from carry(found, monotonic)
    except BaseException:  # a signal handler's exception, anywhere
        for errand in found:  # those that `carry` has settled ignore this
            errand.settle(_NOT_SENT, 0.0)
        raise
    finally:
        near.worked(monotonic())
    return failure or later


_NOT_SENT = StoreUnavailable("the exchange was broken off before it was sent", charged=False)
_BROKEN_OFF = StoreTimeout("the exchange was broken off; its outcome is unknown", charged=None)


def carry(
    errands: Sequence[Errand], monotonic: Callable[[], float]
) -> Dialogue[DistwindowError | None]:
    """Carry these. The first failure there was."""
    if not errands:
        return None
    sent_at = monotonic()
    replies: Sequence[Any] = [_NOT_SENT] * len(errands)
    try:
        together = Together(tuple([errand.command for errand in errands]))
        replies = [_BROKEN_OFF] * len(errands)
        replies = yield together
        for errand, reply in zip(errands, replies, strict=True):
            errand.settle(reply, sent_at)
    except BaseException:  # a cancellation or a signal handler's exception, too
        for errand, reply in zip(errands, replies, strict=True):
            errand.settle(reply, sent_at)  # nothing happens where this was done before
        raise
    failures = (reply for reply in replies if isinstance(reply, DistwindowError))
    return next(failures, None)
