"""Wiring: from what the caller names (a URL, a client, a store) to a store. Nothing is global but
the list of who has to be told of a fork.
"""

from __future__ import annotations

import os
import re
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, TypeVar, get_args

import redis
import redis.asyncio

from .consistency.base import Direct, Inside, Near
from .consistency.eventual import Eventual
from .consistency.leased import Leased
from .core.clock import SYSTEM, Clock
from .core.decision import Decision
from .core.errors import ConfigurationError
from .operations.command_cache import Book
from .protocol.commands import Acquire
from .store.base import AsyncStore, Store
from .store.memory import AsyncMemoryStore, MemoryStore
from .store.redis import urls as address
from .store.redis.asyncio.store import AsyncRedisStore
from .store.redis.blocking.store import RedisStore
from .store.redis.handshake import failure
from .store.redis.topology import ClusterPlace, OnePlace, Place, Terms

T = TypeVar("T")

ClockChoice = Literal["server", "client"]
Consistency = Literal["direct", "leased", "eventual"]


@dataclass(frozen=True)
class Mode:
    """How much is decided in this process; checked. Intervals are seconds."""

    consistency: Consistency
    clock: ClockChoice
    sync_interval: float
    share: float | None
    flush_interval: float
    max_local_keys: int
    timeout: float

    def __post_init__(self) -> None:
        if self.consistency not in get_args(Consistency):
            raise ConfigurationError(
                f"consistency={self.consistency!r} is none of direct, leased, eventual"
            )
        if self.consistency == "leased" and self.clock == "client":
            raise ConfigurationError(
                'consistency="leased" needs clock="server": a lease ends with its bucket, and the '
                "clocks of clients do not agree when that is"
            )
        for name in ("sync_interval", "flush_interval"):
            if not _is_number(getattr(self, name)) or getattr(self, name) <= 0:
                raise ConfigurationError(
                    f"{name}={getattr(self, name)!r} is not a number of seconds above 0"
                )
        if self.share is not None:
            if not _is_number(self.share) or not 0 < self.share <= 1:
                raise ConfigurationError(
                    f"share={self.share!r} is not a part of the limit, above 0 and at most 1"
                )
            if self.consistency != "eventual":
                raise ConfigurationError(
                    f'share={self.share!r} means nothing with consistency="{self.consistency}": '
                    'it caps what one process admits with "eventual"'
                )
        most = self.max_local_keys
        if isinstance(most, bool) or not isinstance(most, int) or most < 1:
            raise ConfigurationError(f"max_local_keys={most!r} is not a whole number of at least 1")

    @property
    def direct(self) -> bool:
        """Is each call one question to the store?"""
        return self.consistency == "direct"


def open_near(
    mode: Mode,
    book: Book,
    store: Store | AsyncStore,
    attempt: Callable[[Acquire], Decision] | None,
) -> Near:
    """What decides in this process, before `store` is asked. For a store in this process, that is
    the store, by `attempt`: every mode is exact there.
    """
    near: Near
    clock, most = store.clock, mode.max_local_keys
    if store.source == "local" and attempt is not None:
        near = Inside(book, attempt)
    elif mode.consistency == "leased":
        near = Leased(book, clock, most, mode.flush_interval, mode.timeout)
    elif mode.consistency == "eventual":
        near = Eventual(book, clock, most, mode.sync_interval, mode.share or 1.0)
    else:
        near = Direct(book, clock, most, mode.flush_interval)
    return survive_fork(near)


def inside(store: AsyncStore) -> Callable[[Acquire], Decision] | None:
    """The way to ask an awaiting store that is in this process without awaiting."""
    return store.decide if isinstance(store, AsyncMemoryStore) else None


def _is_number(value: object) -> bool:
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    return number and -1e308 < value < 1e308  # type: ignore[operator]


def open_store(
    store: Any,
    *,
    timeout: float = 0.25,
    clock: ClockChoice = "server",
    name: str | None = None,
    time: Clock = SYSTEM,
) -> Store:
    """The store that `store` names, for blocking callers.

    A URL, a `redis.Redis` or `redis.RedisCluster` client (it stays the caller's: its settings are
    used, its connections and retries are not), or a store object. Nothing is connected to yet.
    Raises `ConfigurationError` for anything else.
    """
    terms = _terms(timeout, clock, name, time)
    if isinstance(store, str):
        if _is_memory(store):
            return survive_fork(MemoryStore(time))
        store = address.read(store)
    elif isinstance(store, (redis.asyncio.Redis, redis.asyncio.RedisCluster)):
        raise ConfigurationError("this is an asyncio client; use AsyncLimiter with it")
    elif hasattr(store, "attempt") and hasattr(store, "close"):
        own: Store = store
        return own
    elif not isinstance(store, (redis.Redis, redis.RedisCluster)):
        raise ConfigurationError(_no_store(store, "redis-py"))
    return survive_fork(RedisStore(partial(_place, store, terms), terms))


def open_async_store(
    store: Any,
    *,
    timeout: float = 0.25,
    clock: ClockChoice = "server",
    name: str | None = None,
    time: Clock = SYSTEM,
) -> AsyncStore:
    """The store that `store` names, for tasks. See `open_store`."""
    terms = _terms(timeout, clock, name, time)
    if isinstance(store, str):
        if _is_memory(store):
            return AsyncMemoryStore(survive_fork(MemoryStore(time)))
        client = partial(_async_client, address.read(store), timeout)
        return survive_fork(AsyncRedisStore(client, terms, address.aclose))
    if isinstance(store, (redis.asyncio.Redis, redis.asyncio.RedisCluster)):
        return survive_fork(AsyncRedisStore(partial(_same, store), terms))
    if isinstance(store, (redis.Redis, redis.RedisCluster)):
        raise ConfigurationError("this is a blocking client; use Limiter with it")
    if isinstance(store, MemoryStore):
        return AsyncMemoryStore(store)
    if hasattr(store, "attempt") and hasattr(store, "aclose"):
        own: AsyncStore = store
        return own
    raise ConfigurationError(_no_store(store, "redis.asyncio"))


def store_name(store: Any) -> str:
    """What log lines call the store that a caller named; without passwords."""
    if isinstance(store, str):
        return address.shown(store)
    if isinstance(store, (redis.Redis, redis.asyncio.Redis)):
        where = store.connection_pool.connection_kwargs
        if "host" in where:
            return f"{type(store).__name__} client of {where['host']}:{where.get('port', 6379)}"
    return f"{type(store).__name__} client"


def admin_client(url: str, timeout: float = 5.0) -> Any:
    """A redis-py client for looking around (SCAN, INFO) at the store of `url`."""
    if _is_memory(url):
        raise ConfigurationError("memory:// lives inside one process; name the URL of a Redis")
    return _client(address.read(url), timeout)


def _place(store: Any, terms: Terms) -> Place:
    ours = isinstance(store, address.Address)
    client = _client(store, terms.timeout) if ours else store
    place: ClusterPlace | OnePlace
    if isinstance(client, redis.RedisCluster):
        place = ClusterPlace(client, terms)
    else:
        place = OnePlace(client.connection_pool, terms)
    if ours:
        place.release = partial(address.close, client)
    return place


def _client(where: address.Address, timeout: float) -> Any:
    try:
        return address.client(where, timeout)
    except Exception as exc:  # a cluster's errors are not redis.RedisError
        raise failure(exc, address.shown(where.url)) from exc


def _async_client(where: address.Address, timeout: float) -> Any:
    try:
        return address.async_client(where, timeout)
    except Exception as exc:
        raise failure(exc, address.shown(where.url)) from exc


def _same(client: T) -> T:
    return client


def _no_store(store: object, kind: str) -> str:
    """Names the type only: what it holds may be a URL with a password."""
    return f"{type(store).__name__} is no store: give a URL as a str, or a {kind} client"


def _is_memory(url: str) -> bool:
    if url == "memory://":
        return True
    if url.startswith("memory:"):
        shown = address.shown(url)
        raise ConfigurationError(f'store URL {shown!r}: write "memory://" and nothing behind it')
    return False


def _terms(timeout: float, clock: str, name: str | None, time: Clock) -> Terms:
    if not _is_number(timeout) or timeout <= 0:
        raise ConfigurationError(f"timeout={timeout!r} is not a number of seconds above 0")
    if clock not in ("server", "client"):
        raise ConfigurationError(
            f'clock={address.shown(str(clock))!r} is neither "server" nor "client"'
        )
    if name is not None and (not isinstance(name, str) or not re.fullmatch(r"[!-~]+", name)):
        raise ConfigurationError(f"name={name!r} is not a word of printable ASCII")
    return Terms(time, float(timeout), clock == "client", name)


_survivors: weakref.WeakSet[Any] | None = None


def survive_fork(thing: T) -> T:
    """Have `thing.after_fork()` called in forked children, for as long as `thing` lives."""
    global _survivors
    if _survivors is None:
        _survivors = weakref.WeakSet()
        if hasattr(os, "register_at_fork"):
            os.register_at_fork(after_in_child=_after_fork)
    _survivors.add(thing)
    return thing


def _after_fork() -> None:
    for thing in list(_survivors or ()):
        thing.after_fork()
