"""The dialogues around admission: look, give back, forget, and record finished calls."""

from __future__ import annotations

from ..core.decision import Decision, Source
from ..core.stats import Stats, stats_of, window_at
from ..wire.command import Charge, Observe, Peek, Read, Refund, Reset
from ..wire.keys import AnyKey
from .admit import decide
from .effect import Dialogue


def peek(charges: tuple[Charge, ...], source: Source) -> Dialogue[Decision]:
    """The decision these charges would get now."""
    command = Peek(charges)
    verdict = yield command
    return decide(command, verdict, source)


def stats(key: AnyKey, charges: tuple[Charge, ...]) -> Dialogue[Stats]:
    """What is recorded of `key` in the windows of its limits."""
    states, now_ms = yield Read(charges)
    windows = tuple(
        window_at(state, charge.limit, now_ms)
        for state, charge in zip(states, charges, strict=True)
    )
    return stats_of(key, windows, now_ms)


def refund(decision: Decision) -> Dialogue[int]:
    """Give back what `decision` was charged, out of the bucket it was charged in; how many permits
    were still there. Raises `ValueError` for a decision that was charged nothing.
    """
    count, _ = yield Refund(_charged(decision), charged_ms=_charged_at(decision))
    return int(count)


def reset(charges: tuple[Charge, ...]) -> Dialogue[None]:
    """Forget the windows."""
    yield Reset(charges)


def observe(decision: Decision, *, failed: bool, rt_ms: int) -> Dialogue[None]:
    """Record one finished call."""
    yield Observe(
        _charged(decision),
        success=int(not failed),
        error=int(failed),
        rt_sum_ms=rt_ms,
        rt_min_ms=rt_ms,
    )


def _charged_at(decision: Decision) -> int:
    """A time in the bucket that was charged: that of now, or a later one where the clock was behind
    the newest bucket. Right after an admission, the window empties when its newest bucket leaves.
    """
    limit = decision.limit
    empties = decision.now_ms + round(decision.reset_after * 1000)
    return max(decision.now_ms, empties - limit.span * limit.bucket_ms)


def _charged(decision: Decision) -> tuple[Charge, ...]:
    if not decision.charged:
        raise ValueError(f"nothing was charged by this decision: {decision!r}")
    charged: tuple[Charge, ...] = decision.charged
    return charged
