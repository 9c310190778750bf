"""Errors of connecting: URLs that cannot work, and servers that are not what the URL says."""

from __future__ import annotations

import pytest

from distwindow import ConfigurationError, StoreError, StoreUnavailable
from tests.harness import Harness
from tests.servers import Cluster
from tests.stores.responder import Responder


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
        harness.limiter(url, timeout=10).try_acquire("k")
    error: BaseException | None = caught.value
    assert "hunter2" not in f"{error} {error!r}"


def test_a_port_without_a_server(harness: Harness) -> None:
    for url in (
        "redis://127.0.0.1:1/0",
        "unix:///nowhere/redis.sock",
        "redis+cluster://127.0.0.1:1,127.0.0.1:2",
        "redis+sentinel://127.0.0.1:1,127.0.0.1:2/service/0",
    ):
        limiter = harness.limiter(url, timeout=10)
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
