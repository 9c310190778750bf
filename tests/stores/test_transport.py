"""Calls to a server: one round trip, scripts that the server has lost, and the guard in replies."""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest

from distwindow import StoreTimeout, StoreUnavailable
from tests.clock_and_stores import ManualClock
from tests.harness import PLENTY, Harness, admin, count_outcomes, used
from tests.servers import Cluster, Proxy, Standalone
from tests.stores.responder import Responder, Words, admitting, guard_of


def counted(server: Any, *commands: str) -> int:
    """Return how often the server has executed `commands`, sent by clients or called by scripts."""
    stats = server.info("commandstats")
    return sum(stats.get(f"cmdstat_{name}", {"calls": 0})["calls"] for name in commands)


# -- one round trip -------------------------------------------------------------------------------


@pytest.mark.compat
@pytest.mark.parametrize("limits", [PLENTY, [PLENTY, "5/day"], "3/hour"], ids=str)
@pytest.mark.parametrize("clock", ["server", "client"])
def test_an_admission_is_one_round_trip(
    harness: Harness, proxy: Proxy, prefix: str, limits: Any, clock: str
) -> None:
    """This holds also for the first call of a key, for several limits, and for a new refusal. A
    cached refusal takes no round trip.
    """
    limiter = harness.limiter(
        proxy.url, limits, prefix=prefix, clock=clock, flush_interval=3600
    )  # refusals are flushed in round trips of their own
    limiter.each(["warm"] * 6)
    before = proxy.requests
    decisions = limiter.each(["k"] * 10)
    assert proxy.requests - before == sum(d.source == "store" for d in decisions)
    refused = [d.source for d in decisions if not d.allowed]
    assert refused == ["store", *["deny_cache"] * (len(refused) - 1)][: len(refused)]
    assert all(d.source == "store" for d in decisions if d.allowed)


def test_several_keys_are_one_round_trip(harness: Harness, proxy: Proxy, prefix: str) -> None:
    limiter = harness.limiter(proxy.url, prefix=prefix)
    limiter.try_acquire("warm")
    before = proxy.requests
    items = [("a", "10/second", 2), ("b", ["10/minute", "20/hour"])]
    assert limiter.try_acquire_all(items)
    assert proxy.requests - before == 1


def test_equal_calls_at_once_share_round_trips_and_charge_exactly(
    harness: Harness, proxy: Proxy, redis_url: str, prefix: str
) -> None:
    limiter = harness.limiter(proxy.url, "700/hour", prefix=prefix, timeout=5)
    limiter.try_acquire("k")
    before = proxy.requests
    calls = limiter.burst(["k"] * 999, at_once=16)
    assert count_outcomes(calls) == {"ok": 699, "refused": 300}
    # The outcome of an admitted call is a decision.
    remaining = [c.outcome.remaining for c in calls if c.admitted]  # type: ignore[union-attr]
    assert sorted(remaining) == list(range(699))
    assert proxy.requests - before < 999
    with admin(redis_url) as server:
        assert used(server, prefix) == 700


@pytest.mark.parametrize(("clock", "asks"), [("server", True), ("client", False)])
def test_time_is_sent_once_and_never_with_the_clients_clock(
    harness: Harness, clock: str, asks: bool
) -> None:
    with Standalone() as own, own.client() as server:
        limiter = harness.limiter(own.url, clock=clock)
        limiter.each(["k"] * 5)
        server.config_resetstat()
        limiter.each(["k"] * 5)
        assert counted(server, "evalsha") == 5
        assert counted(server, "eval", "client", "hello", "select", "ping", "script") == 0
        assert counted(server, "time") == (5 if asks else 0)  # by the script


def test_with_the_clients_clock_the_time_of_the_caller_decides(
    harness: Harness, redis_url: str, prefix: str
) -> None:
    clock = ManualClock(1_000_000_000_000)
    limiter = harness.limiter(redis_url, "2/second", prefix=prefix, clock="client", time=clock)
    decisions = limiter.each(["k"] * 3)
    assert [d.allowed for d in decisions] == [True, True, False]
    assert {d.now_ms for d in decisions} == {clock.now_ms()}
    assert decisions[2].retry_after == 1.0
    clock.move(999)
    assert not limiter.try_acquire("k")
    clock.move(1)
    assert limiter.try_acquire("k")


def test_a_connection_that_the_server_has_closed_costs_no_call(
    harness: Harness, redis_url: str, prefix: str
) -> None:
    limiter = harness.limiter(redis_url, prefix=prefix, name=prefix)
    with admin(redis_url) as server:
        for _ in range(3):
            assert limiter.try_acquire("k")
            (ours,) = [one for one in server.client_list() if one["name"] == prefix]
            server.client_kill_filter(_id=ours["id"])
            time.sleep(0.02)  # a connection that has just been used is not looked at
        assert limiter.try_acquire("k").remaining == 1_000_000 - 4


# -- scripts that the server has lost -------------------------------------------------------------


@pytest.mark.compat
def test_a_lost_script_costs_one_round_trip_more(
    harness: Harness, proxy: Proxy, redis_url: str, prefix: str
) -> None:
    limiter = harness.limiter(proxy.url, prefix=prefix)
    limiter.each(["k"] * 3)
    with admin(redis_url) as server:
        for _ in range(3):
            server.script_flush()
            before = proxy.requests
            assert limiter.try_acquire("k")
            assert proxy.requests - before == 2
            assert limiter.try_acquire("k")
            assert proxy.requests - before == 3
        assert used(server, prefix) == 9


@pytest.mark.slow
def test_scripts_that_are_lost_all_the_time_under_load(harness: Harness, prefix: str) -> None:
    with Standalone() as own, own.client() as server:
        limiter = harness.limiter(own.url, prefix=prefix, timeout=5)
        stop = threading.Event()
        load = limiter.load([f"k{i}" for i in range(5)], stop)
        for _ in range(6):
            time.sleep(0.05)  # some calls load the script, and the others find it
            server.script_flush()
        calls = load.result()
        assert set(count_outcomes(calls)) == {"ok"}
        assert used(server, prefix) == len(calls)


@pytest.mark.compat
def test_in_a_cluster_a_script_is_loaded_on_the_node_of_the_key_only(
    harness: Harness, cluster: Cluster, cluster_url: str, prefix: str
) -> None:
    limiter = harness.limiter(cluster_url, prefix=prefix, timeout=5)
    limiter.try_acquire("k")
    home = cluster.node_of(f"{prefix}:{{k}}:360000:10")
    clients = {node.port: node.client() for node in cluster.nodes}
    try:
        for client in clients.values():
            client.script_flush()
            client.config_resetstat()
        assert limiter.try_acquire("k")
        asked = {port: counted(c, "evalsha", "eval") for port, c in clients.items()}
        assert asked == {port: 2 if port == home.port else 0 for port in clients}
        assert sum(counted(c, "script|load", "script") for c in clients.values()) == 0
    finally:
        for client in clients.values():
            client.close()


# -- the guard in replies -------------------------------------------------------------------------

STRANGE = {
    "another echo": lambda words: admitting(words, b"9999999999999.999999"),
    "a refusal with another echo": lambda words: (
        b"*8\r\n$20\r\n9999999999999.999999\r\n:-1\r\n:%d\r\n:1\r\n:0\r\n:9\r\n:9\r\n:0\r\n"
        % int(time.time() * 1000)
    ),
    "no echo": lambda words: b"*3\r\n$5\r\nhello\r\n:9\r\n:1\r\n",
    "an empty list": lambda words: b"*0\r\n",
    "a short list": lambda words: b"*1\r\n$20\r\n%s\r\n" % guard_of(words),
    "a status": lambda words: b"+OK\r\n",
    "a number": lambda words: b":1\r\n",
    "a string": lambda words: b"$3\r\nabc\r\n",
    "nothing": lambda words: b"$-1\r\n",
    "not Redis's language": lambda words: b"HTTP/1.1 400 Bad Request\r\n\r\n",
}


@pytest.mark.parametrize("strange", STRANGE)
def test_a_reply_without_the_guard_is_not_used_and_its_connection_is_dropped(
    harness: Harness, strange: str
) -> None:
    with Responder() as server:
        limiter = harness.limiter(server.url)
        limiter.each(["k"] * 2)
        sent, connections = len(server.calls), server.connections
        server.script = STRANGE[strange]
        with pytest.raises(StoreUnavailable) as caught:
            limiter.try_acquire("k")
        assert caught.value.charged is None
        assert len(server.calls) == sent + 1, "a call whose outcome is unknown was sent again"
        server.script = admitting
        assert limiter.try_acquire("k")
        assert server.connections == connections + 1


def test_a_call_that_came_past_its_deadline_is_no_admission(harness: Harness) -> None:
    with Responder() as server:
        limiter = harness.limiter(server.url)
        limiter.each(["k"] * 2)
        server.script = lambda words: (
            b"*3\r\n$20\r\n%s\r\n:-2\r\n:%d\r\n" % (guard_of(words), int(time.time() * 1000))
        )
        with pytest.raises(StoreTimeout) as caught:
            limiter.try_acquire("k")
        assert caught.value.charged is False


def test_after_a_duplicate_reply_no_caller_gets_the_reply_of_another(harness: Harness) -> None:
    """Each call gets its own decision or an error, never the decision of another call."""
    with Responder() as server:
        limiter = harness.limiter(server.url)
        limiter.each(["k"] * 2)

        def twice(words: Words) -> bytes:
            return admitting(words) * 2

        outcomes: list[str] = []
        for turn in range(10):
            server.script = twice if turn == 2 else admitting
            sent = len(server.calls)
            (call,) = limiter.burst(["k"])
            assert len(server.calls) == sent + 1
            assert call.charged in (True, None)
            outcomes.append("lost" if call.charged is None else "ok")
        assert outcomes.count("lost") <= 1
        assert outcomes[-3:] == ["ok"] * 3


def test_swapped_replies_are_never_given_to_the_wrong_caller(harness: Harness) -> None:
    """There are two callers with different limits; a caller whose reply has the guard of the other
    gets an error.
    """
    with Responder() as server:
        limiter = harness.limiter(server.url)
        limiter.each(["a", "b"] * 2)
        last: list[bytes] = [b"9999999999999.000000"]

        def swap(words: Words) -> bytes:
            mine, last[0] = last[0], guard_of(words)
            return admitting(words, mine)

        server.script = swap
        calls = limiter.burst(["a", "b"] * 20, at_once=2)
        assert set(count_outcomes(calls)) == {"StoreUnavailable"}
        assert {call.charged for call in calls} == {None}
        server.script = admitting
        assert limiter.try_acquire("a")


def test_without_the_guard_check_a_swapped_reply_would_be_used(
    harness: Harness, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The test above can fail: without the check, callers get the replies of others."""

    class Anything(bytes):
        __hash__ = bytes.__hash__

        def __eq__(self, other: object) -> bool:
            return True

        def __ne__(self, other: object) -> bool:
            return False

    from distwindow.ring.command import ServerClock

    guard = ServerClock.new_stamp
    monkeypatch.setattr(ServerClock, "new_stamp", lambda self, until: Anything(guard(self, until)))
    with Responder(STRANGE["another echo"]) as server:
        assert harness.limiter(server.url).try_acquire("k")
