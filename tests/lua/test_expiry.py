"""When rings expire."""

from __future__ import annotations

import random
from typing import Any

import pytest
import redis

from distwindow import Limit
from distwindow.ring import commands as wire
from tests.lua.target import NOW, Target


@pytest.mark.parametrize("rings", [1, 2])
@pytest.mark.parametrize("buckets", [1, 4, 10, 60])
def test_a_ring_outlives_its_newest_bucket_by_its_window(
    server: redis.Redis, buckets: int, rings: int
) -> None:
    """However rarely its expiry is renewed. Two rings take the general path."""
    rng = random.Random(buckets)
    limits = [Limit(1000, per=60 * buckets, buckets=buckets), Limit(1000, per=7200, buckets=2)]
    span, bucket_ms = limits[0].span, limits[0].bucket_ms
    renewal = span // 4 + 1
    now, renewed, opened = NOW, 0, 0
    target = Target(server, tuple(limits[:rings]), now, 1)
    ring = target.charges[0].ring
    ttl: Any = server.pttl(ring)
    expires_at = now + ttl
    while opened < 5 * span:
        opened += 1
        now += rng.choice([bucket_ms, bucket_ms, rng.randrange(bucket_ms, 3 * bucket_ms)])
        server.persist(ring)
        target.send(wire.Acquire(target.charges, now))
        ttl = server.pttl(ring)
        if ttl > 0:
            renewed, expires_at = renewed + 1, now + ttl
        start = now - now % bucket_ms
        assert start + (span + 1) * bucket_ms - 1000 <= expires_at
        assert expires_at <= now + (span + renewal) * bucket_ms
    assert renewed <= 2 * opened / renewal + 1


@pytest.mark.parametrize("buckets", [1, 2, 4, 10, 60])
def test_a_ring_outlives_the_windows_of_coming_buckets(server: redis.Redis, buckets: int) -> None:
    """Whoever opens buckets meanwhile, and however rarely its expiry is renewed after that."""
    for seed in range(20):
        rng = random.Random(seed)
        limit = Limit(10, per=60 * buckets, buckets=buckets)
        span, bucket_ms, now = limit.span, limit.bucket_ms, NOW
        target = Target(server, (limit,), now, 10, borrowed=True)
        ring = target.charges[0].ring
        last = NOW // bucket_ms + span  # all ten were counted in one bucket
        ttl: Any = server.pttl(ring)
        expires_at = now + ttl
        while now // bucket_ms < last + 2 * span:
            assert (max(now // bucket_ms, last) + span + 1) * bucket_ms - 1000 <= expires_at
            server.persist(ring)
            now += rng.choice([0, bucket_ms // 2, bucket_ms, bucket_ms * span])
            target.send(rng.choice([wire.Acquire, wire.Lease])(target.charges, now))
            ttl = server.pttl(ring)
            if ttl > 0:
                expires_at = now + ttl
