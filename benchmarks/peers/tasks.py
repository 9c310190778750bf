"""The peers over Redis, for asyncio."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from importlib import import_module
from typing import Any

from benchmarks.peers import libraries
from benchmarks.peers.base import AsyncAcquire, AsyncPeer, Quota


def async_peers() -> list[AsyncPeer]:
    """Return every algorithm of every peer, with each client and each kind of pool it can use."""
    found: list[AsyncPeer] = []
    for pool in libraries.ASYNC_POOLS:
        for kind in libraries.LIMITS:
            for bridge in ("redispy", "coredis", "valkey"):
                name = f"limits {kind} ({bridge}, {pool})"
                opener = partial(_limits_async, kind=kind, bridge=bridge, pool=pool)
                found.append(AsyncPeer(name, "limits", opener))
        for kind in libraries.THROTTLED:
            opener = partial(_throttled_async, kind=kind, pool=pool)
            found.append(AsyncPeer(f"throttled-py {kind} ({pool})", "throttled-py", opener))
        for kind in libraries.PYRATE:
            opener = partial(_pyrate_async, kind=kind, pool=pool)
            found.append(AsyncPeer(f"pyrate-limiter {kind} ({pool})", "pyrate-limiter", opener))
    return found


@asynccontextmanager
async def _limits_async(
    url: str, quota: Quota, kind: str, bridge: str, pool: str
) -> AsyncIterator[AsyncAcquire]:
    if bridge == "coredis":
        coredis = import_module("coredis")
        make = coredis.ConnectionPool if pool == libraries.WIDE else coredis.BlockingConnectionPool
        connections = make.from_url(url, max_connections=256 if pool == libraries.WIDE else 32)
        options: dict[str, Any] = {"implementation": "coredis"}
    else:
        module = "valkey" if bridge == "valkey" else "redis"
        connections = libraries.make_pool(module, pool, url.replace("redis://", f"{module}://"))
        options = {"implementation": bridge, "retry": libraries.no_retry(module, asyncio=True)}
    storage = import_module("limits.aio.storage").RedisStorage(
        f"async+{url}",
        connection_pool=connections,
        key_prefix=f"limits:{kind}:{bridge}:{pool}",
        **options,
    )
    strategy = getattr(import_module("limits.aio.strategies"), libraries.LIMITS_STRATEGIES[kind])(
        storage
    )
    try:
        yield partial(strategy.hit, libraries.limits_item(quota))
    finally:
        closed = connections.disconnect()
        if closed is not None:
            await closed


@asynccontextmanager
async def _throttled_async(
    url: str, quota: Quota, kind: str, pool: str
) -> AsyncIterator[AsyncAcquire]:
    package = import_module("throttled.asyncio")
    store = libraries.throttled_store("throttled.asyncio", url, pool)
    throttle = package.Throttled(using=kind, quota=libraries.throttled_quota(quota), store=store)

    async def acquire(key: str) -> bool:
        return not (await throttle.limit(key)).limited

    try:
        yield acquire
    finally:
        await store._backend.get_client().connection_pool.disconnect()


@asynccontextmanager
async def _pyrate_async(
    url: str, quota: Quota, kind: str, pool: str
) -> AsyncIterator[AsyncAcquire]:
    connections = libraries.make_pool("redis", pool, url)
    client = import_module("redis.asyncio").Redis(
        connection_pool=connections, retry=libraries.no_retry("redis", asyncio=True)
    )
    sha = await client.script_load(libraries.pyrate_script())
    limiter = libraries.pyrate_limiter(quota, libraries.pyrate_bucket(kind, client, sha))
    try:
        # Not try_acquire_async, which holds one lock for all keys during the round trip.
        yield partial(limiter.try_acquire, blocking=False)
    finally:
        await connections.disconnect()
