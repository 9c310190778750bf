"""Servers that a limiter cannot use: away, too old, or not of the kind that the URL says. Each
raises one clear error. Those that refuse something are in `test_configuration_errors.py`.
"""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from distwindow import ConfigurationError, StoreError, StoreUnavailable
from tests.harness import Harness
from tests.limiter.first_call import attempt, each_limiter, error_of
from tests.stores.responder import Responder


def test_the_error_for_a_server_that_is_too_old_names_the_version(harness: Harness) -> None:
    with Responder() as server:
        server.version = "5.0.14"
        with pytest.raises(ConfigurationError, match=r"Redis 5\.0.*too old.*6\.2"):
            harness.limiter(server.url).try_acquire("k")


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


@each_limiter
def test_a_service_that_sentinel_does_not_know(limiter_class: type, sentinel_url: str) -> None:
    url = sentinel_url.replace(sentinel_url.rstrip("/0").rpartition("/")[2], "nosuchservice")
    exc = error_of(limiter_class, url, timeout=10)
    assert isinstance(exc, (ConfigurationError, StoreError))
    assert "nosuchservice" in str(exc)


@each_limiter
def test_a_cluster_node_without_the_clusters_url(limiter_class: type, cluster: Any) -> None:
    """The URL of a single node works for the slots of that node; the error for another slot says
    which URL to use.
    """
    url = f"redis://127.0.0.1:{cluster.nodes[0].port}/0"
    messages = []
    for n in range(12):
        try:
            asyncio.run(attempt(limiter_class, url, f"key-{n}"))
        except ConfigurationError as exc:
            messages.append(str(exc))
    assert messages
    assert all("use redis+cluster://" in message for message in messages)
