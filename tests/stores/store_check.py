"""What every store has to do, as one check for tests of connections."""

from __future__ import annotations

from tests.harness import LimiterAdapter


def works(limiter: LimiterAdapter, key: str = "k") -> None:
    """Check what every store has to do: admit, show, refuse, refund, reset."""
    first = limiter.try_acquire(key)
    assert first.allowed, first
    assert first.remaining == 2
    assert limiter.peek(key).remaining == 2
    second = limiter.try_acquire(key, 2)
    assert second.allowed, second
    refused = limiter.try_acquire(key)
    assert not refused.allowed
    assert refused.retry_after > 0
    stats = limiter.stats(key)
    assert (stats.passed, stats.blocked) == (3, 1)
    assert limiter.refund(second) == 2
    assert limiter.try_acquire(key).remaining == 1
    limiter.reset(key)
    assert limiter.peek(key).remaining == 3


THREE = "3/hour"
