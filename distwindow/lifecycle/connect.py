"""From the arguments of a limiter to its parts: the store of a URL or client, and the strategy."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

import redis
import redis.asyncio

from ..errors import ConfigurationError, StoreError
from ..local.base import LocalStrategy
from ..local.direct import Direct
from ..local.eventual import Eventual
from ..local.in_process import InProcess
from ..local.leased import Leased
from ..minute.operations import EntryViews
from ..ring.clock import SYSTEM
from ..ring.command import load_scripts
from ..ring.store import AsyncStore, Store
from ..runtime.command_cache import CommandCache
from ..runtime.options import Options
from ..stores.memory import AsyncMemoryStore, MemoryStore
from ..stores.redis import urls
from ..stores.redis.asyncio import AsyncRedisStore
from ..stores.redis.blocking import RedisStore
from ..stores.redis.handshake import connect_failure, may_be_wrong_server
from ..stores.redis.slot_map import map_of_client, map_of_url
from ..stores.redis.topology import CallSettings, ClusterTopology, SingleServer, Topology
from ..stores.redis.wrong_server import WrongServerCheck
from ..support.fork import register_after_fork

T = TypeVar("T")

_BLOCKING_CLIENTS = (redis.Redis, redis.RedisCluster)
_ASYNC_CLIENTS = (redis.asyncio.Redis, redis.asyncio.RedisCluster)
StrategyWithViews = LocalStrategy[Any] | InProcess
"""The strategies that send what entries count for minute views, too: all there are."""


def make_strategy(
    options: Options,
    commands: CommandCache,
    store: Store | AsyncStore,
) -> StrategyWithViews:
    """Return the strategy of `consistency=`. For a store in this process, each call is decided
    at once, which is exact with every `consistency`. Limits that are paced or warm up are decided
    by the store with every `consistency`, because each call moves what the next one depends on.
    """
    if store.decided_by == "local" and isinstance(store, (MemoryStore, AsyncMemoryStore)):
        return InProcess(commands, store.decide_at_once, store.clock, options)
    if commands.command_type.has_own_moment or options.consistency == "direct":
        return Direct(commands, store.clock, options)
    if options.consistency == "leased":
        return Leased(commands, store.clock, options)
    return Eventual(commands, store.clock, options)


def make_views(
    strategy: StrategyWithViews, options: Options, store: Store | AsyncStore
) -> EntryViews | None:
    """Return what counts entries for minute views; None for a store with `keeps_views = False`."""
    keeps_views = getattr(store, "keeps_views", True)
    return strategy.add_views(options) if keeps_views else None


def open_store(store: Any, options: Options) -> Store:
    """Return the blocking store of a URL, of a `redis.Redis` or `redis.RedisCluster` client, or a
    store object itself.

    A client stays the caller's: its settings are used, its connections and retries are not. Nothing
    is connected to yet. Raises `ConfigurationError` for anything else.
    """
    if isinstance(store, _ASYNC_CLIENTS):
        raise ConfigurationError(
            "this is an asyncio client, and here calls block: give a redis.Redis or the URL, or "
            "use AsyncLimiter with it"
        )
    if isinstance(store, str) and _is_memory_url(store):
        return register_after_fork(MemoryStore(options.time))
    if hasattr(store, "decide") and hasattr(store, "close"):
        store_object: Store = store
        return store_object
    return register_after_fork(RedisStore(*_redis_parts(store, options)))


def open_async_store(store: Any, options: Options) -> AsyncStore:
    """Return the asyncio store of a URL, a client or a store object. See `open_store`."""
    if isinstance(store, _BLOCKING_CLIENTS):
        raise ConfigurationError(
            "this is a blocking client, and here calls are awaited: give a redis.asyncio.Redis or "
            "the URL, or use Limiter with it"
        )
    if isinstance(store, str) and _is_memory_url(store):
        store = register_after_fork(MemoryStore(options.time))
    if isinstance(store, MemoryStore):
        return AsyncMemoryStore(store)
    if hasattr(store, "decide") and hasattr(store, "aclose"):
        store_object: AsyncStore = store
        return store_object
    return register_after_fork(AsyncRedisStore(*_redis_parts(store, options, is_async=True)))


def _redis_parts(
    store: Any, options: Options, *, is_async: bool = False
) -> tuple[Callable[[], Topology], CallSettings]:
    """Return what makes the topology of a URL or of a client, and the settings of calls."""
    settings = CallSettings(
        options.time, float(options.timeout), options.clock == "client", options.name,
        secrets=urls.secrets_of(store),
    )  # fmt: skip
    if isinstance(store, str):
        store = urls.parse_url_text(store)
        if store.kind == "cluster":  # other connections know where they go
            settings = replace(settings, endpoints=tuple(urls.endpoints_in(store)))
    elif not isinstance(store, _ASYNC_CLIENTS if is_async else _BLOCKING_CLIENTS):
        kind = "redis.asyncio" if is_async else "redis-py"
        raise ConfigurationError(  # it shows the type alone: a URL may hold a password
            f"{type(store).__name__} is no store: give a URL as a str, or a {kind} client"
        )
    load_scripts()
    return _topology_maker(store, settings, is_async=is_async), settings


def is_opened(store: Any, given: Any) -> bool:
    """True if `open_store` or `open_async_store` has opened `store`, and it is not what the caller
    has `given` and goes on to use: a store object, or one of memory that a task's is made of.
    """
    return store is not given and not isinstance(given, MemoryStore)


class SharedStore:
    """The store of several limiters, as each of them sees it: a `Store` or an `AsyncStore`, which
    `close` leaves open.

    They own it (`_open_store`), so that closing one ends all that it does in the background;
    but it stays open until who has opened it closes it, because the others still flush.
    """

    def __init__(self, store: Any, name: str) -> None:
        self._store = store
        self.shown_name = name
        """The name of the store for log lines, without passwords."""
        # Attributes of the object, and not methods: a call costs nothing more.
        self.decided_by, self.clock = store.decided_by, store.clock
        self.decide, self.execute = store.decide, store.execute
        self.execute_many = store.execute_many
        if hasattr(store, "outages"):
            self.outages = store.outages
        if hasattr(store, "drain"):
            self.drain, self.sleep = store.drain, store.sleep

    @property
    def unknown_total(self) -> int:
        total: int = self._store.unknown_total
        return total

    def close(self) -> None:
        """Leave the store open."""

    async def aclose(self) -> None:
        """Leave the store open."""


def share_store(store: Any, name: str, *, owned: bool) -> Any:
    """Return what limiters are made with: a store in this process, or the caller's, as it is."""
    return SharedStore(store, name) if owned and store.decided_by != "local" else store


def store_name(store: Any) -> str:
    """Return the name of a store for log lines, without passwords."""
    if isinstance(store, str):
        return urls.masked_url(store)
    if isinstance(shown_name := getattr(store, "shown_name", None), str):
        return shown_name
    if isinstance(store, (redis.Redis, redis.asyncio.Redis)):
        url = store.connection_pool.connection_kwargs
        if "host" in url:
            return f"{type(store).__name__} client of {url['host']}:{url.get('port', 6379)}"
        if "path" in url:
            return f"{type(store).__name__} client of {url['path']}"
    kind = "object" if hasattr(store, "decide") else "client"
    return f"{type(store).__name__} {kind}"


def check_url(url: str) -> None:
    """Raise `ConfigurationError` for what is not the URL of a store. Connects to nothing."""
    if not _is_memory_url(url):
        urls.parse_url_text(url)


def admin_client(url: str, timeout: float = 5.0) -> Any:
    """Return a redis-py client for commands of administration (SCAN, INFO) at `url`."""
    if _is_memory_url(url):
        raise ConfigurationError("memory:// lives inside one process; name the URL of a Redis")
    address = urls.parse_url_text(url)
    make = urls.make_cluster_client if address.kind == "cluster" else urls.make_client
    try:
        return _made(address, partial(make, address, timeout))
    except (StoreError, ConfigurationError) as exc:  # of a cluster: its map was asked for
        if may_be_wrong_server(exc, exc) and (error := wrong_server_at(url, timeout)):
            raise error from exc
        raise


def wrong_server_at(url: str, timeout: float = 5.0) -> ConfigurationError | None:
    """Return the mistake, if other servers answer at the addresses of `url`, or with TLS where it
    has none, or without.
    """
    endpoints = [] if _is_memory_url(url) else urls.endpoints_in(urls.parse_url_text(url))
    return WrongServerCheck(SYSTEM).find(endpoints, timeout)


def _topology_maker(
    store: Any, settings: CallSettings, *, is_async: bool
) -> Callable[[], Topology]:
    """Return a function that makes the topology of a parsed URL or of a client."""
    if isinstance(store, (redis.RedisCluster, redis.asyncio.RedisCluster)):
        return partial(ClusterTopology, map_of_client(store), settings)
    if not isinstance(store, urls.StoreUrl):
        return partial(SingleServer, store.connection_pool, settings)

    def make() -> Topology:
        if store.kind == "cluster":
            return ClusterTopology(map_of_url(store, is_async=is_async), settings)
        client = urls.make_client(store, settings.timeout, is_async=is_async)
        topology = SingleServer(client.connection_pool, settings)
        close = urls.aclose_client if is_async else urls.close_client
        topology.close_client = partial(close, client)
        return topology

    return partial(_made, store, make)


def _made(url: urls.StoreUrl, make: Callable[[], T]) -> T:
    try:
        return make()
    except ConfigurationError:
        raise
    except Exception as exc:  # a cluster's errors are not redis.RedisError
        raise connect_failure(exc, urls.masked_url(url.url), urls.secrets_of(url.url)) from exc


def _is_memory_url(url: str) -> bool:
    if url == "memory://":
        return True
    if url.startswith("memory:"):
        shown = urls.masked_url(url)
        raise ConfigurationError(f'store URL {shown!r}: write "memory://" and nothing behind it')
    return False
