"""No error and no repr shows a password."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import redis
import redis.asyncio
from redis.asyncio.cluster import ClusterNode
from redis.asyncio.retry import Retry as AsyncRetry
from redis.asyncio.sentinel import Sentinel as AsyncSentinel
from redis.backoff import NoBackoff
from redis.retry import Retry
from redis.sentinel import Sentinel

from distwindow import (
    AsyncCircuitBreaker,
    AsyncConcurrency,
    AsyncLimiter,
    CircuitBreaker,
    Concurrency,
    ConfigurationError,
    DistwindowError,
    ErrorCount,
    Limiter,
    StoreUnavailable,
)
from tests.limiter.first_call import SECRET, all_texts_of, each_limiter, error_of
from tests.servers import Standalone
from tests.servers.process import RedisProcess


@each_limiter
@pytest.mark.parametrize(
    "store",
    [
        f"redis://:{SECRET}@host".encode(),
        [f"redis://:{SECRET}@host"],
        {"password": SECRET},
        f"unix://u:a/{SECRET}@/tmp/x.sock",
    ],
)
def test_no_password_of_what_is_no_store(limiter_class: type, store: Any) -> None:
    assert SECRET not in all_texts_of(error_of(limiter_class, store))


@each_limiter
def test_no_password_where_a_limit_or_a_clock_should_be(limiter_class: type) -> None:
    url = f"redis://:{SECRET}@host"
    assert SECRET not in all_texts_of(error_of(limiter_class, "1/second", limits=url))
    assert SECRET not in all_texts_of(error_of(limiter_class, "memory://", clock=url))


@each_limiter
@pytest.mark.parametrize(
    "url",
    [
        "redis://user:{0}@127.0.0.1:1/0",
        "redis://:{0}@127.0.0.1:1/0",
        "redis://127.0.0.1:1/0?password={0}",
        "redis://127.0.0.1:1/0?pasword={0}",
        "redis://:[{0}]@127.0.0.1:1/0",
        "redis://user:{0}@127.0.0.1:x/0",
        "redis://user:{0}@127.0.0.1:99999/0",
        "redis://user:{0}@127.0.0.1/db",
        "redis://user:{0}@127.0.0.1/0?db=x",
        "redis://user:{0}@127.0.0.1:1/0?colour=blue",
        "reddis://user:{0}@127.0.0.1:1/0",
        "rediss://user:{0}@127.0.0.1:1/0",
        "unix://user:{0}@/tmp/there-is-no-such.sock?db=0",
        "redis+cluster://user:{0}@127.0.0.1:1",
        "redis+cluster://user:{0}@127.0.0.1:x",
        "redis+cluster://user:{0}@127.0.0.1:1/7",
        "redis+cluster://user:{0}@127.0.0.1:1?colour=blue",
        "redis+sentinel://user:{0}@127.0.0.1:1",
        "redis+sentinel://user:{0}@127.0.0.1:1/service",
        "redis+sentinel://127.0.0.1:1/service?sentinel_password={0}",
        "redis+sentinel://user:{0}@127.0.0.1:1/service/x",
        "redis+sentinel://user:{0}@127.0.0.1:1/service?colour=blue",
        "redis+sentinel://user:x/{0}@127.0.0.1:1/service",
        "redis+sentinel://127.0.0.1:x/service?sentinel_password={0}",
        "redis+cluster://user:{0}/x@127.0.0.1:1",
        "redis://:{0}/@127.0.0.1:1/0",
        "redis://127.0.0.1:x/0?password={0}",
        "http://user:{0}@127.0.0.1",
    ],
)
def test_no_password_in_any_message(limiter_class: type, url: str) -> None:
    exc = error_of(limiter_class, url.format(SECRET), timeout=10)
    assert isinstance(exc, (ConfigurationError, StoreUnavailable))
    assert SECRET not in all_texts_of(exc)


@each_limiter
def test_no_password_in_the_message_of_memory_either(limiter_class: type) -> None:
    assert SECRET not in all_texts_of(error_of(limiter_class, f"memory://user:{SECRET}@host"))


@each_limiter
def test_no_password_in_any_repr(limiter_class: type) -> None:
    limiter = limiter_class(f"redis://user:{SECRET}@127.0.0.1:1/0", "5/minute", name="me")
    for thing in (limiter, limiter._store, vars(limiter._store)):
        assert SECRET not in repr(thing)


# -- texts of redis-py ----------------------------------------------------------------------------

URLS = {
    "single": "redis://user:{0}@{dead}/0",
    "tls": "rediss://user:{0}@{dead}/0",
    "socket": "unix://user:{0}@/tmp/there-is-no-such.sock?db=0",
    "cluster": "redis+cluster://user:{0}@{dead}",
    "sentinel that is away": "redis+sentinel://:{0}@{dead}/service/0?sentinel_password={0}",
    "sentinel that refuses": "redis+sentinel://:{0}@{sentinel}/service/0?sentinel_password={0}",
    "server without AUTH": "redis://:{0}@{renaming}/0",
    "server that refuses": "redis://:{0}@{guarded}/0",
}


def _client_of_sentinel(at: str, *, aio: bool) -> Any:
    host, _, port = at.partition(":")
    kind: Any = AsyncSentinel if aio else Sentinel
    once: Any = (AsyncRetry if aio else Retry)(NoBackoff(), 0)
    manager = kind([(host, int(port))], sentinel_kwargs={"password": SECRET, "retry": once})
    return manager.master_for("service", password=SECRET, retry=once)


def _client_of_server(at: str, *, aio: bool) -> Any:
    kind: Any = redis.asyncio.Redis if aio else redis.Redis
    host, _, port = at.partition(":")
    return kind(host=host, port=int(port), username="user", password=SECRET)


def _client_of_cluster(at: str, *, aio: bool) -> Any:
    if not aio:
        return f"redis+cluster://user:{SECRET}@{at}"  # a blocking client connects when it is made
    host, _, port = at.partition(":")
    return redis.asyncio.RedisCluster(startup_nodes=[ClusterNode(host, int(port))], password=SECRET)


CLIENTS: dict[str, tuple[Callable[..., Any], str]] = {
    "client of a sentinel that is away": (_client_of_sentinel, "dead"),
    "client of a sentinel that refuses": (_client_of_sentinel, "sentinel"),
    "client of a server that is away": (_client_of_server, "dead"),
    "client of a server that refuses": (_client_of_server, "guarded"),
    "client of a server without AUTH": (_client_of_server, "renaming"),
    "client of a cluster that is away": (_client_of_cluster, "dead"),
}


@pytest.fixture(scope="module")
def addresses() -> Iterator[dict[str, str]]:
    """Yield the addresses of servers that do not take the password, and of none."""
    with (
        Standalone(password="another") as guarded,
        Standalone(config={"rename-command": 'AUTH ""'}) as renaming,
        RedisProcess({"sentinel monitor": "service 127.0.0.1 1 1"}, sentinel=True) as sentinel,
    ):
        with sentinel.client() as client:
            client.execute_command("ACL", "SETUSER", "default", "resetpass", ">another")
        servers = {"guarded": guarded, "renaming": renaming, "sentinel": sentinel}
        yield {name: f"{each.host}:{each.port}" for name, each in servers.items()} | {
            "dead": "127.0.0.1:1"
        }


async def _texts_of(store: Any, *, aio: bool) -> list[str]:
    """Return all that limits of this store say."""
    texts: list[str] = []
    kinds: Any = (Limiter, Concurrency, CircuitBreaker)
    if aio:
        kinds = (AsyncLimiter, AsyncConcurrency, AsyncCircuitBreaker)
    limiter = kinds[0](store, "5/minute", timeout=5.0)
    quiet = kinds[0](store, "5/minute", timeout=5.0, on_store_error="allow")
    slots = kinds[1](store, 5, timeout=5.0)
    breaker = kinds[2](store, ErrorCount(1), timeout=5.0)
    quiet.on_health_change(lambda health: texts.append(repr(health)))
    for call in (
        *[lambda: limiter.try_acquire("k")] * 3, *[lambda: quiet.try_acquire("k")] * 3,
        lambda: limiter.stats("k"), lambda: slots.try_hold("k"), lambda: breaker.state("k"),
    ):  # fmt: skip
        try:
            result = call()
            if aio:
                await result
        except DistwindowError as exc:
            texts.append(all_texts_of(exc))
    texts += [repr(limiter.health()), repr(quiet.health())]
    for each in (limiter, quiet, slots, breaker):
        texts.append(repr(each))
        if aio:
            await each.aclose()
        else:
            each.close()
    return texts


@pytest.mark.compat
@pytest.mark.filterwarnings("ignore:Exception ignored in. <socket")  # redis-py 5.0 leaves a socket
@pytest.mark.parametrize("aio", [False, True], ids=["blocking", "asyncio"])
@pytest.mark.parametrize("name", [*URLS, *CLIENTS])
def test_no_text_of_redis_py_shows_a_password(
    addresses: dict[str, str], caplog: pytest.LogCaptureFixture, name: str, aio: bool
) -> None:
    async def run() -> list[str]:
        if name in URLS:
            return await _texts_of(URLS[name].format(SECRET, **addresses), aio=aio)
        make, address = CLIENTS[name]
        return await _texts_of(make(addresses[address], aio=aio), aio=aio)

    with caplog.at_level(logging.DEBUG, logger="distwindow"):
        texts = asyncio.run(run())
    shown = "\n".join([*texts, caplog.text])
    assert SECRET not in shown
    assert max(len(line) for line in shown.splitlines()) < 1500  # no text goes whole
