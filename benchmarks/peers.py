"""One face for all: open a limiter for a quota, then `acquire(key)` says yes or no.

Peers get their best settings: clients without retries or health checks, pools large enough, no
background work, and the fastest documented call. Which of several settings is the best one, a
heat before each final decides.
"""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator, Sequence
from contextlib import (
    AbstractAsyncContextManager,
    AbstractContextManager,
    asynccontextmanager,
    contextmanager,
)
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from importlib import import_module
from typing import Any

Acquire = Callable[[str], object]
AsyncAcquire = Callable[[str], Awaitable[object]]

OURS = "distwindow"
LIBRARIES = ("limits", "throttled-py", "pyrate-limiter")
THROTTLED = ("fixed_window", "sliding_window", "token_bucket", "leaking_bucket", "gcra")
LIMITS = ("fixed", "moving", "sliding")

SHARED, BLOCKING, PER_THREAD = "shared client", "shared blocking pool", "client per thread"
POOLS = (SHARED, BLOCKING, PER_THREAD)
WIDE, NARROW = "pool 256", "blocking pool 32"
ASYNC_POOLS = (WIDE, NARROW)

PATIENCE = 5.0
"""Seconds that any client waits for an answer: a busy machine is not what is measured."""


@dataclass(frozen=True)
class Quota:
    """`amount` in `seconds`."""

    amount: int
    seconds: int

    def limit(self, bound: str = "leap") -> Any:
        return import_module("distwindow").Limit(self.amount, per=self.seconds, bound=bound)


AMPLE = Quota(10**8, 60)
"""Nothing is ever refused."""
SCARCE = Quota(100, 3600)
"""Once used up, everything is refused while the benchmark lasts."""


@dataclass(frozen=True)
class Peer:
    """A limiter with its settings. `open(url, quota)` gives its `acquire`."""

    name: str
    library: str
    open: Callable[[str, Quota], AbstractContextManager[Acquire]]
    per_thread: bool = False


@dataclass(frozen=True)
class AsyncPeer:
    """The same for tasks."""

    name: str
    library: str
    open: Callable[[str, Quota], AbstractAsyncContextManager[AsyncAcquire]]


def check(verdicts: Iterable[object], admitted: bool = True) -> None:
    """All verdicts are what the quota must give."""
    wrong = sum(bool(verdict) != admitted for verdict in verdicts)
    if wrong:
        raise RuntimeError(f"{wrong} verdicts are not admitted={admitted}")


# -- distwindow -----------------------------------------------------------------------------------


def ours() -> list[Peer]:
    """distwindow as it comes."""
    return [Peer(OURS, OURS, _ours)]


def our_variants() -> list[Peer]:
    """The stricter bound, and a client that the caller owns."""
    return [
        Peer(f"{OURS}, strict", OURS, partial(_ours, bound="strict")),
        Peer(f"{OURS} on a redis.Redis", OURS, _ours_on_a_client),
    ]


@contextmanager
def _ours(url: str, quota: Quota, bound: str = "leap") -> Iterator[Acquire]:
    limiter = import_module("distwindow").Limiter(url, quota.limit(bound), timeout=PATIENCE)
    with limiter:
        yield limiter.try_acquire


@contextmanager
def _ours_on_a_client(url: str, quota: Quota) -> Iterator[Acquire]:
    with import_module("redis").Redis.from_url(url) as client:
        limiter = import_module("distwindow").Limiter(client, quota.limit(), timeout=PATIENCE)
        with limiter:
            yield limiter.try_acquire


def our_async() -> list[AsyncPeer]:
    return [AsyncPeer(OURS, OURS, _ours_async)]


@asynccontextmanager
async def _ours_async(url: str, quota: Quota) -> AsyncIterator[AsyncAcquire]:
    limiter = import_module("distwindow").AsyncLimiter(url, quota.limit(), timeout=PATIENCE)
    async with limiter:
        yield limiter.try_acquire


# -- over Redis, synchronous ----------------------------------------------------------------------


def sync_peers(
    pools: Sequence[str] = POOLS, clients: Sequence[str] = ("redis-py", "valkey-py")
) -> list[Peer]:
    """Every algorithm of every peer, with each client it can use and each kind of pool."""
    found: list[Peer] = []
    for pool in pools:
        suffix = f", {pool}" if len(pools) > 1 else ""
        alone = pool == PER_THREAD
        for kind in LIMITS:
            for client in clients:
                opener = partial(_limits, kind=kind, client=client, pool=pool)
                found.append(Peer(f"limits {kind} ({client}){suffix}", "limits", opener, alone))
        for kind in THROTTLED:
            opener = partial(_throttled, kind=kind, pool=pool)
            found.append(Peer(f"throttled-py {kind}{suffix}", "throttled-py", opener, alone))
        for kind in ("log", "gcra"):
            opener = partial(_pyrate, kind=kind, pool=pool)
            found.append(Peer(f"pyrate-limiter {kind}{suffix}", "pyrate-limiter", opener, alone))
    return found


def _options(module: str, pool: str) -> tuple[str, dict[str, Any]]:
    """The pool class, by its import path, and its options."""
    if pool == BLOCKING:
        return f"{module}.BlockingConnectionPool", {"max_connections": 8, "timeout": PATIENCE}
    if pool == NARROW:
        name = f"{module}.asyncio.BlockingConnectionPool"
        return name, {"max_connections": 32, "timeout": PATIENCE}
    if pool == WIDE:
        return f"{module}.asyncio.ConnectionPool", {"max_connections": 256}
    return f"{module}.ConnectionPool", {"max_connections": 64}


def _pool(module: str, pool: str, url: str) -> Any:
    path, options = _options(module, pool)
    package, _, name = path.rpartition(".")
    return getattr(import_module(package), name).from_url(url, **options)


def _no_retry(module: str, asyncio: bool = False) -> Any:
    retry = import_module(f"{module}.asyncio.retry" if asyncio else f"{module}.retry")
    return retry.Retry(import_module(f"{module}.backoff").NoBackoff(), 0)


@contextmanager
def _redis(url: str, pool: str) -> Iterator[Any]:
    module = import_module("redis")
    connections = _pool("redis", pool, url)
    client = module.Redis(connection_pool=connections, retry=_no_retry("redis"))
    try:
        yield client
    finally:
        client.close()
        connections.disconnect()


_STRATEGIES = {
    "fixed": "FixedWindowRateLimiter",
    "moving": "MovingWindowRateLimiter",
    "sliding": "SlidingWindowCounterRateLimiter",
}


def _limits_item(quota: Quota) -> Any:
    return import_module("limits").RateLimitItemPerSecond(quota.amount, quota.seconds)


@contextmanager
def _limits(url: str, quota: Quota, kind: str, client: str, pool: str) -> Iterator[Acquire]:
    module = client.removesuffix("-py")
    connections = _pool(module, pool, url)
    storage = import_module("limits.storage").RedisStorage(
        url.replace("redis://", f"{module}://"),
        connection_pool=connections,
        key_prefix=f"limits:{kind}:{client}",
        retry=_no_retry(module),
    )
    strategy = getattr(import_module("limits.strategies"), _STRATEGIES[kind])(storage)
    try:
        yield partial(strategy.hit, _limits_item(quota))
    finally:
        connections.disconnect()


def _throttled_quota(quota: Quota) -> Any:
    limiter = import_module("throttled.rate_limiter")
    return limiter.per_duration(timedelta(seconds=quota.seconds), quota.amount, quota.amount)


def _throttled_store(package: str, url: str, pool: str) -> Any:
    path, options = _options("redis", pool)
    # Pools are otherwise shared by everybody in the process.
    settings: dict[str, Any] = {"CONNECTION_POOL_CLASS": path, "CONNECTION_POOL_KWARGS": options}
    asyncio = package.endswith("asyncio")
    settings |= {
        "REUSE_CONNECTION": False,
        "REDIS_CLIENT_KWARGS": {"retry": _no_retry("redis", asyncio)},
    }
    return import_module(f"{package}.store").RedisStore(server=url, options=settings)


@contextmanager
def _throttled(url: str, quota: Quota, kind: str, pool: str) -> Iterator[Acquire]:
    package = import_module("throttled")
    store = _throttled_store("throttled", url, pool)
    throttle = package.Throttled(using=kind, quota=_throttled_quota(quota), store=store)
    limit = throttle.limit
    try:
        yield lambda key: not limit(key).limited
    finally:
        store._backend.get_client().connection_pool.disconnect()


def _pyrate_limiter(quota: Quota, make: Callable[[str, list[Any]], Any]) -> Any:
    """A Limiter with a bucket per key, made by `make`, and nothing in the background."""
    package = import_module("pyrate_limiter")
    rates = [package.Rate(quota.amount, quota.seconds * 1000)]
    buckets: dict[str, Any] = {}

    class PerKey(package.BucketFactory):  # type: ignore[misc, name-defined]
        def wrap_item(self, name: str, weight: int = 1) -> Any:
            return package.RateItem(name, time.time_ns() // 1_000_000, weight)

        def get(self, item: Any) -> Any:
            bucket = buckets.get(item.name)
            if bucket is None:
                bucket = buckets[item.name] = make(item.name, rates)
            return bucket

    return package.Limiter(PerKey())


def _pyrate_bucket(kind: str, client: Any, sha: str) -> Callable[[str, list[Any]], Any]:
    package = import_module("pyrate_limiter")
    if kind == "log":
        return lambda name, rates: package.RedisBucket(rates, client, f"pyrate:log:{name}", sha)
    return lambda name, rates: package.StateBucket(
        rates, package.GCRA(), package.RedisStateStore(client, f"pyrate:gcra:{name}")
    )


def _pyrate_script() -> str:
    script: str = import_module("pyrate_limiter.buckets.redis_bucket").LuaScript.PUT_ITEM
    return script


@contextmanager
def _pyrate(url: str, quota: Quota, kind: str, pool: str) -> Iterator[Acquire]:
    with _redis(url, pool) as client:
        sha = client.script_load(_pyrate_script())
        limiter = _pyrate_limiter(quota, _pyrate_bucket(kind, client, sha))
        try_acquire = limiter.try_acquire
        # Its lock is for all keys, and a busy lock is a refusal: the calls that count are the
        # ones with the right verdict.
        yield lambda key: try_acquire(key, blocking=False)


# -- over Redis, asyncio --------------------------------------------------------------------------


def async_peers() -> list[AsyncPeer]:
    """Every algorithm of every peer, with each client it can use and each kind of pool."""
    found: list[AsyncPeer] = []
    for pool in ASYNC_POOLS:
        for kind in LIMITS:
            for bridge in ("redispy", "coredis", "valkey"):
                name = f"limits {kind} ({bridge}, {pool})"
                opener = partial(_limits_async, kind=kind, bridge=bridge, pool=pool)
                found.append(AsyncPeer(name, "limits", opener))
        for kind in THROTTLED:
            opener = partial(_throttled_async, kind=kind, pool=pool)
            found.append(AsyncPeer(f"throttled-py {kind} ({pool})", "throttled-py", opener))
        for kind in ("log", "gcra"):
            opener = partial(_pyrate_async, kind=kind, pool=pool)
            found.append(AsyncPeer(f"pyrate-limiter {kind} ({pool})", "pyrate-limiter", opener))
    return found


@asynccontextmanager
async def _limits_async(
    url: str, quota: Quota, kind: str, bridge: str, pool: str
) -> AsyncIterator[AsyncAcquire]:
    if bridge == "coredis":
        coredis = import_module("coredis")
        make = coredis.ConnectionPool if pool == WIDE else coredis.BlockingConnectionPool
        connections = make.from_url(url, max_connections=256 if pool == WIDE else 32)
        options: dict[str, Any] = {"implementation": "coredis"}
    else:
        module = "valkey" if bridge == "valkey" else "redis"
        connections = _pool(module, pool, url.replace("redis://", f"{module}://"))
        options = {"implementation": bridge, "retry": _no_retry(module, asyncio=True)}
    storage = import_module("limits.aio.storage").RedisStorage(
        f"async+{url}",
        connection_pool=connections,
        key_prefix=f"limits:{kind}:{bridge}:{pool}",
        **options,
    )
    strategy = getattr(import_module("limits.aio.strategies"), _STRATEGIES[kind])(storage)
    try:
        yield partial(strategy.hit, _limits_item(quota))
    finally:
        closed = connections.disconnect()
        if closed is not None:
            await closed


@asynccontextmanager
async def _throttled_async(
    url: str, quota: Quota, kind: str, pool: str
) -> AsyncIterator[AsyncAcquire]:
    package = import_module("throttled.asyncio")
    store = _throttled_store("throttled.asyncio", url, pool)
    throttle = package.Throttled(using=kind, quota=_throttled_quota(quota), store=store)

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
    connections = _pool("redis", pool, url)
    client = import_module("redis.asyncio").Redis(
        connection_pool=connections, retry=_no_retry("redis", asyncio=True)
    )
    sha = await client.script_load(_pyrate_script())
    limiter = _pyrate_limiter(quota, _pyrate_bucket(kind, client, sha))
    try:
        # Not try_acquire_async: that holds one lock for all keys over the round trip.
        yield partial(limiter.try_acquire, blocking=False)
    finally:
        await connections.disconnect()


# -- in this process ------------------------------------------------------------------------------


def memory_peers() -> list[Peer]:
    """Every peer's store for one process; the url is not used."""
    found = [Peer(f"limits {k}", "limits", partial(_limits_memory, kind=k)) for k in LIMITS]
    found += [
        Peer(f"throttled-py {k}", "throttled-py", partial(_throttled_memory, kind=k))
        for k in THROTTLED
    ]
    return found + [
        Peer(f"pyrate-limiter {k}", "pyrate-limiter", partial(_pyrate_memory, kind=k))
        for k in ("log", "gcra")
    ]


@contextmanager
def _limits_memory(url: str, quota: Quota, kind: str) -> Iterator[Acquire]:
    storage = import_module("limits.storage").MemoryStorage()
    strategy = getattr(import_module("limits.strategies"), _STRATEGIES[kind])(storage)
    yield partial(strategy.hit, _limits_item(quota))


@contextmanager
def _throttled_memory(url: str, quota: Quota, kind: str) -> Iterator[Acquire]:
    package = import_module("throttled")
    store = package.MemoryStore(options={"MAX_SIZE": 20_000})
    limit = package.Throttled(using=kind, quota=_throttled_quota(quota), store=store).limit
    yield lambda key: not limit(key).limited


@contextmanager
def _pyrate_memory(url: str, quota: Quota, kind: str) -> Iterator[Acquire]:
    package = import_module("pyrate_limiter")
    if kind == "log":
        limiter = _pyrate_limiter(quota, lambda name, rates: package.InMemoryBucket(rates))
    else:
        limiter = _pyrate_limiter(
            quota, lambda name, rates: package.StateBucket(rates, package.GCRA())
        )
    try_acquire = limiter.try_acquire
    yield lambda key: try_acquire(key, blocking=False)
