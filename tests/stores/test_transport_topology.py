"""Keys move: slots move from node to node; primaries are killed, frozen or demoted.

What was acknowledged is counted, whichever node serves it; a failure of one shard does not affect
the others; and calls find the new node by themselves.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from typing import Any

import pytest

from distwindow import Concurrency, StoreError, StoreUnavailable
from tests.harness import Call, Harness, LimiterAdapter, count_outcomes, in_time, used
from tests.servers import Cluster, RedisProcess, SentinelSet, until

pytestmark = [pytest.mark.slow, pytest.mark.timeout(120)]

PREFIX = "move"


def held(cluster: Cluster) -> int:
    total = 0
    for node in cluster.nodes:
        if node.alive:
            with node.client() as client:
                if client.execute_command("ROLE")[0] == "master":
                    total += used(client, PREFIX)
    return total


@contextmanager
def loaded(limiter: LimiterAdapter, keys: list[str], at_once: int = 4) -> Iterator[list[Call]]:
    """Call in the background. The list of calls is complete after the `with`."""
    load = limiter.load(keys, threading.Event(), at_once)
    calls: list[Call] = []
    try:
        yield calls
    finally:
        calls.extend(load.result())


def only_store_errors(calls: list[Call]) -> None:
    others = [c.outcome for c in calls if not c.admitted and not isinstance(c.outcome, StoreError)]
    assert not others, others[:3]


def check_conserved(calls: list[Call], count: int, before: int = 0) -> None:
    admitted = sum(call.admitted for call in calls) + before
    unknown = sum(call.charged is None for call in calls)
    assert admitted <= count <= admitted + unknown, f"{count}: {before} and {count_outcomes(calls)}"


# -- cluster --------------------------------------------------------------------------------------


@pytest.mark.parametrize("limits", ["1000000/hour", ["1000000/hour", "1000000/day"]], ids=str)
def test_slots_that_move_under_load_lose_and_repeat_nothing(harness: Harness, limits: Any) -> None:
    with Cluster() as cluster:
        limiter = harness.limiter(cluster.url, limits, prefix=PREFIX, timeout=3)
        keys_by_port = cluster.keys_by_port()
        source, target, _ = cluster.nodes
        moving, staying = keys_by_port[source.port][:5], keys_by_port[target.port][:3]
        before = len(limiter.each(moving + staying))
        with loaded(limiter, moving + staying) as calls:
            for key in moving:
                cluster.migrate(Cluster.slot_of(key), source, target)
            cluster.migrate(Cluster.slot_of(moving[0]), target, source)
            time.sleep(0.3)  # calls go on by the new map
        rings = 1 if isinstance(limits, str) else 2
        # While one of two rings has moved, calls wait.
        assert set(count_outcomes(calls)) == {"ok"}
        assert held(cluster) == rings * (before + len(calls))
        assert all(call.admitted for call in limiter.burst(moving + staying))


@pytest.mark.parametrize("consistency", ["direct", "leased", "eventual"])
def test_a_window_that_ends_while_its_slot_migrates_begins_anew(
    harness: Harness, consistency: str
) -> None:
    with Cluster() as cluster:
        limiter = harness.limiter(
            cluster.url, "100/second", prefix=PREFIX, timeout=3, consistency=consistency
        )
        source, target, _ = cluster.nodes
        keys = cluster.keys_by_port()[source.port][:3]
        with ExitStack() as stack:
            migrations = [
                stack.enter_context(cluster.migration(Cluster.slot_of(key), source, target))
                for key in keys
            ]
            for key, migration in zip(keys, migrations, strict=True):
                only_admissions(limiter.burst([key] * 4))
                migration.begin()
            time.sleep(1.05)
            for key, migration in zip(keys, migrations, strict=True):
                only_admissions(limiter.burst([key] * 4))
                migration.end()
                only_admissions(limiter.burst([key] * 4))


def test_slots_are_granted_in_turn_while_their_slot_of_the_cluster_migrates() -> None:
    with Cluster() as cluster, Concurrency(cluster.url, 1, prefix=PREFIX, timeout=3) as slots:
        source, target, _ = cluster.nodes
        (key, *_) = cluster.keys_by_port()[source.port]
        is_over = threading.Event()

        def hold_in_turn() -> int:
            held = 0
            while not is_over.is_set():
                with slots.hold(key, timeout=10):
                    time.sleep(0.005)
                held += 1
            return held

        with cluster.migration(Cluster.slot_of(key), source, target) as migration:
            migration.begin()
            with ThreadPoolExecutor() as threads:
                holding = [threads.submit(hold_in_turn) for _ in range(4)]
                time.sleep(0.5)
                assert not migration.move_key(), "the target has the key, which was new"
                time.sleep(0.5)
                is_over.set()
                assert min(each.result() for each in holding) > 0
            migration.end()
        assert slots.try_hold(key)


def only_admissions(calls: list[Call]) -> None:
    assert set(count_outcomes(calls)) == {"ok"}, calls


@pytest.mark.parametrize("failure", ["killed", "frozen"])
def test_a_dead_primary_does_not_affect_the_other_shards(harness: Harness, failure: str) -> None:
    timeout = 0.3
    with Cluster(config={"cluster-require-full-coverage": "no"}) as cluster:
        limiter = harness.limiter(cluster.url, prefix=PREFIX, timeout=timeout)
        keys_by_port = cluster.keys_by_port()
        lost, *alive = cluster.nodes
        others = [key for node in alive for key in keys_by_port[node.port][:3]]
        affected = keys_by_port[lost.port][:3]
        limiter.each(others + affected)
        (lost.kill if failure == "killed" else lost.pause)()
        try:
            with loaded(limiter, others) as calls:
                for _ in range(8):
                    (call,) = limiter.burst(affected[:1], at_once=1)
                    only_store_errors([call])
                    assert not call.admitted
                    in_time([call], timeout)
                    time.sleep(0.2)  # for 0.1 s after a failure calls fail without connecting
            assert set(count_outcomes(calls)) == {"ok"}
            new = harness.limiter(cluster.url, prefix=PREFIX)
            assert failure == "frozen" or set(count_outcomes(new.burst(others))) == {"ok"}
        finally:
            if failure == "frozen":
                lost.resume()


@pytest.mark.parametrize("failure", ["killed", "frozen"])
def test_a_primary_with_a_replica_is_replaced_by_itself(harness: Harness, failure: str) -> None:
    with Cluster(replicas=1) as cluster:
        limiter = harness.limiter(cluster.url, prefix=PREFIX, timeout=0.4)
        health: Any = limiter.limiter.health
        keys_by_port = cluster.keys_by_port()
        lost = cluster.nodes[0]
        key = keys_by_port[lost.port][0]
        limiter.each([key] * 2)
        (lost.kill if failure == "killed" else lost.pause)()
        began = time.monotonic()
        try:
            successor: Any = until(
                lambda: replaced(cluster, lost, Cluster.slot_of(key)), 30, what="failover"
            )
            failover = time.monotonic() - began
            calls: list[Call] = []

            def admitted() -> bool:
                calls.extend(limiter.burst([key], at_once=1))
                only_store_errors(calls[-1:])
                return calls[-1].admitted

            # There was no call during the failover, so the map of slots is stale.
            until(admitted, 5, what="a call is admitted")
            healed = time.monotonic() - began
            print(f"failover {failover:.2f} s, healed {healed - failover:.2f} s later")
            with successor.client() as client:
                assert used(client, PREFIX, key) >= 1
            until(lambda: admitted() and health().up, 10, what="the lost node is forgotten")
        finally:
            if failure == "frozen":
                lost.resume()


def replaced(cluster: Cluster, lost: RedisProcess, slot: int) -> RedisProcess | None:
    """Return the node that serves the slot by the maps of all running nodes, or None while these
    differ.
    """
    seen = set()
    for node in cluster.nodes:
        if node is lost:
            continue
        with node.client(socket_timeout=1) as client:
            info: Any = client.execute_command("CLUSTER", "INFO")
            if not isinstance(info, dict):  # redis-py parses it in some versions
                info = dict(line.split(":", 1) for line in info.splitlines() if ":" in line)
            if info["cluster_state"] != "ok":
                return None
            for low, high, master, *_ in client.execute_command("CLUSTER", "SLOTS"):
                if low <= slot <= high:
                    seen.add(int(master[1]))
    if len(seen) != 1 or lost.port in seen:
        return None
    return next(node for node in cluster.nodes if node.port in seen)


def test_a_map_that_is_wrong_is_read_again(harness: Harness) -> None:
    """Half of the slots move. Later calls go to the new node directly, without a redirection each
    time.
    """
    with Cluster() as cluster:
        limiter = harness.limiter(cluster.url, prefix=PREFIX, timeout=3)
        keys_by_port = cluster.keys_by_port()
        source, target, _ = cluster.nodes
        moving = keys_by_port[source.port]
        limiter.each(moving)
        for key in moving:
            cluster.migrate(Cluster.slot_of(key), source, target)
        limiter.each(moving[:1])
        time.sleep(1.1)  # the map is read once a second at most
        limiter.each(moving[:1])
        until(lambda: agreed(cluster, Cluster.slot_of(moving[-1]), target), what="gossip")
        # By then the limiter has read the map that its last call made it read.
        time.sleep(0.5)
        with source.client() as client:
            client.config_resetstat()
            limiter.each(moving)
            assert "cmdstat_evalsha" not in client.info("commandstats")


def agreed(cluster: Cluster, slot: int, target: RedisProcess) -> bool:
    for node in cluster.nodes:
        with node.client() as client:
            for low, high, master, *_ in client.execute_command("CLUSTER", "SLOTS"):
                if low <= slot <= high and int(master[1]) != target.port:
                    return False
    return True


# -- sentinel -------------------------------------------------------------------------------------


@pytest.mark.parametrize("failure", ["killed", "frozen", "demoted"])
def test_a_primary_under_sentinel_is_replaced_by_itself(harness: Harness, failure: str) -> None:
    with SentinelSet() as nodes:
        limiter = harness.limiter(nodes.url, prefix=PREFIX, timeout=0.5)
        limiter.each(["k"] * 2)
        lost = nodes.primary
        with loaded(limiter, ["k"], at_once=2) as calls:
            time.sleep(0.2)  # calls before the failure
            began = time.monotonic()
            if failure == "killed":
                lost.kill()
            elif failure == "frozen":
                lost.pause()
            else:
                with nodes.sentinels[0].client() as sentinel:
                    sentinel.execute_command("SENTINEL", "FAILOVER", nodes.service)
            try:
                nodes.await_failover(lost, timeout=30)
                failover = time.monotonic()
                until(lambda: limiter.burst(["k"], at_once=1)[0].admitted, 3, what="a call")
                print(
                    f"failover {failover - began:.2f} s, "
                    f"healed {time.monotonic() - failover:.2f} s later"
                )
                time.sleep(0.3)  # calls on the new primary
            finally:
                if failure == "frozen":
                    lost.resume()
            time.sleep(0.5)  # calls while the old primary becomes a replica
        only_store_errors(calls)
        assert all(call.admitted for call in calls[-20:])
        in_time(calls, 0.5)


def test_a_primary_demoted_in_place_is_left(harness: Harness) -> None:
    """Its connections stay open and it still answers; only the error READONLY shows the change."""
    with SentinelSet(sentinels=1) as nodes:
        limiter = harness.limiter(nodes.url, prefix=PREFIX, timeout=0.5)
        limiter.each(["k"] * 2)
        old, new = nodes.servers
        for sentinel in nodes.sentinels:
            sentinel.pause()  # no connection is closed by the server
        try:
            with new.client() as client:
                client.replicaof("NO", "ONE")
            with old.client() as client:
                client.replicaof(new.host, new.port)
        finally:
            for sentinel in nodes.sentinels:
                sentinel.resume()
        calls: list[Call] = []

        def moved() -> bool:
            calls.extend(limiter.burst(["k"], at_once=1))
            with new.client() as client, old.client() as other:
                masters = [c for c in (client, other) if c.execute_command("ROLE")[0] == "master"]
                return calls[-1].admitted and len(masters) == 1

        # Sentinels of Redis 6.2 ask for roles every 10 s, and nothing can make that faster.
        until(moved, 45, what="moving on")
        only_store_errors(calls)
        assert {call.charged for call in calls if not call.admitted} <= {False, None}


@pytest.mark.slow
def test_a_primary_that_was_replaced_admits_nothing_where_replicas_are_required(
    harness: Harness,
) -> None:
    """It was frozen, and no sentinel has told it: callers that reach only it would get another
    whole limit.
    """
    required = {"min-replicas-to-write": 1, "min-replicas-max-lag": 1}
    with SentinelSet(replicas=2, config=required) as nodes:
        limiter = harness.limiter(nodes.url, "20/hour", prefix=PREFIX, timeout=0.5)
        until(lambda: limiter.burst(["k"], at_once=1)[0].admitted, what="replicas that are in time")
        lost = nodes.primary
        with lost.client() as client:
            assert client.execute_command("WAIT", 2, 5000) == 2
        lost.pause()
        new = nodes.await_failover(lost, timeout=30)
        until(lambda: limiter.burst(["k"], at_once=1) and used_of(new) == 20, what="a full limit")
        for sentinel in nodes.sentinels:
            sentinel.pause()
        try:
            lost.resume()
            with lost.client() as client:
                until(lambda: client.info("replication")["connected_slaves"] == 0)
                cut_off = harness.limiter(
                    f"redis://{lost.host}:{lost.port}", "20/hour", prefix=PREFIX
                )
                for call in cut_off.burst(["k"] * 5, at_once=1):
                    assert isinstance(call.outcome, StoreUnavailable), call.outcome
                    assert "NOREPLICAS" in str(call.outcome)
                    assert call.charged is False
                assert client.execute_command("ROLE")[0] == "master"
        finally:
            for sentinel in nodes.sentinels:
                sentinel.resume()
        assert used_of(new) == 20


def used_of(server: RedisProcess) -> int:
    with server.client() as client:
        return used(client, PREFIX, "k")


def test_calls_succeed_without_sentinels_while_the_primary_runs(harness: Harness) -> None:
    with SentinelSet() as nodes:
        limiter = harness.limiter(nodes.url, prefix=PREFIX, timeout=1)
        limiter.each(["k"] * 2)
        for sentinel in nodes.sentinels:
            sentinel.kill()
        assert all(limiter.each(["k"] * 20))


def test_a_new_limiter_connects_although_one_sentinel_hangs(harness: Harness) -> None:
    with SentinelSet() as nodes:
        nodes.sentinels[0].pause()
        try:
            limiter = harness.limiter(nodes.url, prefix=PREFIX, timeout=1)

            def admitted() -> bool:
                (call,) = limiter.burst(["k"], at_once=1)
                only_store_errors([call])
                return call.admitted

            until(admitted, 10, what="a way past the sentinel that hangs")
        finally:
            nodes.sentinels[0].resume()
