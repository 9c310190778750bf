"""Servers get other addresses, all at once or one after the other, and another primary is named:
running limiters find them, and nothing has to be restarted.
"""

from __future__ import annotations

import asyncio
import socket
import time
from typing import Any, get_args

import pytest

from distwindow import AsyncLimiter, Limiter
from distwindow.runtime.options import Consistency
from tests.harness import Harness, used
from tests.servers import Cluster, RedisProcess, SentinelSet, Standalone, until
from tests.stores.test_transport_topology import PREFIX, loaded, only_store_errors

FIRST, SECOND = "127.0.0.1", "127.0.0.2"


@pytest.fixture
def names(monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """Addresses of host names. It may be changed at any time, as the records of a DNS."""
    known: dict[str, str] = {}
    look_up = socket.getaddrinfo

    def of_names(host: Any, *rest: Any, **options: Any) -> Any:
        return look_up(known.get(host, host), *rest, **options)

    monkeypatch.setattr(socket, "getaddrinfo", of_names)
    return known


def admitted(limiter: Any, keys: list[str]) -> bool:
    calls = limiter.burst(keys, at_once=1)
    only_store_errors(calls)
    return all(call.admitted for call in calls)


@pytest.mark.slow
@pytest.mark.parametrize("at_once", [True, False], ids=["at once", "one by one"])
def test_a_cluster_is_found_again_by_the_hosts_of_its_url(
    harness: Harness, names: dict[str, str], at_once: bool
) -> None:
    names["cluster.test"] = FIRST
    with Cluster() as cluster:
        first = cluster.nodes[0]
        url = f"redis+cluster://cluster.test:{first.port}"
        busy = harness.limiter(url, prefix=PREFIX, timeout=0.5)
        idle = [
            harness.limiter(url, prefix=f"{PREFIX}-{each}", timeout=0.5, consistency=each)
            for each in get_args(Consistency)
        ]
        keys = [each[0] for each in cluster.keys_by_port().values()]
        for limiter in (busy, *idle):
            limiter.each(keys)
        with loaded(busy, keys, at_once=2) as calls:
            steps = [cluster.nodes] if at_once else [[node] for node in cluster.nodes]
            for nodes in steps:
                cluster.move(SECOND, *nodes)
                names["cluster.test"] = first.host
                until(lambda: admitted(busy, keys), 20, what="calls of all shards")
        only_store_errors(calls)
        for limiter in idle:  # they had no calls meanwhile
            health: Any = limiter.limiter.health
            until(lambda each=limiter: admitted(each, keys), 10, what="calls")  # type: ignore[misc]
            until(lambda of=health: of().up and not of().pending, 10, what="all is told")  # type: ignore[misc]


@pytest.mark.slow
def test_a_server_is_found_again_by_its_name(harness: Harness, names: dict[str, str]) -> None:
    names["store.test"] = FIRST
    with Standalone() as server:
        limiter = harness.limiter(f"redis://store.test:{server.port}", prefix=PREFIX, timeout=0.5)
        limiter.each(["k"])
        server.move(SECOND)
        names["store.test"] = SECOND
        until(lambda: admitted(limiter, ["k"]), 5, what="a call")


@pytest.mark.slow
@pytest.mark.parametrize("why", ["READONLY", "NOREPLICAS"])
def test_a_server_that_refuses_is_left_for_that_of_its_name(
    harness: Harness, names: dict[str, str], why: str
) -> None:
    """Its name leads to another one since, as at a managed service after a failover."""
    names["store.test"] = FIRST
    with Standalone() as old, Standalone() as new, old.client() as client:
        new.port = old.port
        new.move(SECOND)
        limiter = harness.limiter(f"redis://store.test:{old.port}", prefix=PREFIX, timeout=0.5)
        limiter.each(["k"])
        names["store.test"] = SECOND
        if why == "READONLY":
            client.replicaof(SECOND, new.port)
        else:
            client.config_set("min-replicas-to-write", 1)
        until(lambda: admitted(limiter, ["k"]), 5, what="a call")


@pytest.mark.slow
def test_a_sentinel_set_is_found_again_by_its_name(harness: Harness, names: dict[str, str]) -> None:
    names["sentinel.test"] = FIRST
    with SentinelSet() as nodes:
        url = nodes.url.replace(FIRST, "sentinel.test")
        limiter = harness.limiter(url, prefix=PREFIX, timeout=0.5)
        limiter.each(["k"])
        nodes.move(SECOND)
        names["sentinel.test"] = SECOND
        until(lambda: admitted(limiter, ["k"]), 10, what="a call")


# -- another primary, while the old one goes on to answer ------------------------------------------


SOONER_THAN_IT_IS_DEMOTED_S = 6
"""A sentinel demotes an old primary that it could reach all the time after ten seconds."""


def fail_over(nodes: SentinelSet) -> tuple[RedisProcess, RedisProcess]:
    """Have another primary named, and return both."""
    old = nodes.primary
    with nodes.sentinels[0].client() as sentinel:
        sentinel.execute_command("SENTINEL", "FAILOVER", nodes.service)
    return old, nodes.await_failover(old)


@pytest.mark.slow
def test_a_planned_failover_is_followed_although_the_old_primary_answers(harness: Harness) -> None:
    with SentinelSet() as nodes:
        limiter = harness.limiter(nodes.url, prefix=PREFIX, timeout=0.5)
        limiter.each(["k"])
        with loaded(limiter, ["k"], at_once=1):
            _, new = fail_over(nodes)
            with new.client() as client:
                before = used(client, PREFIX)
                until(lambda: used(client, PREFIX) > before, SOONER_THAN_IT_IS_DEMOTED_S)


@pytest.mark.slow
def test_an_old_primary_without_its_replicas_is_left(harness: Harness) -> None:
    required = {"min-replicas-to-write": 1, "min-replicas-max-lag": 1}
    with SentinelSet(replicas=2, config=required) as nodes:
        limiter = harness.limiter(nodes.url, prefix=PREFIX, timeout=0.5)
        until(lambda: admitted(limiter, ["k"]), what="replicas that are in time")
        with loaded(limiter, ["k"], at_once=1) as calls:
            fail_over(nodes)
            until(lambda: admitted(limiter, ["k"]), SOONER_THAN_IT_IS_DEMOTED_S)
            time.sleep(0.3)
        only_store_errors(calls)
        assert {call.charged for call in calls if not call.admitted} <= {False, None}


# -- many limiters --------------------------------------------------------------------------------


def readings(cluster: Cluster) -> int:
    """Return how often the map was asked for, and forget it."""
    count = 0
    for node in cluster.nodes:
        with node.client() as client:
            for name, of in client.info("commandstats").items():
                if name in ("cmdstat_cluster|slots", "cmdstat_cluster"):
                    count += of["calls"]
            client.config_resetstat()
    return count


def test_limiters_of_one_url_read_the_map_once(cluster: Cluster) -> None:
    url = cluster.url + "?client_name=many"  # of no other test
    readings(cluster)
    limiters = [Limiter(url, "10/hour", prefix=PREFIX, timeout=10) for _ in range(16)]
    try:
        assert all(limiter.try_acquire(f"k{n}") for n, limiter in enumerate(limiters))
    finally:
        for limiter in limiters:
            limiter.close()
    assert readings(cluster) == 1


async def test_limiters_that_start_at_once_in_a_loop_read_it_once(cluster: Cluster) -> None:
    url = cluster.url + "?client_name=many-in-a-loop"
    readings(cluster)
    limiters = [AsyncLimiter(url, "10/hour", prefix=PREFIX, timeout=10) for _ in range(16)]
    try:
        calls = (limiter.try_acquire(f"k{n}") for n, limiter in enumerate(limiters))
        assert all(await asyncio.gather(*calls))
    finally:
        for limiter in limiters:
            await limiter.aclose()
    assert readings(cluster) == 1
