"""The dialogues of the background: carry what is nearby to the store, and bring back what it says.

One exchange for all keys of a limiter, however many.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from ..core.errors import StoreTimeout
from .effect import Dialogue, Together
from .near import Errand, Near


def work(near: Near, monotonic: Callable[[], float], *, last: bool = False) -> Dialogue[None]:
    """Carry what is due; with `last`, everything."""
    yield from carry(near.greeting(), monotonic)
    yield from carry(near.errands(monotonic(), last=last), monotonic)
    near.worked(monotonic())


def carry(errands: Sequence[Errand], monotonic: Callable[[], float]) -> Dialogue[None]:
    """Carry these."""
    if not errands:
        return
    sent_at = monotonic()
    try:
        replies = yield Together(tuple(errand.command for errand in errands))
    except BaseException:  # a cancellation, too
        lost = StoreTimeout("the exchange was broken off; its outcome is unknown", charged=None)
        for errand in errands:
            errand.settle(lost, sent_at)
        raise
    for errand, reply in zip(errands, replies, strict=True):
        errand.settle(reply, sent_at)
