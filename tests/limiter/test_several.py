"""Several limits or keys: all are charged or none is; one round trip; the decision names the one
that refused.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import redis
from redis.crc import key_slot

from distwindow import AsyncLimiter, ConfigurationError, Key, Limit, Limiter, RateLimitExceeded
from distwindow.ring.commands import Read
from tests.clock_and_stores import ManualClock, fresh_key
from tests.servers import Standalone

MakeLimiter = Callable[..., Limiter]


def used(limiter: Limiter, *keys: Any) -> list[list[int]]:
    """Return the stored total of each ring of each key."""
    totals = []
    for key in keys:
        charges = limiter.decider.commands.acquire_command(key).charges
        states = limiter._store.execute(Read(charges, 0)).states
        totals.append([0 if state is None else state.used for state in states])
    return totals


def test_all_limits_of_a_key_must_admit(make: MakeLimiter, clock: ManualClock) -> None:
    limiter, key = make(["10/minute", "25/hour"]), fresh_key()
    minute, hour = limiter.limits
    for lap, most in enumerate((10, 10, 5)):
        for i in range(most):
            decision = limiter.try_acquire(key)
            assert decision.allowed
            left = {minute: 9 - i, hour: 24 - 10 * lap - i}
            assert decision.remaining == min(left.values())
            assert left[decision.limit] == decision.remaining, "the one with least left is named"
        before = used(limiter, key)
        decision = limiter.try_acquire(key)
        assert not decision.allowed
        assert decision.limit == (minute if lap < 2 else hour)
        assert decision.reason == "over_limit"
        assert used(limiter, key) == before
        clock.move(60_000)
    # The hour has no room until its oldest bucket expires, six minutes after it began.
    assert limiter.try_acquire(key).limit == hour


def test_a_refusal_by_one_limit_charges_no_other(make: MakeLimiter) -> None:
    limiter, key = make(["5/minute", "1000/hour"]), fresh_key()
    limiter.try_acquire(key, 3)
    for _ in range(20):
        decision = limiter.try_acquire(key, 3)
        assert (decision.allowed, decision.limit.amount, decision.remaining) == (False, 5, 2)
    assert used(limiter, key) == [[3, 3]]
    assert limiter.try_acquire(key, 2).allowed
    assert used(limiter, key) == [[5, 5]]
    assert [w.blocked for w in limiter.stats(key).windows] == [60, 60]


def test_of_two_that_refuse_the_later_one_is_named(make: MakeLimiter, clock: ManualClock) -> None:
    limiter, key = make(["4/minute", "4/hour"]), fresh_key()
    limiter.try_acquire(key, 4)
    decision = limiter.try_acquire(key)
    assert decision.limit == Limit("4/hour")
    clock.move(round(decision.retry_after * 1000) - 1)
    assert not limiter.try_acquire(key)
    clock.move(1)
    assert limiter.try_acquire(key)


def test_the_limits_come_shortest_first_however_they_are_given(make: MakeLimiter) -> None:
    expected = (Limit("10/second"), Limit("1000/hour"))
    for given in (
        ["1000/hour", "10/second"],
        "1000/hour; 10/second",
        ("10/second,1000/hour",),
        [Limit("1000/hour"), "10/second"],
        {Limit("1000/hour"), Limit("10/second")},
        iter(["1000/hour", "10/second"]),
    ):
        assert make(given).limits == expected


# -- several keys ---------------------------------------------------------------------------------


def test_several_keys_all_or_none(make: MakeLimiter) -> None:
    limiter = make("1/day")  # another limit than those of these keys
    tag = fresh_key("tag")
    user, tenant, world = (Key(name, tag) for name in ("user", "tenant", "world"))
    items = [(user, "3/minute", 1), (tenant, ["10/minute", "100/hour"], 2), (world, "9/minute")]

    def totals() -> list[list[int]]:
        return [
            used(make(limits), key)[0]
            for key, limits in ((user, "3/minute"), (tenant, ["10/minute", "100/hour"]),
                                (world, "9/minute"))
        ]  # fmt: skip

    for n in (1, 2, 3):
        decision = limiter.try_acquire_all(items)
        assert decision.allowed
        assert (decision.key, decision.limit) == (user, Limit("3/minute"))
        assert decision.remaining == 3 - n
    assert totals() == [[3], [6, 6], [3]]
    for _ in range(5):
        decision = limiter.try_acquire_all(items)
        assert not decision.allowed
        assert (decision.key, decision.limit, decision.cost) == (user, Limit("3/minute"), 1)
    assert totals() == [[3], [6, 6], [3]], "a refusal charges nothing anywhere"


def test_the_key_that_refused_is_named(make: MakeLimiter) -> None:
    limiter, tag = make("1/day"), fresh_key("tag")
    a, b = Key("a", tag), Key("b", tag)
    assert make("5/minute").try_acquire(b, 4)
    decision = limiter.try_acquire_all([(a, "100/minute", 5), (b, ["5/minute", "50/hour"], 2)])
    assert not decision.allowed
    assert (decision.key, decision.limit, decision.cost) == (b, Limit("5/minute"), 2)
    assert decision.remaining == 1
    assert "5/minute" in str(RateLimitExceeded(decision))
    assert str(b) == f"{{{tag}}}b"
    assert make("100/minute").peek(a).remaining == 100


def test_a_refund_gives_back_over_all_keys(make: MakeLimiter) -> None:
    limiter, tag = make("1/day"), fresh_key("tag")
    a, b = Key("a", tag), Key("b", tag)
    decision = limiter.try_acquire_all([(a, "10/minute", 3), (b, ["10/minute", "20/hour"], 4)])
    assert limiter.refund(decision) == 4, "the most that any ring gave back"
    assert used(make("10/minute"), a, b) == [[0], [0]]


def test_without_a_cost_it_is_one_and_without_keys_it_is_an_error(make: MakeLimiter) -> None:
    limiter, key = make("1/day"), fresh_key()
    assert limiter.try_acquire_all([(key, "5/minute")]).remaining == 4
    for items, message in (
        ([], "at least one"),
        (["key"], "is not \\(key, limits, cost\\)"),
        ([("key",)], "is not \\(key, limits, cost\\)"),
        ([("key", "5/minute", 1, 2)], "is not \\(key, limits, cost\\)"),
        ([(key, "5/minute", 0)], "cost=0"),
        ([(key, "5/minute", 6)], "can never be admitted: the smallest limit is 5"),
        ([(key, "5/minute", True)], "cost=True"),
        ([(key, "5/minit", 1)], "minit"),
        ([("", "5/minute", 1)], "must not be empty"),
        ([(key, "5/minute", 1), (key, "7/minute", 1)], "named twice"),
    ):
        with pytest.raises(ValueError, match=message):
            limiter.try_acquire_all(items)
    assert limiter.try_acquire_all([(key, "5/minute")]).remaining == 3


# -- on a cluster ---------------------------------------------------------------------------------


def keys_of_two_slots() -> tuple[str, str]:
    """Return two keys of different slots."""
    one, other = fresh_key("one"), fresh_key("other")
    while key_slot(one.encode()) == key_slot(other.encode()):
        other = fresh_key("other")
    return one, other


def test_keys_of_different_slots_are_refused_with_the_remedy(cluster_url: str) -> None:
    one, other = keys_of_two_slots()
    with Limiter(cluster_url, "1/day", timeout=10) as limiter:
        with pytest.raises(ConfigurationError) as caught:
            limiter.try_acquire_all([(one, "5/minute", 1), (other, "5/minute", 1)])
        for word in (repr(one), repr(other), "Key(resource, tag=...)"):
            assert word in str(caught.value)
        assert used(limiter, one, other) == [[0], [0]], "nothing was charged"
        tagged = [(Key(one, "tag"), "5/minute", 1), (Key(other, "tag"), "5/minute", 1)]
        assert limiter.try_acquire_all(tagged).remaining == 4


async def test_keys_of_different_slots_are_refused_by_the_asyncio_limiter(cluster: Any) -> None:
    one, other = keys_of_two_slots()
    client = redis.asyncio.RedisCluster(host="127.0.0.1", port=cluster.nodes[0].port)
    async with client, AsyncLimiter(client, "1/day", timeout=10) as limiter:
        with pytest.raises(ConfigurationError, match=r"Key\(resource, tag=\.\.\.\)"):
            await limiter.try_acquire_all([(one, "5/minute", 1), (other, "5/minute", 1)])
        tagged = [(Key(one, "tag"), "5/minute", 1), (Key(other, "tag"), "5/minute", 1)]
        assert (await limiter.try_acquire_all(tagged)).remaining == 4


# -- one round trip -------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def counted() -> Iterator[Standalone]:
    """Yield a server of its own, whose commands are counted."""
    with Standalone() as server:
        yield server


def commands(client: redis.Redis) -> dict[str, int]:
    """Return the number of commands that clients have sent, without those of scripts and of this
    function.
    """
    stats: Any = client.info("commandstats")
    inside = ("hget", "hmget", "hset", "hincrby", "hgetall", "hdel", "del", "pexpire", "time")
    own = ("config|resetstat", "config", "info")  # Redis 6 counts all of CONFIG together
    calls = {name.removeprefix("cmdstat_"): one["calls"] for name, one in stats.items()}
    return {name: count for name, count in calls.items() if name not in inside + own}


def test_every_call_is_one_round_trip(counted: Standalone) -> None:
    tag = fresh_key("tag")
    pairs = [(Key(name, tag), ["5/second", "50/minute", "500/hour"], 1) for name in "abcd"]
    with Limiter(counted.url, ["10/second", "1000/hour"], timeout=5) as limiter:
        given = limiter.try_acquire("warm")
        limiter.peek("warm")
        limiter.stats("warm")
        limiter.reset("warm")
        limiter.refund(given)
        with counted.client() as client:
            for call in (
                lambda: limiter.try_acquire(tag),
                lambda: limiter.try_acquire(tag, 2),
                lambda: limiter.try_acquire_all(pairs),
                lambda: limiter.acquire(tag),
                lambda: limiter.peek(tag),
                lambda: limiter.stats(tag),
                lambda: limiter.refund(given),
                lambda: limiter.reset(tag),
            ):
                client.config_resetstat()
                call()
                assert commands(client) == {"evalsha": 1}


def test_an_unknown_script_is_sent_once(counted: Standalone) -> None:
    key = fresh_key()
    with Limiter(counted.url, "10/minute", timeout=5) as limiter, counted.client() as client:
        limiter.try_acquire(key)
        client.script_flush()
        client.config_resetstat()
        assert limiter.try_acquire(key).remaining == 8
        calls = commands(client)
        assert (calls["evalsha"], calls["eval"]) == (1, 1)
        assert limiter.try_acquire(key).remaining == 7
        assert commands(client)["eval"] == 1
