"""The parts of the peers' limiters that do not depend on threads or asyncio."""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import timedelta
from importlib import import_module
from typing import Any

from benchmarks.peers.base import TIMEOUT_S, Quota

THROTTLED = ("fixed_window", "sliding_window", "token_bucket", "leaking_bucket", "gcra")
LIMITS = ("fixed", "moving", "sliding")
PYRATE = ("log", "gcra")

SHARED, BLOCKING, PER_THREAD = "shared client", "shared blocking pool", "client per thread"
POOLS = (SHARED, BLOCKING, PER_THREAD)
WIDE, NARROW = "pool 256", "blocking pool 32"
ASYNC_POOLS = (WIDE, NARROW)


def pool_options(module: str, pool: str) -> tuple[str, dict[str, Any]]:
    """Return the pool class, by its import path, and its options."""
    if pool == BLOCKING:
        return f"{module}.BlockingConnectionPool", {"max_connections": 8, "timeout": TIMEOUT_S}
    if pool == NARROW:
        name = f"{module}.asyncio.BlockingConnectionPool"
        return name, {"max_connections": 32, "timeout": TIMEOUT_S}
    if pool == WIDE:
        return f"{module}.asyncio.ConnectionPool", {"max_connections": 256}
    return f"{module}.ConnectionPool", {"max_connections": 64}


def make_pool(module: str, pool: str, url: str) -> Any:
    path, options = pool_options(module, pool)
    package, _, name = path.rpartition(".")
    return getattr(import_module(package), name).from_url(url, **options)


def no_retry(module: str, asyncio: bool = False) -> Any:
    retry = import_module(f"{module}.asyncio.retry" if asyncio else f"{module}.retry")
    return retry.Retry(import_module(f"{module}.backoff").NoBackoff(), 0)


LIMITS_STRATEGIES = {
    "fixed": "FixedWindowRateLimiter",
    "moving": "MovingWindowRateLimiter",
    "sliding": "SlidingWindowCounterRateLimiter",
}


def limits_item(quota: Quota) -> Any:
    return import_module("limits").RateLimitItemPerSecond(quota.amount, quota.seconds)


def throttled_quota(quota: Quota) -> Any:
    limiter = import_module("throttled.rate_limiter")
    return limiter.per_duration(timedelta(seconds=quota.seconds), quota.amount, quota.amount)


def throttled_store(package: str, url: str, pool: str) -> Any:
    path, options = pool_options("redis", pool)
    # By default all stores of the process share one pool.
    settings: dict[str, Any] = {"CONNECTION_POOL_CLASS": path, "CONNECTION_POOL_KWARGS": options}
    asyncio = package.endswith("asyncio")
    settings |= {
        "REUSE_CONNECTION": False,
        "REDIS_CLIENT_KWARGS": {"retry": no_retry("redis", asyncio)},
    }
    return import_module(f"{package}.store").RedisStore(server=url, options=settings)


def pyrate_limiter(quota: Quota, make: Callable[[str, list[Any]], Any]) -> Any:
    """Return a Limiter with a bucket per key, made by `make`, and without a background thread."""
    package = import_module("pyrate_limiter")
    rates = [package.Rate(quota.amount, quota.seconds * 1000)]
    buckets: dict[str, Any] = {}

    # The base class is known only at run time.
    class PerKey(package.BucketFactory):  # type: ignore[misc, name-defined]
        def wrap_item(self, name: str, weight: int = 1) -> Any:
            return package.RateItem(name, time.time_ns() // 1_000_000, weight)

        def get(self, item: Any) -> Any:
            bucket = buckets.get(item.name)
            if bucket is None:
                bucket = buckets[item.name] = make(item.name, rates)
            return bucket

    return package.Limiter(PerKey())


def pyrate_bucket(kind: str, client: Any, sha: str) -> Callable[[str, list[Any]], Any]:
    package = import_module("pyrate_limiter")
    if kind == "log":
        return lambda name, rates: package.RedisBucket(rates, client, f"pyrate:log:{name}", sha)
    return lambda name, rates: package.StateBucket(
        rates, package.GCRA(), package.RedisStateStore(client, f"pyrate:gcra:{name}")
    )


def pyrate_script() -> str:
    script: str = import_module("pyrate_limiter.buckets.redis_bucket").LuaScript.PUT_ITEM
    return script
