"""What is to be seen of a limit that is paced or warms up: its pace, its backlog and its tokens."""

from __future__ import annotations

from dataclasses import dataclass

from .limit import Limit
from .shaping import ShapingState, shaping_of


@dataclass(frozen=True, slots=True)
class ShapingStats:
    """How a limit that is paced or warms up (docs/howto/pacing.md) stands now. The tokens are those
    of Sentinel's WarmUpController (storedTokens, warningToken, maxToken).
    """

    rate: float
    """Permits that one interval admits now: the amount of the limit, or less while it warms up."""
    pace_ms: float | None
    """The time between two calls of cost 1 at this rate, ms; None: the limit is not paced."""
    promised_until_ms: int | None
    """When the call that was admitted last may proceed, ms since the epoch, rounded up; None: all
    that were admitted may proceed now, or the limit is not paced.
    """
    backlog_ms: float
    """How long it is until then, ms; 0 where it is None."""
    stored_tokens: float | None
    """How cold the limit is, in permits: 0 is warm; None: it does not warm up."""
    warning_tokens: float | None
    """Below so many tokens the limit admits its whole amount, in permits."""
    max_tokens: float | None
    """The tokens of a cold limit, in permits."""


def shaping_stats(limit: Limit, stored: ShapingState | None, now_ms: int) -> ShapingStats | None:
    """Return how `limit` stands at `now_ms`, with what is `stored`; None: it is not shaped."""
    if not limit.is_shaped:
        return None
    shaping = shaping_of(limit, limit.max_wait_ms)
    state = shaping.at(stored, now_ms)
    rate = shaping.rate(state)
    backlog_us = 0
    if shaping.is_paced and state.moment_us is not None:
        backlog_us = max(0, state.moment_us + (state.moment_rest > 0) - now_ms * 1000)
    sizes = shaping.token_sizes
    return ShapingStats(
        rate=rate,
        pace_ms=limit.interval_ms / rate if shaping.is_paced else None,
        promised_until_ms=now_ms - (-backlog_us // 1000) if backlog_us else None,
        backlog_ms=backlog_us / 1000,
        stored_tokens=None if sizes is None else state.tokens / limit.interval_ms,
        warning_tokens=None if sizes is None else sizes[0],
        max_tokens=None if sizes is None else sizes[1],
    )
