"""Calls to a server: one round trip, scripts that the server has lost, the guard in replies, and
what errors mean.
"""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest
import redis

from distwindow import ConfigurationError, StoreError, StoreUnavailable
from tests.integration.harness import PLENTY, Harness, LimiterAdapter, admin, count_outcomes, used
from tests.integration.responder import Responder, Words, admitting, guard_of
from tests.servers import Cluster, Proxy, Standalone, until
from tests.unit.clock_and_stores import ManualClock


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

    from distwindow.store.redis.guard import ServerClock

    guard = ServerClock.new_guard
    monkeypatch.setattr(ServerClock, "new_guard", lambda self, until: Anything(guard(self, until)))
    with Responder(STRANGE["another echo"]) as server:
        assert harness.limiter(server.url).try_acquire("k")


# -- what each error reply means ------------------------------------------------------------------

NOT_EXECUTED = [
    "LOADING Redis is loading the dataset in memory",
    "BUSY Redis is busy running a script. You can only call SCRIPT KILL or SHUTDOWN NOSAVE.",
    "OOM command not allowed when used memory > 'maxmemory'.",
    "READONLY You can't write against a read only replica.",
    "MISCONF Redis is configured to save RDB snapshots, but it's currently unable to persist",
    "NOREPLICAS Not enough good replicas to write.",
    "CLUSTERDOWN Hash slot not served",
    "CLUSTERDOWN The cluster is down",
    "TRYAGAIN Multiple keys request during rehashing of slot",
    "MASTERDOWN Link with MASTER is down and replica-serve-stale-data is set to 'no'.",
    "ERR max number of clients reached",
]
WRAPPED = [
    "ERR Error running script (call to f_{sha}): @user_script:1: @user_script: 1: -{error}",
    "ERR Error running script (call to f_{sha}): @user_script:12: -{error}",
    "{error} script: {sha}, on @user_script:5.",
]


def wrapped(error: str, wrapping: str) -> bytes:
    return f"-{wrapping.format(error=error, sha='f' * 40)}\r\n".encode()


@pytest.mark.parametrize("error", NOT_EXECUTED, ids=lambda error: str(error).split()[0])
def test_a_call_that_was_surely_not_executed_is_sent_once_more(
    harness: Harness, error: str
) -> None:
    """This holds in every form in which old servers and other implementations wrap the error of a
    script.
    """
    with Responder() as server:
        limiter = harness.limiter(server.url, timeout=5)
        limiter.each(["k"] * 2)
        for wrapping in ("{error}", *WRAPPED):
            reply = wrapped(error, wrapping)
            sent = len(server.calls)
            # mypy cannot infer a lambda whose parameter has a default.
            server.script = lambda words, reply=reply: reply  # type: ignore[misc]
            with pytest.raises(StoreUnavailable, match=error.split()[0]) as caught:
                limiter.try_acquire("k")
            assert caught.value.charged is False
            assert len(server.calls) == sent + 2

            once = [reply]
            # mypy cannot infer a lambda whose parameter has a default.
            server.script = lambda words, once=once: once.pop() if once else admitting(words)  # type: ignore[misc]
            assert limiter.try_acquire("k")
            assert len(server.calls) == sent + 4


@pytest.mark.parametrize("error", ["NOSCRIPT No matching script. Please use EVAL."])
def test_a_server_that_never_has_the_script_gets_two_commands_for_each_attempt(
    harness: Harness, error: str
) -> None:
    with Responder(lambda words: wrapped(error, "{error}")) as server:
        with pytest.raises(StoreUnavailable) as caught:
            harness.limiter(server.url).try_acquire("k")
        assert caught.value.charged is False
        assert 2 <= len(server.calls) <= 4


@pytest.mark.parametrize(
    ("error", "remedy"),
    [
        ("NOPERM this user has no permissions to run the 'evalsha' command", "ACL"),
        ("NOPERM No permissions to access a key", "ACL"),
        ("ERR The user executing the script can't run this command or subcommand", "ACL"),
        ("NOAUTH Authentication required.", "password"),
        ("WRONGPASS invalid username-password pair or user is disabled.", "password"),
        ("WRONGTYPE Operation against a key holding the wrong kind of value", "prefix"),
        ("ERR unknown command 'EVALSHA', with args beginning with: 'OOM' 'BUSY'", "6.2"),
        ("ERR unknown command `evalsha`, with args beginning with: `READONLY`, ", "6.2"),
        ("ERR Error running script (call to f_0): @user_script:1: -NOPERM no", "ACL"),
        ("ERR Error running script: Write commands not allowed after non deterministic", "6.2"),
        ("ERR value is not an integer or out of range", "prefix"),
        ("ERR something that nobody has thought of", ""),
    ],
)
def test_a_call_that_can_never_work_is_a_configuration_error_and_not_repeated(
    harness: Harness, error: str, remedy: str
) -> None:
    with Responder() as server:
        limiter = harness.limiter(server.url, prefix="shop")
        limiter.each(["k:OOM"] * 2)
        sent = len(server.calls)
        server.script = lambda words: f"-{error}\r\n".encode()
        with pytest.raises(ConfigurationError) as caught:
            limiter.try_acquire("k:OOM")
        message = str(caught.value)
        assert error in message
        assert remedy in message.replace(error, "")
        assert "shop:{k:OOM}" in message
        assert len(server.calls) == sent + 1


def test_a_key_of_another_type_is_named(harness: Harness, redis_url: str, prefix: str) -> None:
    with admin(redis_url) as server:
        server.set(f"{prefix}:{{k}}:360000:10", "somebody else's")
        with pytest.raises(ConfigurationError, match=rf"WRONGTYPE.*{prefix}.*prefix"):
            harness.limiter(redis_url, prefix=prefix).try_acquire("k")
        assert server.get(f"{prefix}:{{k}}:360000:10") == "somebody else's"


def test_a_hash_that_is_no_ring_is_never_counted_in(
    harness: Harness, redis_url: str, prefix: str
) -> None:
    with admin(redis_url) as server:
        name = f"{prefix}:{{k}}:360000:10"
        server.hset(name, mapping={"head": "yesterday", "used": "x", "owner": "somebody"})
        limiter = harness.limiter(redis_url, prefix=prefix)
        for ask in (limiter.try_acquire, limiter.peek, limiter.stats):
            try:
                ask("k")
            except (ConfigurationError, StoreError):
                continue
        assert limiter.try_acquire("other")


# -- errors of real servers -----------------------------------------------------------------------


def refused_for_now(limiter: LimiterAdapter, token: str, key: str = "k") -> None:
    with pytest.raises(StoreUnavailable, match=token) as caught:
        limiter.try_acquire(key)
    assert caught.value.charged is False


def rings(server: Any) -> dict[str, Any]:
    return {name: server.hgetall(name) for name in sorted(server.scan_iter())}


@pytest.mark.parametrize("limits", ["100/400ms", ["100/400ms", "200/2s"]], ids=str)
@pytest.mark.slow
def test_out_of_memory_never_leaves_a_partial_write(harness: Harness, limits: Any) -> None:
    """This is tested at every age of a ring: in its bucket, in the next one, in a later one, and
    after its window. New rings are refused. A ring whose rotation frees more memory than it takes
    may be written.
    """
    with Standalone() as own, own.client() as server:
        limiter = harness.limiter(own.url, limits)
        widths = [limit.bucket_ms for limit in limiter.limiter.limits]
        assert widths[0] == 40
        limiter.each(["k"] * 3)
        for pause in (0.0, 0.03, 0.05, 0.09, 0.14, 0.41):
            time.sleep(pause)  # the ages of a ring, on the server's clock
            limiter.each(["k"] * 2)
            time.sleep(pause)
            server.config_set("maxmemory", 1)
            refused_for_now(limiter, "OOM", "new")
            before = rings(server)
            (call,) = limiter.burst(["k"])
            if not call.admitted:
                assert count_outcomes([call]) == {"StoreUnavailable": 1}
                assert call.charged is False
                after = rings(server)
                assert {name: after.get(name, ring) for name, ring in before.items()} == before
            server.config_set("maxmemory", 0)
            assert not [name for name in rings(server) if "new" in name]
            until(lambda: sums_are_right(limiter, server), what="totals that agree with buckets")


def sums_are_right(limiter: LimiterAdapter, server: Any) -> bool:
    """True if the total of each ring is the sum of its buckets. They may differ while a bucket
    ends, so callers repeat the check.
    """
    limiter.try_acquire("k")
    stats = limiter.stats("k")
    held = [ring["used"] for ring in rings(server).values()]
    return sorted(str(window.passed) for window in stats.windows) == sorted(held)


def test_a_read_only_replica(harness: Harness) -> None:
    with Standalone() as own, own.client() as server:
        limiter = harness.limiter(own.url)
        limiter.each(["k"] * 2)
        server.replicaof("127.0.0.1", 1)
        refused_for_now(limiter, "READONLY")
        server.replicaof("NO", "ONE")
        assert limiter.try_acquire("k")


def test_a_server_with_too_few_replicas_refuses_for_now(harness: Harness) -> None:
    with Standalone() as own, own.client() as server:
        limiter = harness.limiter(own.url)
        limiter.each(["k"] * 2)
        before = rings(server)
        server.config_set("min-replicas-to-write", 1)
        refused_for_now(limiter, "NOREPLICAS")
        assert rings(server) == before
        server.config_set("min-replicas-to-write", 0)
        assert limiter.try_acquire("k").remaining == 1_000_000 - 3


def is_busy(server: Standalone) -> bool:
    with server.client() as client:
        try:
            client.ping()
        except redis.ResponseError as exc:
            return "BUSY" in str(exc)
    return False


@pytest.mark.slow
def test_a_server_busy_with_a_script(harness: Harness) -> None:
    with Standalone(config={"lua-time-limit": 20}) as own, own.client() as server:
        limiter = harness.limiter(own.url, timeout=1)
        limiter.each(["k"] * 2)

        def block_server() -> None:
            with own.client() as other:
                with pytest.raises(Exception, match=r"(?i)script"):
                    other.eval("while true do end", 0)

        thread = threading.Thread(target=block_server)
        thread.start()
        until(lambda: is_busy(own), what="the server is busy")
        refused_for_now(limiter, "BUSY")
        server.execute_command("SCRIPT", "KILL")
        thread.join()
        assert limiter.try_acquire("k").remaining == 1_000_000 - 3


@pytest.mark.slow
def test_a_server_with_too_many_clients_is_used_again_later(harness: Harness) -> None:
    with Standalone() as own, own.client() as server:
        server.ping()
        server.config_set("maxclients", 1)
        limiter = harness.limiter(own.url)
        with pytest.raises(StoreUnavailable) as caught:
            limiter.try_acquire("k")
        assert caught.value.charged is False
        server.config_set("maxclients", 100)
        time.sleep(0.15)  # for 0.1 s after a failure calls fail without connecting
        assert limiter.try_acquire("k")
