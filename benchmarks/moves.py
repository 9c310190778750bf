"""Clusters that move, and primaries that are replaced: `python -m benchmarks.moves`.

Two threads, or tasks, call ten times in 0.1 s while servers move, and until nothing has failed for
three seconds. It prints a row for each way to move and for `Limiter` and `AsyncLimiter`, as
docs/guarantees.md has them. Another server: DISTWINDOW_REDIS_SERVER=PROGRAM.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from typing import Any, NamedTuple

import redis

from benchmarks.measure import log
from distwindow import StoreError
from tests.harness import HARNESSES, PLENTY, Call, Harness
from tests.servers import Cluster, RedisProcess, SentinelSet, find_binary, server_version

PREFIX = "move"
TIMEOUT_S = 0.25
CALM_S = 3.0
LONGEST_S = 20.0
NEEDS_A_REPLICA = {"min-replicas-to-write": 1, "min-replicas-max-lag": 1}


class Scene(NamedTuple):
    """Servers, and what is done to them."""

    url: str
    keys: Sequence[str]
    move: Callable[[], object]
    new: Callable[[], RedisProcess | None] = lambda: None
    """The primary that sentinels name; None on a cluster, whose old one redirects calls."""
    limits: Any = PLENTY


@contextmanager
def planned(replicas: int, **config: int) -> Iterator[Scene]:
    """A failover that somebody asks for: the old primary answers until a sentinel demotes it."""
    with SentinelSet(replicas, config=config) as nodes, nodes.sentinels[0].client() as sentinel:
        time.sleep(2)  # replicas are in time from their second ping on
        yield Scene(
            nodes.url,
            ["k"],
            lambda: sentinel.execute_command("SENTINEL", "FAILOVER", nodes.service),
            lambda: nodes.primary,
        )


@contextmanager
def cut_off(**config: int) -> Iterator[Scene]:
    """The primary answers neither sentinels nor replicas any more, and goes on to serve callers."""
    with SentinelSet(2, config=config) as nodes:
        old = nodes.primary
        time.sleep(2)

        def cut() -> None:
            with old.client() as client:
                client.execute_command("ACL", "SETUSER", "default", "-ping", "-info", "-psync")
                client.execute_command("CLIENT", "KILL", "TYPE", "replica")

        yield Scene(nodes.url, ["k"], cut, lambda: nodes.primary)


@contextmanager
def cluster_failover() -> Iterator[Scene]:
    """CLUSTER FAILOVER, asked of a replica."""
    with Cluster(replicas=1) as cluster:
        keys = cluster.keys_by_port()[cluster.nodes[0].port][:1]

        def fail_over() -> None:
            with cluster.nodes[cluster.masters].client() as replica:
                replica.execute_command("CLUSTER", "FAILOVER")

        yield Scene(cluster.url, keys, fail_over)


@contextmanager
def new_addresses() -> Iterator[Scene]:
    """All nodes of a cluster start again at other addresses, of which its URL names one."""
    with Cluster() as cluster:
        first = cluster.nodes[0]
        url = f"redis+cluster://127.0.0.1:{first.port},127.0.0.2:{first.port}"
        keys = [each[0] for each in cluster.keys_by_port().values()]
        yield Scene(url, keys, lambda: cluster.move("127.0.0.2", *cluster.nodes))


@contextmanager
def migrating(*limits: str) -> Iterator[Scene]:
    """A slot moves to another node, key by key."""
    with Cluster() as cluster:
        source, target, _ = cluster.nodes
        key = cluster.keys_by_port()[source.port][0]
        yield Scene(
            cluster.url,
            [key],
            lambda: cluster.migrate(Cluster.slot_of(key), source, target),
            limits=limits,
        )


WAYS: dict[str, Callable[[], Any]] = {
    "Sentinel, planned failover": lambda: planned(1),
    "the same, `min-replicas-to-write 1`, two replicas": lambda: planned(2, **NEEDS_A_REPLICA),
    "Sentinel, a primary that is cut off from all but its callers": cut_off,
    "the same, `min-replicas-to-write 1`": lambda: cut_off(**NEEDS_A_REPLICA),
    "`CLUSTER FAILOVER`": cluster_failover,
    "a cluster whose nodes all get new addresses": new_addresses,
    "a slot that migrates, one limit on its key": lambda: migrating(PLENTY),
    "a slot that migrates, two limits": lambda: migrating(PLENTY, "1000000/day"),
}


def run(harness: Harness, scene: Scene) -> list[str]:
    """Return the cells of a row: calls, failures, seconds from the first to the last of them,
    the longest call, and seconds for which the old primary was used after another was named.
    """
    limiter = harness.limiter(scene.url, scene.limits, prefix=PREFIX, timeout=TIMEOUT_S)
    calls: list[Call] = []
    named = left = None
    old = scene.new()
    while len(calls) < 20:
        calls = limiter.burst(list(scene.keys) * 20, at_once=2)
    calls.clear()
    mover = threading.Thread(target=scene.move)
    mover.start()
    began = calm_since = time.perf_counter()
    while (now := time.perf_counter()) < began + LONGEST_S:
        for call in limiter.burst(list(scene.keys) * 2, at_once=2):
            calls.append(call)
            if isinstance(call.outcome, StoreError) or mover.is_alive():
                calm_since = now
        new = scene.new()
        if old is not None and new is not None and new is not old:
            named = named or now
            left = left or (now if counted(new) else None)
        if now > calm_since + CALM_S and (old is None or left is not None):
            break
        time.sleep(0.02)
    mover.join()
    failed = [call.ended for call in calls if isinstance(call.outcome, StoreError)]
    others = [c.outcome for c in calls if not c.admitted and not isinstance(c.outcome, StoreError)]
    assert not others, others[0]
    return [
        str(len(calls)),
        str(len(failed)),
        f"{failed[-1] - failed[0]:.2f} s" if failed else "",
        f"{1000 * max(call.seconds for call in calls):.0f} ms",
        f"{left - named:.2f} s" if named is not None and left is not None else "",
    ]


def counted(server: RedisProcess) -> bool:
    """True if calls came to this primary, by its own count and not by that of replication."""
    with server.client() as client:
        stats: Any = client.info("commandstats")
        role: Any = client.execute_command("ROLE")
    return bool(role[0] == "master" and stats.get("cmdstat_evalsha", {}).get("calls", 0) > 0)


def main() -> None:
    version = ".".join(map(str, server_version(find_binary())))
    log(f"{find_binary().name} {version}, redis-py {redis.__version__}")
    print("| | limiter | calls | failed | within | longest call | on the old primary |")
    print("|---|---|---:|---:|---:|---:|---:|")
    for name, open_scene in WAYS.items():
        for kind in ("sync", "async"):
            with open_scene() as scene, closing(HARNESSES[kind]()) as harness:
                cells = run(harness, scene)
            face = "`Limiter`" if kind == "sync" else "`AsyncLimiter`"
            print("|", " | ".join([name, face, *cells]), "|", flush=True)


if __name__ == "__main__":
    main()
