"""Connecting: URLs of all kinds, clients of the caller, connection names, ACL rights, and
errors.
"""

from __future__ import annotations

import re
import time
import uuid
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import redis
import redis.asyncio

from distwindow import (
    AsyncLimiter,
    ConfigurationError,
    Limiter,
    RateLimitExceeded,
    StoreError,
    StoreUnavailable,
)
from tests.integration.harness import Harness, LimiterAdapter, admin
from tests.integration.responder import Responder
from tests.servers import Cluster, SentinelSet, Standalone, until

MINIMAL_ACL = (
    "~distwindow:* resetchannels -@all +time +info +evalsha +eval "
    "+hget +hset +hmget +hincrby +hdel +hgetall +hlen +hrandfield +del +pexpire"
)
"""The least rights with which everything works (docs/operations.md). `+time` may be left out only
with `clock="client"`; without `+info` the server version is not read.
"""

ACL_OF_NAME = "+client|setname"
"""For `name=`."""

ACL_OF_DATABASE = "+select"
"""For a database other than 0."""

ACL_OF_CLUSTER = "+cluster|slots +command"
"""For redis-py to read the map of a cluster."""


def works(limiter: LimiterAdapter, key: str = "k") -> None:
    """Check what every store has to do: admit, show, refuse, refund, reset."""
    first = limiter.try_acquire(key)
    assert first.allowed, first
    assert first.remaining == 2
    assert limiter.peek(key).remaining == 2
    second = limiter.try_acquire(key, 2)
    assert second.allowed, second
    refused = limiter.try_acquire(key)
    assert not refused.allowed
    assert refused.retry_after > 0
    stats = limiter.stats(key)
    assert (stats.passed, stats.blocked) == (3, 1)
    assert limiter.refund(second) == 2
    assert limiter.try_acquire(key).remaining == 1
    limiter.reset(key)
    assert limiter.peek(key).remaining == 3


THREE = "3/hour"

# -- URLs -------------------------------------------------------------------------------------


@pytest.mark.compat
@pytest.mark.parametrize("scheme", ["redis", "valkey"])
def test_every_operation_works_on_a_plain_server(
    harness: Harness, redis_url: str, prefix: str, scheme: str
) -> None:
    works(harness.limiter(redis_url.replace("redis", scheme, 1), THREE, prefix=prefix))


@pytest.mark.compat
@pytest.mark.parametrize("scheme", ["rediss", "valkeys"])
def test_tls_with_the_authority_in_the_url(
    harness: Harness, tls_url: str, prefix: str, scheme: str
) -> None:
    url = tls_url.replace("rediss", scheme, 1)
    works(harness.limiter(url, THREE, prefix=prefix, timeout=5))


def test_tls_without_the_authority_names_the_remedy(
    harness: Harness, tls_url: str, prefix: str
) -> None:
    limiter = harness.limiter(tls_url.partition("?")[0], prefix=prefix, timeout=5)
    with pytest.raises(ConfigurationError, match=r"not trusted.*ssl_ca_certs"):
        limiter.try_acquire("k")


def test_tls_with_a_file_that_is_not_there_names_it(
    harness: Harness, tls_url: str, prefix: str
) -> None:
    url = tls_url.partition("?")[0] + "?ssl_ca_certs=/nowhere/ca.pem"
    with pytest.raises(ConfigurationError, match=r"/nowhere/ca\.pem"):
        harness.limiter(url, prefix=prefix, timeout=5).try_acquire("k")


@pytest.mark.compat
def test_every_operation_works_over_a_unix_socket(
    harness: Harness, unix_url: str, prefix: str
) -> None:
    works(harness.limiter(unix_url, THREE, prefix=prefix))


@pytest.mark.compat
@pytest.mark.parametrize("scheme", ["redis", "valkey"])
def test_every_operation_works_on_a_cluster(
    harness: Harness, cluster_url: str, prefix: str, scheme: str
) -> None:
    url = cluster_url.replace("redis", scheme, 1)
    limiter = harness.limiter(url, THREE, prefix=prefix, timeout=2)
    for key in "abcdefgh":
        works(limiter, key)


@pytest.mark.compat
@pytest.mark.parametrize("scheme", ["redis", "valkey"])
def test_a_primary_named_by_sentinels(
    harness: Harness, sentinel_url: str, prefix: str, scheme: str
) -> None:
    url = sentinel_url.replace("redis", scheme, 1)
    works(harness.limiter(url, THREE, prefix=prefix, timeout=2))


@pytest.mark.compat
def test_fakeredis_behind_a_port(harness: Harness, fake_url: str, prefix: str) -> None:
    works(harness.limiter(fake_url, THREE, prefix=prefix, timeout=5))


@pytest.mark.compat
def test_every_operation_works_in_memory(harness: Harness, prefix: str) -> None:
    works(harness.limiter("memory://", THREE, prefix=prefix))


@pytest.mark.compat
def test_every_operation_works_in_another_database(
    harness: Harness, redis_url: str, prefix: str
) -> None:
    url = re.sub(r"/\d+$", "/5", redis_url)
    works(harness.limiter(url, THREE, prefix=prefix))
    assert harness.limiter(url, THREE, prefix=prefix).try_acquire("five")
    with admin(url) as five, admin(redis_url) as zero:
        assert five.keys(f"{prefix}:*")
        assert not zero.keys(f"{prefix}:*")


# -- passwords and users ----------------------------------------------------------------------

PASSWORD = "p@ss/w:rd#?é"  # characters that a URL has to escape
QUOTED = "p%40ss%2Fw%3Ard%23%3F%C3%A9"


@pytest.fixture(scope="module")
def guarded() -> Any:
    """Yield a server with a password, and with users of which one has just the rights that are
    needed.
    """
    with Standalone(
        password="secret",
        users=(
            f"limiter on >least {MINIMAL_ACL}",
            f"blind on >least {MINIMAL_ACL} -time -info",
            "nobody on >least -@all",
            f"outsider on >least {MINIMAL_ACL.replace('~distwindow:*', '~other:*')}",
            f"scriptless on >least {MINIMAL_ACL.replace('+evalsha +eval', '')}",
            f"halfway on >least {MINIMAL_ACL.replace('+hincrby', '')}",
            f"odd on >{PASSWORD} ~* +@all",
        ),
    ) as server:
        yield server


def at(server: Standalone, login: str) -> str:
    return f"redis://{login}@{server.host}:{server.port}/0"


@pytest.mark.compat
def test_a_password_in_the_url(harness: Harness, guarded: Standalone, prefix: str) -> None:
    works(harness.limiter(at(guarded, ":secret"), THREE, prefix=prefix))


@pytest.mark.compat
def test_a_user_in_the_url(harness: Harness, guarded: Standalone, prefix: str) -> None:
    works(harness.limiter(at(guarded, "default:secret"), THREE, prefix=prefix))


def test_a_password_of_special_characters(
    harness: Harness, guarded: Standalone, prefix: str
) -> None:
    works(harness.limiter(at(guarded, f"odd:{QUOTED}"), THREE, prefix=prefix))


@pytest.mark.parametrize("login", [":wrong-password", "default:wrong-password", "ghost:secret"])
def test_a_wrong_password_is_a_configuration_error_that_keeps_it_secret(
    harness: Harness, guarded: Standalone, prefix: str, login: str
) -> None:
    limiter = harness.limiter(at(guarded, login), prefix=prefix)
    with pytest.raises(ConfigurationError, match="password") as caught:
        limiter.try_acquire("k")
    assert "wrong-password" not in str(caught.value)
    assert ":secret" not in str(caught.value)


def test_no_password_where_one_is_required(
    harness: Harness, guarded: Standalone, prefix: str
) -> None:
    limiter = harness.limiter(f"redis://{guarded.host}:{guarded.port}/0", prefix=prefix)
    with pytest.raises(ConfigurationError, match=r"(?i)password|auth"):
        limiter.try_acquire("k")


# -- rights -----------------------------------------------------------------------------------


def test_the_least_rights_are_enough(harness: Harness, guarded: Standalone) -> None:
    key = uuid.uuid4().hex
    limiter = harness.limiter(at(guarded, "limiter:least"), ["3/hour", "3/day"])
    works(limiter, key)
    with guarded.client() as server:
        server.script_flush()
    works(limiter, key)


def test_they_are_enough_for_every_path(guarded: Standalone) -> None:
    with Limiter(at(guarded, "limiter:least"), ["8/200ms", "1000/hour"], timeout=2) as limiter:
        every_path(limiter, uuid.uuid4().hex)


@pytest.mark.parametrize(
    "right", [word for word in re.findall(r"\+(\w+)", MINIMAL_ACL) if word != "info"]
)
def test_none_of_the_least_rights_can_be_spared(right: str, guarded: Standalone) -> None:
    name = f"without-{right}"
    with guarded.client() as server:
        server.execute_command("ACL", "SETUSER", name, "on", ">least", *MINIMAL_ACL.split())
        server.execute_command("ACL", "SETUSER", name, f"-{right}")
        server.script_flush()
    key = f"needs-{right}"
    with Limiter(at(guarded, f"{name}:least"), ["8/200ms", "1000/hour"], timeout=2) as limiter:
        with pytest.raises(ConfigurationError, match=r"docs/operations\.md"):
            every_path(limiter, key)


def every_path(limiter: Limiter, key: str) -> None:
    """Call so that every part of the scripts runs: a new ring, its hot path, several buckets, a
    refusal, the end of a window; and the other commands.
    """
    for _ in range(12):
        decision = limiter.try_acquire(key)
        limiter.try_acquire(f"{key} alone")
        if decision:
            limiter.refund(decision)
        limiter.try_acquire(key, 3)
        limiter.peek(key)
        limiter.stats(key)
        with suppress(RateLimitExceeded), limiter.entry(f"{key} alone"):
            pass
        limiter.flush()
        time.sleep(0.02)  # the time until another bucket, on the server's clock
    limiter.reset(key)


def test_the_least_rights_for_a_name_and_another_database(
    harness: Harness, guarded: Standalone, prefix: str
) -> None:
    url = at(guarded, "limiter:least")
    for options, where in (({"name": prefix}, url), ({}, url[:-1] + "3")):
        with pytest.raises(ConfigurationError, match=r"docs/operations\.md"):
            harness.limiter(where, **options).try_acquire("k")
    with guarded.client() as server:
        rights = [*MINIMAL_ACL.split(), ACL_OF_NAME, ACL_OF_DATABASE]
        server.execute_command("ACL", "SETUSER", prefix, "on", ">least", *rights)
    url = at(guarded, f"{prefix}:least")[:-1] + "3"
    assert harness.limiter(url, name=prefix).try_acquire("k")


def test_the_least_rights_in_a_cluster(harness: Harness, cluster: Cluster, prefix: str) -> None:
    for rights, enough in (([], False), (ACL_OF_CLUSTER.split(), True)):
        for node in cluster.nodes:
            with node.client() as server:
                words = ("reset", "on", ">least", *MINIMAL_ACL.split(), *rights)
                server.execute_command("ACL", "SETUSER", prefix, *words)
        limiter = harness.limiter(cluster.url.replace("://", f"://{prefix}:least@"), timeout=3)
        keys = [f"{prefix}-{number}" for number in range(20)]
        if enough:
            assert all(limiter.each(keys))
        else:
            with pytest.raises(ConfigurationError, match=r"docs/operations\.md"):
                limiter.each(keys)


def test_time_and_info_are_not_sent_with_the_clients_clock(
    harness: Harness, guarded: Standalone
) -> None:
    limiter = harness.limiter(at(guarded, "blind:least"), THREE, clock="client")
    works(limiter, uuid.uuid4().hex)


@pytest.mark.parametrize(
    ("user", "message"),
    [
        ("nobody", "ACL"),
        ("outsider", "ACL"),
        ("scriptless", "ACL"),
        ("halfway", "ACL"),
        ("blind", "ACL"),
    ],
)
def test_missing_rights_are_a_configuration_error_that_names_the_remedy(
    harness: Harness, guarded: Standalone, user: str, message: str
) -> None:
    limiter = harness.limiter(at(guarded, f"{user}:least"))
    with pytest.raises(ConfigurationError, match=message):
        limiter.each(["k"] * 2)  # the first call on a key does not need HINCRBY


# -- clients of the caller ----------------------------------------------------------------------

CLIENT_OPTIONS: list[dict[str, Any]] = [
    {},
    {"decode_responses": True},
    {"protocol": 3},
    {"protocol": 3, "decode_responses": True, "health_check_interval": 1},
]


def retrying(harness: Harness) -> dict[str, Any]:
    """Return arguments of a client that would send a call without a reply three times more."""
    from redis.asyncio.retry import Retry as AsyncRetry
    from redis.backoff import NoBackoff
    from redis.retry import Retry

    retry: Any = (AsyncRetry if harness.kind == "async" else Retry)(NoBackoff(), 3)
    return {"retry": retry, "retry_on_error": [redis.ConnectionError, redis.TimeoutError]}


@pytest.mark.compat
@pytest.mark.parametrize("options", CLIENT_OPTIONS, ids=str)
def test_a_client_that_the_caller_owns(
    harness: Harness, redis_url: str, prefix: str, options: dict[str, Any]
) -> None:
    client = harness.client(redis_url, **options, **retrying(harness))
    before = dict(client.connection_pool.connection_kwargs)
    limiter = harness.limiter(client, THREE, prefix=prefix)
    works(limiter)
    limiter.close()
    assert client.connection_pool.connection_kwargs == before
    reply = harness.use(client, "ECHO", "still mine")
    assert reply == ("still mine" if options.get("decode_responses") else b"still mine")


@pytest.mark.compat
@pytest.mark.parametrize("options", [{}, {"decode_responses": True, "protocol": 3}], ids=str)
def test_a_cluster_client_that_the_caller_owns(
    harness: Harness, cluster: Cluster, prefix: str, options: dict[str, Any]
) -> None:
    node = cluster.nodes[0]
    client = harness.cluster(node.host, node.port, **options)
    limiter = harness.limiter(client, THREE, prefix=prefix, timeout=2)
    for key in "abcdef":
        works(limiter, key)
    limiter.close()
    reply = harness.use(client, "GET", f"{prefix}-nothing")
    assert reply is None


@pytest.mark.compat
@pytest.mark.parametrize("options", [{}, {"decode_responses": True, "protocol": 3}], ids=str)
def test_a_sentinel_client_that_the_caller_owns(
    harness: Harness, sentinel: SentinelSet, prefix: str, options: dict[str, Any]
) -> None:
    hosts = [(node.host, node.port) for node in sentinel.sentinels]
    client = harness.master_for(hosts, sentinel.service, **options)
    limiter = harness.limiter(client, THREE, prefix=prefix, timeout=2)
    works(limiter)
    limiter.close()
    assert harness.use(client, "ECHO", "x") in ("x", b"x")


@pytest.mark.compat
def test_a_fakeredis_client(harness: Harness, prefix: str) -> None:
    client = harness.fake()
    works(harness.limiter(client, THREE, prefix=prefix, timeout=5))
    assert harness.use(client, "ECHO", "x") in ("x", b"x")


def test_a_client_of_the_other_kind_is_named(redis_url: str, prefix: str) -> None:
    blocking, asynchronous = (
        redis.Redis.from_url(redis_url),
        redis.asyncio.Redis.from_url(redis_url),
    )
    with pytest.raises(ConfigurationError, match="use AsyncLimiter"):
        Limiter(asynchronous, THREE, prefix=prefix)
    with pytest.raises(ConfigurationError, match="use Limiter"):
        AsyncLimiter(blocking, THREE, prefix=prefix)
    for harness in (Limiter, AsyncLimiter):
        with pytest.raises(ConfigurationError, match="no store"):
            harness(42, THREE, prefix=prefix)


# -- names ------------------------------------------------------------------------------------


@pytest.mark.compat
def test_the_name_shows_in_the_servers_client_list(
    harness: Harness, redis_url: str, prefix: str
) -> None:
    name = f"checkout-{prefix}"
    limiter = harness.limiter(redis_url, prefix=prefix, name=name)
    limiter.try_acquire("k")
    with admin(redis_url) as server:
        assert [client["name"] for client in server.client_list()].count(name) == 1
    limiter.close()
    with admin(redis_url) as server:
        until(lambda: name not in [client["name"] for client in server.client_list()])


# -- URLs that cannot work --------------------------------------------------------------------


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("", "begins with none of"),
        ("localhost:6379", "begins with none of"),
        ("http://localhost", "begins with none of"),
        ("redis:/localhost", "begins with none of"),
        ("redis://localhost:notaport/0", "port"),
        ("redis://localhost:99999/0", "port|range"),
        ("redis://localhost/notadb", "database|notadb"),
        ("redis+sentinel://localhost:26379", "names no service"),
        ("redis+sentinel://localhost:26379/service/x", "database number"),
        ("redis+cluster://localhost:x", "port"),
        ("redis+cluster://", "empty host"),
        ("redis+cluster://localhost:7000/3", "database 0 only"),
        ("memory://somewhere", "memory://"),
        ("redis://localhost?socket_timeout=soon", "socket_timeout"),
    ],
)
def test_a_url_that_cannot_work_is_refused_at_once(
    harness: Harness, url: str, message: str
) -> None:
    with pytest.raises(ConfigurationError, match=message):
        harness.limiter(url).try_acquire("k")


def test_an_unknown_option_is_named(harness: Harness, redis_url: str) -> None:
    with pytest.raises(ConfigurationError, match="colour"):
        harness.limiter(f"{redis_url}?colour=blue").try_acquire("k")


@pytest.mark.parametrize(
    "url",
    [
        "http://user:hunter2@localhost",
        "redis://user:hunter2@localhost:port/0",
        "redis://:hunter2/@localhost:6379/0",
        "redis://:hunter2/x@localhost:6379/0",
        "redis://:hunter2@localhost/db",
        "redis+cluster://user:hunter2@localhost:port",
        "redis+cluster://user:hunter2/x@localhost:7000",
        "redis+cluster://:hunter2/x@localhost:7000",
        "redis+sentinel://user:hunter2@localhost:1",
        "redis+sentinel://user:x/hunter2@localhost:1/service",
        "redis://localhost:port/0?password=hunter2",
        "redis+sentinel://localhost:port/s/0?sentinel_password=hunter2",
    ],
)
def test_no_message_shows_a_password(harness: Harness, url: str) -> None:
    with pytest.raises((ConfigurationError, StoreError)) as caught:
        harness.limiter(url, timeout=1).try_acquire("k")
    error: BaseException | None = caught.value
    assert "hunter2" not in f"{error} {error!r}"


def test_a_port_without_a_server(harness: Harness) -> None:
    for url in (
        "redis://127.0.0.1:1/0",
        "unix:///nowhere/redis.sock",
        "redis+cluster://127.0.0.1:1,127.0.0.1:2",
        "redis+sentinel://127.0.0.1:1,127.0.0.1:2/service/0",
    ):
        limiter = harness.limiter(url, timeout=2)
        for _ in range(3):
            with pytest.raises(StoreUnavailable) as caught:
                limiter.try_acquire("k")
            assert caught.value.charged is False


def test_a_cluster_url_of_a_server_without_cluster_mode_is_an_error(
    harness: Harness, redis_url: str, prefix: str
) -> None:
    url = redis_url.replace("redis", "redis+cluster", 1).rpartition("/")[0]
    with pytest.raises((ConfigurationError, StoreUnavailable), match=r"(?i)cluster"):
        harness.limiter(url, prefix=prefix, timeout=5).try_acquire("k")


def test_a_node_of_a_cluster_taken_for_a_plain_server_names_the_right_url(
    harness: Harness, cluster: Cluster, prefix: str
) -> None:
    node = cluster.nodes[0]
    limiter = harness.limiter(f"redis://{node.host}:{node.port}/0", prefix=prefix)
    with pytest.raises(ConfigurationError, match=r"redis\+cluster://"):
        limiter.each("abcdefgh")


def test_the_error_for_a_server_that_is_too_old_names_the_version(harness: Harness) -> None:
    with Responder() as server:
        server.version = "5.0.14"
        with pytest.raises(ConfigurationError, match=r"Redis 5\.0.*too old.*6\.2"):
            harness.limiter(server.url).try_acquire("k")


def test_the_authoritys_file_may_come_as_a_clients_option(
    harness: Harness, tls_server: Standalone, tls_ca: Path, prefix: str
) -> None:
    url = f"rediss://{tls_server.host}:{tls_server.tls_port}/0"
    client = harness.client(url, ssl_ca_certs=str(tls_ca))
    works(harness.limiter(client, THREE, prefix=prefix, timeout=5))
