"""What the errors of a server mean: whether a call is sent again, and what its caller is told."""

from __future__ import annotations

import asyncio
import itertools
import threading
import time
from contextlib import suppress
from typing import Any

import pytest
import redis

from distwindow import (
    AsyncLimiter,
    ConfigurationError,
    StoreError,
    StoreTimeout,
    StoreUnavailable,
)
from distwindow.ring.replies import PAST_DEADLINE
from tests.clock_and_stores import T0
from tests.harness import Harness, LimiterAdapter, admin, count_outcomes
from tests.servers import Standalone, until
from tests.stores.responder import Responder, admitting, guard_of

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


def test_a_call_that_the_server_got_after_its_deadline_was_surely_not_executed(
    harness: Harness,
) -> None:
    def past_deadline(words: list[bytes]) -> bytes:
        return b"*3\r\n$20\r\n%s\r\n:%d\r\n:%d\r\n" % (guard_of(words), PAST_DEADLINE, T0)

    with Responder(past_deadline) as server:
        with pytest.raises(StoreTimeout, match="the call was surely not executed") as caught:
            harness.limiter(server.url, timeout=5).try_acquire("k")
        assert caught.value.charged is False
        assert len(server.calls) == 2


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
        ("NOPERM this user has no permissions to run the 'evalsha' command", "these rights"),
        ("NOPERM No permissions to access a key", "these rights"),
        ("ERR The user executing the script can't run this command or subcommand", "these rights"),
        ("NOAUTH Authentication required.", "password"),
        ("WRONGPASS invalid username-password pair or user is disabled.", "password"),
        ("WRONGTYPE Operation against a key holding the wrong kind of value", "prefix"),
        ("ERR unknown command 'EVALSHA', with args beginning with: 'OOM' 'BUSY'", "6.2"),
        ("ERR unknown command `evalsha`, with args beginning with: `READONLY`, ", "6.2"),
        ("ERR Error running script (call to f_0): @user_script:1: -NOPERM no", "these rights"),
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


@pytest.mark.slow
def test_a_server_that_evicts_takes_whole_rings(harness: Harness) -> None:
    """What is left of them holds the limit; what is gone admits the whole amount again, which is
    why doctor calls every policy but noeviction a problem.
    """
    with Standalone() as own, own.client() as server:
        limiter = harness.limiter(own.url, "3/hour", prefix="evicted", timeout=5)
        assert all(limiter.each(["hot"] * 3))
        (ring,) = rings(server)
        server.config_set("maxmemory", server.info("memory")["used_memory"] + 200_000)
        server.config_set("maxmemory-policy", "allkeys-random")
        numbers = itertools.count()

        def is_gone() -> bool:
            assert all(limiter.each([f"k{next(numbers)}" for _ in range(50)]))
            return not server.exists(ring)

        until(is_gone, 60, what="an eviction of this ring")
        other = harness.limiter(own.url, "3/hour", prefix="evicted", timeout=5)
        assert [bool(decision) for decision in other.each(["hot"] * 4)] == [True] * 3 + [False]
        kept = rings(server)
        assert {kept[name]["used"] for name in kept if name != ring} == {"1"}
        assert int(server.info("stats")["evicted_keys"]) > 0


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
        limiter = harness.limiter(own.url, timeout=10)
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

        def is_admitted() -> bool:  # a failure or two have calls fail without connecting for 0.1 s
            with suppress(StoreUnavailable):
                return bool(limiter.try_acquire("k"))
            return False

        until(is_admitted)


@pytest.mark.event_loops
def test_a_refusal_by_a_replica_concerns_its_own_call() -> None:
    """Also where many calls are in flight on the connection of an event loop: each gets its own
    answer, and not every refusal opens another connection.
    """

    async def main(url: str, server: redis.Redis) -> None:
        async with AsyncLimiter(url, "1000/minute", timeout=5) as limiter:
            assert await limiter.try_acquire("k")
            server.replicaof("127.0.0.1", 1)
            before = server.info("stats")["total_connections_received"]
            outcomes: list[Any] = []
            for _ in range(5):
                calls = []
                for number in range(100):  # of several rounds of the loop, so of several writes
                    calls.append(asyncio.ensure_future(limiter.try_acquire(f"k{number}")))
                    await asyncio.sleep(0)
                outcomes += await asyncio.gather(*calls, return_exceptions=True)
            assert {type(one) for one in outcomes} == {StoreUnavailable}
            assert {one.charged for one in outcomes} == {False}
            opened = server.info("stats")["total_connections_received"] - before
            assert opened <= 100, "a connection for each call"
            server.replicaof("NO", "ONE")
            assert await limiter.try_acquire("k")

    with Standalone() as own, own.client() as server:
        asyncio.run(main(own.url, server))
