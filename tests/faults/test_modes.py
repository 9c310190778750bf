"""Faults that no test of one part shows: the same fault for all modes and policies at once, for
processes that call over it. `matrix.py` says which row of the matrix each test shows.

Times are printed, and not checked: a machine that is busy breaks no test.
"""

from __future__ import annotations

import asyncio
import itertools
import random
import signal
import time
from collections.abc import Mapping, Sequence
from typing import Any

import psutil
import pytest

from distwindow import AsyncLimiter, Limit
from tests.attack.children import now_ms
from tests.attack.fleet import Fleet
from tests.attack.harness import FOREVER, MODES
from tests.attack.history import (
    AWAY,
    History,
    Span,
    check_any_window,
    check_counts,
    check_deadlines,
    check_echoes,
    check_resources,
    heal_ms,
    read_history,
    read_named,
)
from tests.servers import (
    Cluster,
    DropReply,
    Proxy,
    SentinelSet,
    Standalone,
    SteppedClock,
    until,
)

POLICIES = ["raise", "allow", "deny", "local"]
TIMEOUT_S = 0.5
SLACK_MS = 5000
"""Far more than is promised (50 ms, which the figures show): only a call that hangs is so late."""


def limiter(limits: str, mode: str, policy: str, prefix: str) -> dict[str, Any]:
    """Return the arguments of one limiter of the callers."""
    share = 1.0 if policy == "local" else None
    return {
        "limits": limits, "prefix": prefix, "consistency": mode, "timeout": TIMEOUT_S,
        "on_store_error": policy, "share": share,
    }  # fmt: skip


def stored(server: Any, window: dict[str, Any], keys: list[str], count: str) -> dict[str, int]:
    """Return by key what the server has counted in a window: "passed", say."""
    return read_named(server, window["prefix"], keys, Limit(window["limits"]), count)


def callers_of(
    seed: int, url: str, windows: Mapping[str, dict[str, Any]], keys: list[str]
) -> Fleet:
    """Return a fleet that calls all these windows, and is not disturbed by itself."""
    calls = [{"window": name, "weight": 1, "keys": keys, "costs": [1]} for name in windows]
    return Fleet(random.Random(seed), url, "caller", {"windows": windows, "calls": calls})


# -- replies ---------------------------------------------------------------------------------------


@pytest.mark.slow
def test_of_twenty_replies_one_is_dropped(standalone: Standalone, prefix: str) -> None:
    """What is charged lies between admitted and admitted + unknown, in every mode and with every
    policy: for each key, and for all with what the limiters have counted as unknown. (Of leases
    that are lost with a reply, the permits are stranded.)
    """
    windows = {
        f"{mode} {policy}": limiter(FOREVER, mode, policy, f"{prefix}-{mode}-{policy}")
        for mode, policy in itertools.product(MODES, POLICIES)
    }
    keys = ["a", "b"]
    with (
        Proxy(standalone.port) as proxy,
        callers_of(1, proxy.url, windows, keys) as callers,
    ):
        callers.start("sync")
        callers.start("async")
        until(lambda: proxy.requests > 100, what="calls")
        with proxy.inject(DropReply(close=True, only=b"EVALSHA", every=20)):
            until(lambda: proxy.affected >= 40, 60, what="replies that were dropped")
        callers.end()
        history = read_history(callers.folder)
    unsure = sure = 0
    with standalone.client(decode_responses=False) as server:
        for name, window in windows.items():
            charged = stored(server, window, keys, "passed")
            leases = 0 if name.split()[0] != "leased" else proxy.affected * history.lease()
            check_counts(name, charged, history, name, more=leases)
            if not leases:
                sure += sum(history.sums(name)[0].values())
                unsure += sum(charged.values())
    assert history.unknown > 0
    assert unsure - sure <= history.unknown <= proxy.affected * 3
    print(f"late by {check_deadlines(history.timed(), SLACK_MS)} ms at most")
    assert check_echoes(history.calls) > 100
    check_resources(history)


# -- topologies ------------------------------------------------------------------------------------

FULL = "20/2s strict 10 buckets"
TOPOLOGY_WINDOWS = {
    "direct": limiter(FOREVER, "direct", "raise", "direct"),
    "share": limiter(FOREVER, "direct", "local", "share"),
    "leased": limiter(FOREVER, "leased", "allow", "leased"),
    "eventual": limiter(FOREVER, "eventual", "raise", "eventual"),
    # Limits that are always full: these callers see hardly anything but refusals.
    "full direct": limiter(FULL, "direct", "deny", "full-direct"),
    "full leased": limiter(FULL, "leased", "deny", "full-leased"),
    "full eventual": limiter(FULL, "eventual", "deny", "full-eventual"),
}


def check_topology(history: History, healthy_at: float, losses: Sequence[Span]) -> None:
    """Check what holds whichever server was lost: C2, C4, C7, and that all windows are answered by
    the store at the end.
    """
    limit = Limit(FULL)
    for mode in ("direct", "leased"):
        admitted = history.admitted(f"full {mode}")
        most = check_any_window(admitted, limit.amount, limit.interval_ms, losses)
        print(f"{most} of {limit.amount} in a window ({mode})")
    late = check_deadlines(history.timed(), SLACK_MS)
    healed = heal_ms(history.calls, healthy_at)
    print(f"healed {max(healed.values()):.0f} ms after the failover, late by {late} ms at most")
    for name, ms in healed.items():
        process, _, window = name.partition(" ")
        last = [c for c in history.of(window) if c["process"] == process][-1]
        assert last["at"] - healthy_at > ms, f"{name} has not healed: {last}"
    check_resources(history)


@pytest.mark.slow
@pytest.mark.parametrize("failure", ["killed", "zombie", "demoted"])
def test_a_primary_is_replaced_for_all_modes_and_for_callers_that_are_refused(
    failure: str,
) -> None:
    """`zombie`: the primary and its callers are frozen together until another primary serves. When
    they continue, the callers go on with the old one until it knows that it is none.
    """
    keys = ["k"]
    with (
        SentinelSet() as nodes,
        callers_of(2, nodes.url, TOPOLOGY_WINDOWS, keys) as callers,
    ):
        callers.start("sync")
        callers.start("async")
        lost = nodes.primary
        with lost.client() as server:
            until(lambda: int(server.info("stats")["total_commands_processed"]) > 1000, 20)
        began = now_ms()
        if failure == "killed":
            lost.kill()
        elif failure == "zombie":
            for client in callers.clients.values():
                client.signal(signal.SIGSTOP)
            lost.pause()
        else:
            with nodes.sentinels[0].client() as sentinel:
                sentinel.execute_command("SENTINEL", "FAILOVER", nodes.service)
        new = nodes.await_failover(lost, 30)
        if failure == "zombie":
            lost.resume()
            for client in callers.clients.values():
                client.signal(signal.SIGCONT)
        if failure != "killed":
            with lost.client() as server:
                until(lambda: server.execute_command("ROLE")[0] == "slave", 20, what="demotion")
        healthy_at = now_ms()
        print(f"failover {healthy_at - began:.0f} ms")
        time.sleep(1.5)  # calls on the new primary
        callers.end()
        history = read_history(callers.folder)
        check_topology(history, healthy_at, [(began - 500, healthy_at + 1000)])
        with new.client(decode_responses=False) as server:
            for name in ("direct", "share", "eventual", "leased"):
                charged = stored(server, TOPOLOGY_WINDOWS[name], keys, "passed")
                # A lease and its refund may be on both sides of the failover.
                stranded = 10 * history.lease() if name == "leased" else 0
                check_counts(name, charged, history, name, more=stranded, lost=True)


@pytest.mark.slow
@pytest.mark.parametrize("failure", ["one of three is dead", "replaced", "resharded"])
def test_a_cluster_that_changes_for_all_modes_and_for_callers_that_are_refused(
    failure: str,
) -> None:
    config = {"cluster-require-full-coverage": "no"}
    with Cluster(replicas=failure == "replaced", config=config) as cluster:
        by_port = cluster.keys_by_port()
        lost, other = cluster.nodes[:2]
        keys = [key for port in by_port for key in by_port[port][:2]]
        with callers_of(3, cluster.url, TOPOLOGY_WINDOWS, keys) as callers:
            callers.start("sync")
            callers.start("async")
            with lost.client() as server:
                until(lambda: int(server.info("stats")["total_commands_processed"]) > 500, 20)
            began = now_ms()
            if failure == "resharded":
                for key in by_port[lost.port][:2]:
                    cluster.migrate(cluster.slot_of(key), lost, other)
            else:
                lost.kill()
            if failure == "replaced":
                until(lambda: cluster.node_of(by_port[lost.port][0]) is not lost, 30)
            elif failure == "one of three is dead":
                time.sleep(2)  # calls of the other two
                lost.restart()
                until(lambda: _is_ok(cluster), 30, what="a cluster that is whole again")
            healthy_at = now_ms()
            print(f"outage {healthy_at - began:.0f} ms")
            time.sleep(1.5)  # calls of all
            callers.end()
            history = read_history(callers.folder)
    losses = [] if failure == "resharded" else [(began - 500, healthy_at + 1000)]
    check_topology(history, healthy_at, losses)
    if failure == "one of three is dead":
        others = {*keys} - {*by_port[lost.port]}
        answered = [call for call in history.calls if call["key"] in others]
        away = [call for call in answered if call["by"] in AWAY]
        assert not away, away[:5]


def _is_ok(cluster: Cluster) -> bool:
    for node in cluster.nodes:
        with node.client() as client:
            if "cluster_state:ok" not in str(client.execute_command("CLUSTER", "INFO")):
                return False
    return True


# -- the clock -------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.skipif(SteppedClock.compiler() is None, reason="a C compiler makes the clock")
@pytest.mark.parametrize("mode", ["direct", "leased"])
def test_the_time_of_day_of_the_server_is_stepped(mode: str) -> None:
    """Each step admits at most the limit once more, and calls go on within an interval after it."""
    limit = Limit("20/second strict 10 buckets")
    windows = {"full": limiter(str(limit), mode, "raise", "clock")}
    with (
        SteppedClock() as clock,
        Standalone(env=clock.env) as server,
        callers_of(4, server.url, windows, ["k"]) as callers,
    ):
        callers.start("sync")
        callers.start("async")
        with server.client() as client:
            until(lambda: int(client.info("stats")["total_commands_processed"]) > 500, 20)
        steps = []
        for seconds in (0.5, -0.5, 1, -1, 3600, -3600):
            steps.append(now_ms())
            clock.step(seconds)
            time.sleep(2)  # calls by this time
        callers.end()
        history = read_history(callers.folder)
    # The server's time jumps, so windows are those of CLOCK_MONOTONIC. A call is decided after it
    # began, so a window is shorter than the limit's by the longest call.
    admitted = [one._replace(now_ms=one.at) for one in history.admitted("full")]
    longest = max(call["took"] for call in history.calls)
    around = [(at - limit.interval_ms, at + longest) for at in steps]
    most = check_any_window(admitted, limit.amount, limit.interval_ms - longest, around)
    print(f"{most} of {limit.amount} in a window")
    for at in steps:
        went_on = min(one.at for one in admitted if one.at > at)
        print(f"{went_on - at:.0f} ms after a step")
        assert went_on - at < 2000
    check_deadlines(history.timed(), SLACK_MS)


# -- keys ------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.fleet
@pytest.mark.timeout(500)
async def test_twice_as_many_keys_as_are_kept() -> None:
    """The server takes what docs/operations.md says (233 B for a ring that was called once), this
    process does not grow with the number of keys, and another key keeps its counts. (For a million
    keys: `python -m benchmarks.load`.)
    """
    kept, at_once = 20_000, 2_000
    keys = 2 * kept
    with Standalone() as server, server.client() as admin:
        async with AsyncLimiter(
            server.url, "100/hour", consistency="leased", timeout=30, max_local_keys=kept
        ) as shared:
            for _ in range(5):
                await shared.try_acquire("other")
            before = admin.info("memory")["used_memory"]
            resident = []
            for first in range(0, keys, at_once):
                names = [f"user:{number}" for number in range(first, first + at_once)]
                assert all(await asyncio.gather(*map(shared.try_acquire, names)))
                resident.append(psutil.Process().memory_info().rss)
            each = (admin.info("memory")["used_memory"] - before) / keys
            grown = resident[-1] - resident[len(resident) * 6 // 10]
            print(f"{each:.0f} B of the server for each key; this process grew by {grown} B")
            assert each < 260
            assert grown < 6_000_000
            assert (await shared.stats("other")).passed == 5
