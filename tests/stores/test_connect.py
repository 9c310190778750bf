"""Connecting: URLs of all kinds, clients of the caller, and connection names."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import redis
import redis.asyncio
from cryptography.hazmat.primitives import serialization

from distwindow import ConfigurationError
from distwindow.ring.clock import SYSTEM
from distwindow.stores.redis.topology import CallSettings, SingleServer
from distwindow.stores.redis.urls import make_client, parse_url_text
from tests.harness import Harness, admin
from tests.programs import ROOT
from tests.servers import Cluster, SentinelSet, Standalone, until
from tests.servers.certificates import Certificates
from tests.stores.store_check import THREE, works

# -- URLs -------------------------------------------------------------------------------------


@pytest.mark.compat
@pytest.mark.parametrize(
    ("store", "scheme"),
    [
        ("redis_url", "redis"), ("redis_url", "valkey"), ("tls_url", "rediss"),
        ("tls_url", "valkeys"), ("unix_url", "unix"), ("cluster_url", "redis"),
        ("cluster_url", "valkey"), ("sentinel_url", "redis"), ("sentinel_url", "valkey"),
        ("fake_url", "redis"), ("memory", "memory"),
    ],
)  # fmt: skip
def test_every_operation_works(
    harness: Harness, request: pytest.FixtureRequest, prefix: str, store: str, scheme: str
) -> None:
    url = "memory://" if store == "memory" else request.getfixturevalue(store)
    url = re.sub(r"^[a-z]+", scheme, url)
    limiter = harness.limiter(url, THREE, prefix=prefix, timeout=10)
    for key in "abcdefgh" if store == "cluster_url" else "k":
        works(limiter, key)


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


ENCRYPTED = """
import asyncio, sys
from distwindow import AsyncLimiter, ConfigurationError, Limiter

async def awaited():
    await AsyncLimiter(sys.argv[1], "5/minute", timeout=10).try_acquire("k")

for call in (lambda: Limiter(sys.argv[1], "5/minute", timeout=10).try_acquire("k"),
             lambda: asyncio.run(awaited())):
    try:
        call()
    except ConfigurationError as exc:
        print("ssl_password" in str(exc))
"""


@pytest.mark.slow
def test_a_key_that_is_encrypted_is_a_mistake_and_nobody_is_asked(
    tls_url: str, tmp_path: Path
) -> None:
    """OpenSSL would ask at the terminal, or else on the standard input, and wait for an answer."""
    certificates = Certificates(tmp_path)
    key = serialization.load_pem_private_key(certificates.key.read_bytes(), None)
    encrypted = tmp_path / "encrypted.key"
    encrypted.write_bytes(
        key.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.BestAvailableEncryption(b"secret"),
        )
    )
    url = f"{tls_url}&ssl_certfile={certificates.cert}&ssl_keyfile={encrypted}"
    nobody_writes, kept_open = os.pipe()
    try:
        result = subprocess.run(
            [sys.executable, "-c", ENCRYPTED, url], stdin=nobody_writes, capture_output=True,
            text=True, start_new_session=True, timeout=60, check=True, cwd=ROOT,
        )  # fmt: skip
    finally:
        os.close(nobody_writes)
        os.close(kept_open)
    assert result.stdout.split() == ["True", "True"]


@pytest.mark.parametrize("is_async", [False, True])
def test_sentinels_have_the_tls_options_of_the_servers_but_for_their_own(is_async: bool) -> None:
    options = "ssl_ca_certs=/1.pem&sentinel_ssl_ca_certs=/2.pem&ssl_certfile=/3.pem"
    url = f"rediss+sentinel://a:1/service?{options}"
    pool = make_client(parse_url_text(url), 1.0, is_async=is_async).connection_pool
    (sentinel,) = pool.sentinel_manager.sentinels
    names = ("ssl_ca_certs", "ssl_certfile")
    assert [pool.connection_kwargs[name] for name in names] == ["/1.pem", "/3.pem"]
    assert "SSL" in sentinel.connection_pool.connection_class.__name__
    kept = sentinel.connection_pool.connection_kwargs
    assert [kept[name] for name in names] == ["/2.pem", "/3.pem"]


@pytest.mark.parametrize(("kind", "port"), [("sentinel", 26379), ("cluster", 6379)])
def test_the_parts_of_a_url_of_several_servers(kind: str, port: int) -> None:
    url = parse_url_text(f"redis+{kind}://us%2Fer:p%40%2Fss@a,[::1],b:1,[fe80::2]:2/0")
    assert url.hosts == (("a", port), ("::1", port), ("b", 1), ("fe80::2", 2))
    assert (url.options["username"], url.options["password"]) == ("us/er", "p@/ss")


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
    limiter = harness.limiter(client, THREE, prefix=prefix, timeout=10)
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
    limiter = harness.limiter(client, THREE, prefix=prefix, timeout=10)
    works(limiter)
    limiter.close()
    assert harness.use(client, "ECHO", "x") in ("x", b"x")


@pytest.mark.compat
def test_a_fakeredis_client(harness: Harness, prefix: str) -> None:
    client = harness.fake()
    works(harness.limiter(client, THREE, prefix=prefix, timeout=5))
    assert harness.use(client, "ECHO", "x") in ("x", b"x")


def test_the_authoritys_file_may_come_as_a_clients_option(
    harness: Harness, tls_server: Standalone, tls_ca: Path, prefix: str
) -> None:
    url = f"rediss://{tls_server.host}:{tls_server.tls_port}/0"
    client = harness.client(url, ssl_ca_certs=str(tls_ca))
    works(harness.limiter(client, THREE, prefix=prefix, timeout=5))


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


def test_the_version_of_redis_py_is_found_out_once_for_a_server() -> None:
    """It is in the files of the installation: to read it takes longer than to connect."""
    settings = CallSettings(SYSTEM, 1.0)
    connect = SingleServer(redis.ConnectionPool(), settings).node.new_connection
    first, second = (getattr(connect(), "driver_info", None) for _ in range(2))
    assert first is second
