"""The peers over Redis, for threads."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from importlib import import_module
from typing import Any

from benchmarks.peers import libraries
from benchmarks.peers.base import Acquire, Peer, Quota


def blocking_peers(
    pools: Sequence[str] = libraries.POOLS, clients: Sequence[str] = ("redis-py", "valkey-py")
) -> list[Peer]:
    """Return every algorithm of every peer, with each client and each kind of pool it can use."""
    found: list[Peer] = []
    for pool in pools:
        suffix = f", {pool}" if len(pools) > 1 else ""
        per_thread = pool == libraries.PER_THREAD
        for kind in libraries.LIMITS:
            for client in clients:
                opener = partial(_limits, kind=kind, client=client, pool=pool)
                found.append(
                    Peer(f"limits {kind} ({client}){suffix}", "limits", opener, per_thread)
                )
        for kind in libraries.THROTTLED:
            opener = partial(_throttled, kind=kind, pool=pool)
            found.append(Peer(f"throttled-py {kind}{suffix}", "throttled-py", opener, per_thread))
        for kind in libraries.PYRATE:
            opener = partial(_pyrate, kind=kind, pool=pool)
            found.append(
                Peer(f"pyrate-limiter {kind}{suffix}", "pyrate-limiter", opener, per_thread)
            )
    return found


@contextmanager
def _redis(url: str, pool: str) -> Iterator[Any]:
    module = import_module("redis")
    connections = libraries.make_pool("redis", pool, url)
    client = module.Redis(connection_pool=connections, retry=libraries.no_retry("redis"))
    try:
        yield client
    finally:
        client.close()
        connections.disconnect()


@contextmanager
def _limits(url: str, quota: Quota, kind: str, client: str, pool: str) -> Iterator[Acquire]:
    module = client.removesuffix("-py")
    connections = libraries.make_pool(module, pool, url)
    storage = import_module("limits.storage").RedisStorage(
        url.replace("redis://", f"{module}://"),
        connection_pool=connections,
        key_prefix=f"limits:{kind}:{client}",
        retry=libraries.no_retry(module),
    )
    strategy = getattr(import_module("limits.strategies"), libraries.LIMITS_STRATEGIES[kind])(
        storage
    )
    try:
        yield partial(strategy.hit, libraries.limits_item(quota))
    finally:
        connections.disconnect()


@contextmanager
def _throttled(url: str, quota: Quota, kind: str, pool: str) -> Iterator[Acquire]:
    package = import_module("throttled")
    store = libraries.throttled_store("throttled", url, pool)
    throttle = package.Throttled(using=kind, quota=libraries.throttled_quota(quota), store=store)
    limit = throttle.limit
    try:
        yield lambda key: not limit(key).limited
    finally:
        store._backend.get_client().connection_pool.disconnect()


@contextmanager
def _pyrate(url: str, quota: Quota, kind: str, pool: str) -> Iterator[Acquire]:
    with _redis(url, pool) as client:
        sha = client.script_load(libraries.pyrate_script())
        limiter = libraries.pyrate_limiter(quota, libraries.pyrate_bucket(kind, client, sha))
        try_acquire = limiter.try_acquire
        # Its lock is for all keys, and a busy lock is a refusal. Calls with a wrong decision are
        # not counted.
        yield lambda key: try_acquire(key, blocking=False)
