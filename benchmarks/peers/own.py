"""distwindow's limiters behind the common interface."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from functools import partial
from importlib import import_module

from benchmarks.peers.base import (
    DISTWINDOW,
    LEASED,
    TIMEOUT_S,
    Acquire,
    AsyncAcquire,
    AsyncPeer,
    Peer,
    Quota,
)


def limiters() -> list[Peer]:
    """Return distwindow with its defaults."""
    return [Peer(DISTWINDOW, DISTWINDOW, _limiter)]


def leased_limiters() -> list[Peer]:
    """Return distwindow in leased mode."""
    return [Peer(LEASED, DISTWINDOW, partial(_limiter, consistency="leased"))]


def more_limiters() -> list[Peer]:
    """Return distwindow with the bound `strict`, and on a client that the caller owns."""
    return [
        Peer(f"{DISTWINDOW}, strict", DISTWINDOW, partial(_limiter, bound="strict")),
        Peer(f"{DISTWINDOW} on a redis.Redis", DISTWINDOW, _limiter_on_client),
    ]


@contextmanager
def _limiter(
    url: str, quota: Quota, bound: str = "leap", consistency: str = "direct"
) -> Iterator[Acquire]:
    limiter = import_module("distwindow").Limiter(
        url,
        quota.limit(bound),
        timeout=TIMEOUT_S,
        consistency=consistency,
        prefix=f"distwindow-{consistency}",
    )
    with limiter:
        yield limiter.try_acquire


@contextmanager
def _limiter_on_client(url: str, quota: Quota) -> Iterator[Acquire]:
    with import_module("redis").Redis.from_url(url) as client:
        limiter = import_module("distwindow").Limiter(client, quota.limit(), timeout=TIMEOUT_S)
        with limiter:
            yield limiter.try_acquire


def async_limiters() -> list[AsyncPeer]:
    return [AsyncPeer(DISTWINDOW, DISTWINDOW, _async_limiter)]


def async_leased_limiters() -> list[AsyncPeer]:
    """Return distwindow in leased mode."""
    return [AsyncPeer(LEASED, DISTWINDOW, partial(_async_limiter, consistency="leased"))]


@asynccontextmanager
async def _async_limiter(
    url: str, quota: Quota, consistency: str = "direct"
) -> AsyncIterator[AsyncAcquire]:
    limiter = import_module("distwindow").AsyncLimiter(
        url,
        quota.limit(),
        timeout=TIMEOUT_S,
        consistency=consistency,
        prefix=f"distwindow-{consistency}",
    )
    async with limiter:
        yield limiter.try_acquire
