"""The peers in the memory of one process."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from importlib import import_module

from benchmarks.peers import libraries
from benchmarks.peers.base import Acquire, Peer, Quota


def memory_peers() -> list[Peer]:
    """Return every peer with its store for one process; `open` ignores the URL."""
    found = [
        Peer(f"limits {k}", "limits", partial(_limits_memory, kind=k)) for k in libraries.LIMITS
    ]
    found += [
        Peer(f"throttled-py {k}", "throttled-py", partial(_throttled_memory, kind=k))
        for k in libraries.THROTTLED
    ]
    return found + [
        Peer(f"pyrate-limiter {k}", "pyrate-limiter", partial(_pyrate_memory, kind=k))
        for k in libraries.PYRATE
    ]


@contextmanager
def _limits_memory(url: str, quota: Quota, kind: str) -> Iterator[Acquire]:
    storage = import_module("limits.storage").MemoryStorage()
    strategy = getattr(import_module("limits.strategies"), libraries.LIMITS_STRATEGIES[kind])(
        storage
    )
    yield partial(strategy.hit, libraries.limits_item(quota))


@contextmanager
def _throttled_memory(url: str, quota: Quota, kind: str) -> Iterator[Acquire]:
    package = import_module("throttled")
    store = package.MemoryStore(options={"MAX_SIZE": 20_000})
    limit = package.Throttled(using=kind, quota=libraries.throttled_quota(quota), store=store).limit
    yield lambda key: not limit(key).limited


@contextmanager
def _pyrate_memory(url: str, quota: Quota, kind: str) -> Iterator[Acquire]:
    package = import_module("pyrate_limiter")
    if kind == "log":
        limiter = libraries.pyrate_limiter(quota, lambda name, rates: package.InMemoryBucket(rates))
    else:
        limiter = libraries.pyrate_limiter(
            quota, lambda name, rates: package.StateBucket(rates, package.GCRA())
        )
    try_acquire = limiter.try_acquire
    yield lambda key: try_acquire(key, blocking=False)
