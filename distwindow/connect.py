"""From the arguments of a limiter to its parts: a URL, client or store object to a store, and the
options to a strategy.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, Protocol, TypeVar, get_args

import redis
import redis.asyncio

from ._fork import register_after_fork
from .errors import ConfigurationError
from .local.base import InProcess
from .local.direct import Direct
from .local.eventual import Eventual
from .local.leased import Leased
from .minute.operations import EntryViews
from .ring.clock import SYSTEM, Clock
from .ring.commands import Acquire
from .ring.decision import Decision
from .ring.scripts import load_scripts
from .ring.store import AsyncStore, Store
from .runtime.command_cache import CommandCache
from .runtime.strategy import Strategy
from .stores.memory import AsyncMemoryStore, MemoryStore
from .stores.redis import urls
from .stores.redis.asyncio import AsyncRedisStore
from .stores.redis.blocking import RedisStore
from .stores.redis.handshake import connect_failure
from .stores.redis.topology import CallSettings, ClusterTopology, SingleServer, Topology

T = TypeVar("T")

ClockChoice = Literal["server", "client"]
Consistency = Literal["direct", "leased", "eventual"]


@dataclass(frozen=True)
class LimiterOptions:
    """The arguments that choose and set up the strategy, checked. Intervals are seconds."""

    consistency: Consistency
    clock: ClockChoice
    sync_interval: float
    share: float | None
    flush_interval: float
    max_local_keys: int
    timeout: float
    max_wait: float = 0.5
    borrow_share: float = 0.5

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
        check_sync(self.consistency, self.sync_interval, self.share)
        if not _is_number(self.flush_interval) or self.flush_interval <= 0:
            raise ConfigurationError(
                f"flush_interval={self.flush_interval!r} is not a number of seconds above 0"
            )
        if not _is_number(self.max_wait) or self.max_wait < 0:
            raise ConfigurationError(
                f"max_wait={self.max_wait!r} is not a number of seconds of at least 0"
            )
        if not _is_number(self.borrow_share) or not 0 <= self.borrow_share <= 1:
            raise ConfigurationError(
                f"borrow_share={self.borrow_share!r} is not a part of the limit, from 0 to 1"
            )
        max_keys = self.max_local_keys
        if isinstance(max_keys, bool) or not isinstance(max_keys, int) or max_keys < 1:
            raise ConfigurationError(
                f"max_local_keys={max_keys!r} is not a whole number of at least 1"
            )


def check_sync(consistency: Consistency, sync_interval: float, share: float | None) -> None:
    """Raise `ConfigurationError` for arguments of `consistency="eventual"` that cannot work."""
    if not _is_number(sync_interval) or sync_interval <= 0:
        raise ConfigurationError(
            f"sync_interval={sync_interval!r} is not a number of seconds above 0"
        )
    if share is not None:
        if not _is_number(share) or not 0 < share <= 1:
            raise ConfigurationError(
                f"share={share!r} is not a part of the limit, above 0 and at most 1"
            )
        if consistency != "eventual":
            raise ConfigurationError(
                f'share={share!r} means nothing with consistency="{consistency}": '
                'it caps what one process admits with "eventual"'
            )


class StrategyWithViews(Strategy, Protocol):
    """A strategy that also sends what entries count for minute views."""

    def add_views(self, prefix: str, max_origins: int) -> EntryViews:
        """Return where entries count. `max_origins` is how many origins of one key get a view."""


def make_strategy(
    options: LimiterOptions,
    commands: CommandCache,
    store: Store | AsyncStore,
    decide: Callable[[Acquire], Decision] | None,
) -> StrategyWithViews:
    """Return the strategy of `consistency=`. For a store in this process, each call is decided by
    `decide`, which is exact with every `consistency`. Limits that are paced or warm up are decided
    by the store with every `consistency`, because each call moves what the next one depends on.
    """
    strategy: StrategyWithViews
    clock, max_keys = store.clock, options.max_local_keys
    if store.decided_by == "local" and decide is not None:
        strategy = InProcess(commands, decide, clock, max_keys, options.flush_interval)
    elif commands.command_type.has_own_moment:
        strategy = Direct(commands, clock, max_keys, options.flush_interval)
    elif options.consistency == "leased":
        strategy = Leased(commands, clock, max_keys, options.flush_interval, options.timeout)
    elif options.consistency == "eventual":
        strategy = Eventual(commands, clock, max_keys, options.sync_interval, options.share or 1.0)
    else:
        strategy = Direct(commands, clock, max_keys, options.flush_interval)
    return register_after_fork(strategy)


def make_views(
    strategy: StrategyWithViews, prefix: str, max_origins: int, store: Store | AsyncStore
) -> EntryViews | None:
    """Return where entries are counted for minute views; None if `store` says that it keeps none,
    by `keeps_views = False`.
    """
    keeps_views = getattr(store, "keeps_views", True)
    return strategy.add_views(prefix, max_origins) if keeps_views else None


def in_process_attempt(store: AsyncStore) -> Callable[[Acquire], Decision] | None:
    """Return the blocking `decide` of an asyncio store that is in this process; else None."""
    return store.decide_at_once if isinstance(store, AsyncMemoryStore) else None


def _is_number(value: object) -> bool:
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    return number and -1e308 < value < 1e308  # type: ignore[operator]  # only numbers get here


def open_store(
    store: Any,
    *,
    timeout: float = 0.25,
    clock: ClockChoice = "server",
    name: str | None = None,
    time: Clock = SYSTEM,
) -> Store:
    """Return the blocking store of a URL, of a `redis.Redis` or `redis.RedisCluster` client, or a
    store object itself.

    A client stays the caller's: its settings are used, its connections and retries are not. Nothing
    is connected to yet. Raises `ConfigurationError` for anything else.
    """
    settings = _call_settings(timeout, clock, name, time)
    if isinstance(store, str):
        if _is_memory_url(store):
            return register_after_fork(MemoryStore(time))
        store = urls.parse_url_text(store)
    elif isinstance(store, (redis.asyncio.Redis, redis.asyncio.RedisCluster)):
        raise ConfigurationError("this is an asyncio client; use AsyncLimiter with it")
    elif hasattr(store, "decide") and hasattr(store, "close"):
        store_object: Store = store
        return store_object
    elif not isinstance(store, (redis.Redis, redis.RedisCluster)):
        raise ConfigurationError(_not_a_store_message(store, "redis-py"))
    load_scripts()
    return register_after_fork(RedisStore(partial(_make_topology, store, settings), settings))


def open_async_store(
    store: Any,
    *,
    timeout: float = 0.25,
    clock: ClockChoice = "server",
    name: str | None = None,
    time: Clock = SYSTEM,
) -> AsyncStore:
    """Return the asyncio store of a URL, a client or a store object. See `open_store`."""
    settings = _call_settings(timeout, clock, name, time)
    if isinstance(store, str):
        if _is_memory_url(store):
            return AsyncMemoryStore(register_after_fork(MemoryStore(time)))
        client = partial(_async_client, urls.parse_url_text(store), timeout)
        load_scripts()
        return register_after_fork(AsyncRedisStore(client, settings, urls.aclose_client))
    if isinstance(store, (redis.asyncio.Redis, redis.asyncio.RedisCluster)):
        load_scripts()
        return register_after_fork(AsyncRedisStore(partial(_unchanged, store), settings))
    if isinstance(store, (redis.Redis, redis.RedisCluster)):
        raise ConfigurationError("this is a blocking client; use Limiter with it")
    if isinstance(store, MemoryStore):
        return AsyncMemoryStore(store)
    if hasattr(store, "decide") and hasattr(store, "aclose"):
        store_object: AsyncStore = store
        return store_object
    raise ConfigurationError(_not_a_store_message(store, "redis.asyncio"))


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
    return _client(urls.parse_url_text(url), timeout)


def _make_topology(store: Any, settings: CallSettings) -> Topology:
    is_url = isinstance(store, urls.StoreUrl)
    client = _client(store, settings.timeout) if is_url else store
    topology: ClusterTopology | SingleServer
    if isinstance(client, redis.RedisCluster):
        topology = ClusterTopology(client, settings)
    else:
        topology = SingleServer(client.connection_pool, settings)
    if is_url:
        topology.close_client = partial(urls.close_client, client)
    return topology


def _client(url: urls.StoreUrl, timeout: float) -> Any:
    try:
        return urls.make_client(url, timeout)
    except Exception as exc:  # a cluster's errors are not redis.RedisError
        raise connect_failure(exc, urls.masked_url(url.url)) from exc


def _async_client(url: urls.StoreUrl, timeout: float) -> Any:
    try:
        return urls.make_async_client(url, timeout)
    except Exception as exc:
        raise connect_failure(exc, urls.masked_url(url.url)) from exc


def _unchanged(client: T) -> T:
    return client


def _not_a_store_message(store: object, kind: str) -> str:
    """Return the message of an error. It shows only the type of `store`, because the value may hold
    a URL with a password.
    """
    return f"{type(store).__name__} is no store: give a URL as a str, or a {kind} client"


def _is_memory_url(url: str) -> bool:
    if url == "memory://":
        return True
    if url.startswith("memory:"):
        shown = urls.masked_url(url)
        raise ConfigurationError(f'store URL {shown!r}: write "memory://" and nothing behind it')
    return False


def _call_settings(timeout: float, clock: str, name: str | None, time: Clock) -> CallSettings:
    if not _is_number(timeout) or timeout <= 0:
        raise ConfigurationError(f"timeout={timeout!r} is not a number of seconds above 0")
    if clock not in ("server", "client"):
        raise ConfigurationError(
            f'clock={urls.masked_url(str(clock))!r} is neither "server" nor "client"'
        )
    if name is not None and (not isinstance(name, str) or not re.fullmatch(r"[!-~]+", name)):
        raise ConfigurationError(f"name={name!r} is not a word of printable ASCII")
    return CallSettings(time, float(timeout), clock == "client", name)
