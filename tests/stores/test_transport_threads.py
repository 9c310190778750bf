"""Threads have a connection each, which is closed with the limiter and reused when they end."""

from __future__ import annotations

import gc
import threading
import time
from typing import Any

import pytest

from distwindow import ConfigurationError, Limiter
from tests.harness import (
    PLENTY,
    Call,
    admin,
    connections_named,
    count_outcomes,
    in_background,
    timed,
)
from tests.servers import Cluster, until


@pytest.mark.compat
def test_one_connection_for_each_thread_reused_when_the_thread_ends(
    redis_url: str, prefix: str
) -> None:
    def connections(server: Any) -> set[Any]:
        return set(connections_named(server, prefix))

    with (
        Limiter(redis_url, PLENTY, prefix=prefix, name=prefix) as limiter,
        admin(redis_url) as server,
    ):

        def connections_used(size: int) -> set[Any]:
            barriers = [threading.Barrier(size + 1, timeout=10) for _ in range(2)]

            def work() -> None:
                for turn in range(20):
                    limiter.try_acquire(f"k{turn % 3}")
                for barrier in barriers:
                    barrier.wait()

            threads = [in_background(work) for _ in range(size)]
            barriers[0].wait()
            seen = connections(server)
            barriers[1].wait()
            for thread in threads:
                thread.join()
            return seen

        first = connections_used(6)
        assert len(first) == 6
        assert connections_used(6) == first
        for _ in range(50):
            connections_used(1)
        assert connections(server) == first
        connections_used(40)
        connections_used(1)
        until(lambda: len(connections(server)) <= 16 + 1, what="the end of idle connections")
    with admin(redis_url) as server:
        until(lambda: not connections_named(server, prefix))


def test_connections_do_not_grow_with_threads_that_come_and_go(redis_url: str, prefix: str) -> None:
    with (
        Limiter(redis_url, PLENTY, prefix=prefix, name=prefix) as limiter,
        admin(redis_url) as server,
    ):
        for _ in range(30):
            in_background(lambda: limiter.try_acquire("k")).join()
        assert len(connections_named(server, prefix)) == 1


def test_in_a_cluster_one_connection_for_each_thread_and_node(
    cluster: Cluster, cluster_url: str, prefix: str
) -> None:
    clients = [node.client() for node in cluster.nodes]
    with Limiter(cluster_url, PLENTY, prefix=prefix, timeout=10, name=prefix) as limiter:

        def work() -> None:
            for number in range(60):
                limiter.try_acquire(f"k{number}")

        work()
        assert [len(connections_named(client, prefix)) for client in clients] == [1, 1, 1]
        for _ in range(3):
            in_background(work).join()
        assert [len(connections_named(client, prefix)) for client in clients] == [2, 2, 2]
    for client in clients:
        # mypy cannot infer a lambda whose parameter has a default.
        until(lambda c=client: not connections_named(c, prefix), what="none after close")  # type: ignore[misc]
        client.close()


@pytest.mark.compat
def test_close_closes_the_connections_of_all_threads(redis_url: str, prefix: str) -> None:
    limiter = Limiter(redis_url, PLENTY, prefix=prefix, name=prefix)
    called, closed = threading.Barrier(4, timeout=10), threading.Event()

    def work() -> None:
        limiter.try_acquire("k")
        called.wait()
        closed.wait(10)

    threads = [in_background(work) for _ in range(3)]
    called.wait()
    with admin(redis_url) as server:
        assert len(connections_named(server, prefix)) == 3
        limiter.close()
        until(lambda: not connections_named(server, prefix), what="connections closed")
    closed.set()
    for thread in threads:
        thread.join()


def test_close_ends_all_calls_in_flight(redis_url: str, prefix: str) -> None:
    """Each ends with a decision, a store error, or the error that the limiter is closed. No
    connection is left open.
    """
    for _ in range(8):
        limiter = Limiter(redis_url, PLENTY, prefix=prefix, name=prefix, timeout=10)
        limiter.try_acquire("k")
        ends: list[Call] = []

        def work(key: str, limiter: Limiter = limiter, ends: list[Call] = ends) -> None:
            while True:
                call = timed(key, lambda: limiter.try_acquire(key))
                ends.append(call)
                if isinstance(call.outcome, ConfigurationError):
                    return

        # mypy cannot infer a lambda whose parameter has a default.
        threads = [in_background(lambda i=i: work(f"k{i % 2}")) for i in range(6)]  # type: ignore[misc]
        # mypy cannot infer a lambda whose parameter has a default.
        until(lambda ends=ends: len(ends) > 20, every=0.001)  # type: ignore[misc]
        limiter.close()
        for thread in threads:
            thread.join(5)
            assert not thread.is_alive(), "a call went on after close"
        assert set(count_outcomes(ends)) <= {"ok", "StoreUnavailable", "ConfigurationError"}
    gc.collect()
    with admin(redis_url) as server:
        until(lambda: not connections_named(server, prefix), what="connections closed")


def test_a_connection_that_the_server_closed_for_idleness_is_replaced_unnoticed(
    redis_url: str, prefix: str
) -> None:
    """This holds also while other threads use their own connections."""
    with (
        Limiter(redis_url, PLENTY, prefix=prefix, name=prefix) as limiter,
        admin(redis_url) as server,
    ):
        limiter.try_acquire("mine")
        (mine,) = connections_named(server, prefix)
        stop = threading.Event()

        def busy() -> None:
            while not stop.is_set():
                limiter.try_acquire("theirs")

        thread = in_background(busy)
        try:
            until(
                lambda: len(connections_named(server, prefix)) == 2, what="the other's connection"
            )
            for _ in range(5):
                server.client_kill_filter(_id=mine)
                time.sleep(0.02)  # a connection is checked only after some idle ms
                assert limiter.try_acquire("mine")
                mine = max(connections_named(server, prefix), key=int)
        finally:
            stop.set()
            thread.join()
