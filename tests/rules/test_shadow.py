"""What a limit in shadow decides is counted, refuses nothing, and fails nothing."""

from __future__ import annotations

import asyncio
import json
import random
import uuid
from collections.abc import Coroutine
from typing import Any

import pytest
import redis

from distwindow import AsyncLimiter, ConfigurationError, Limiter
from distwindow.rules import shadow as shadow_rules
from distwindow.support.async_use import result_of, run_at_once
from tests.away.sharing_process import WAYS
from tests.away.stores import NOT_SENT, UNKNOWN, AsyncRemoteStore, RemoteStore
from tests.clock_and_stores import ManualClock
from tests.observer.told import Told
from tests.programs import run_python

KINDS = pytest.mark.parametrize("kind", [Limiter, AsyncLimiter])
CONSISTENCIES = pytest.mark.parametrize("consistency", ["direct", "leased", "eventual"])
NO_RIGHT = ConfigurationError("this user has no permissions to run it")


async def peeked(limiter: Any, key: str) -> Any:
    """Use a key up, and look at it."""
    for _ in range(6):
        await result_of(limiter.try_acquire(key))
    return await result_of(limiter.peek(key))


def given_back(limiter: Any, answer: Any) -> Any:
    """Give an admitted call back, as an application does where its next step has failed."""

    async def give_back() -> bool:
        decision = await result_of(answer)
        await result_of(limiter.refund(decision))
        return bool(decision)

    return give_back()


ALL_WAYS = WAYS | {
    "acquire, waiting": lambda limiter, key: limiter.acquire(key, 2, timeout=100.0),
    "priority, waiting": lambda limiter, key: limiter.acquire(key, timeout=90, priority=True),
    "reserve, waiting": lambda limiter, key: limiter.reserve(key, 2, timeout=100.0),
    "above the limit": lambda limiter, key: limiter.try_acquire(key, 1000),
    "above the limit, waiting": lambda limiter, key: limiter.acquire(key, 1000),
    "peek": lambda limiter, key: peeked(limiter, key),
    "refund": lambda limiter, key: given_back(limiter, limiter.try_acquire(key)),
}
"""Each ends at once."""
BORROWING = {"try_acquire+priority", "acquire+priority", "priority, waiting"}
NOT_BY_ALL = {"eventual": {*BORROWING, "try_acquire+enqueue"}}
PACED = {
    *BORROWING, "try_acquire+enqueue", "try_reserve", "reserve", "reserve_all", "reserve, waiting",
}  # fmt: skip
"""Ways that a paced limit does not have: with or without shadow `ConfigurationError` says so."""


class Unwell(RemoteStore):
    """A store that fails with whatever error, and has no time to sleep."""

    failure: Any

    def execute(self, command: Any, deadline: float | None = None) -> Any:
        if isinstance(self.failure, ConfigurationError):
            raise self.failure
        return super().execute(command, deadline)


def made(kind: Any, place: str, limits: Any, **options: Any) -> tuple[Any, Any, ManualClock]:
    clock = ManualClock(auto_advance=False)
    if place == "memory":
        return kind("memory://", limits, time=clock, **options), None, clock
    store = Unwell(clock)
    where = store if kind is Limiter else AsyncRemoteStore(store)
    return kind(where, limits, time=clock, **options), store, clock


def run(kind: Any, calls: Coroutine[Any, Any, None]) -> None:
    if kind is Limiter:
        run_at_once(calls)
    else:
        asyncio.run(calls)


@KINDS
@CONSISTENCIES
@pytest.mark.parametrize("place", ["memory", "elsewhere"])
@pytest.mark.parametrize(
    "limits", ["4/minute", "4/minute paced 100s", ["4/minute", "6/hour"]], ids=str
)
def test_nothing_is_refused_or_delayed_in_any_way(
    kind: Any, consistency: Any, place: str, limits: Any
) -> None:
    """Also where the store fails, by its fault or by a mistake of ours."""
    limiter, store, clock = made(kind, place, limits, consistency=consistency, shadow=True)
    failures = [None, NOT_SENT, UNKNOWN, NO_RIGHT] if store is not None else [None]
    is_paced = "paced" in str(limits)
    began_at = clock.monotonic()

    async def call_in_all_ways() -> None:
        for way, call in ALL_WAYS.items():
            if (is_paced and way in PACED) or way in NOT_BY_ALL.get(consistency, ()):
                continue
            for failure in failures * 3:
                if store is not None:
                    store.failure = failure
                for _ in range(3):
                    found = await result_of(call(limiter, way))
                    assert found, way
                    assert getattr(found, "wait", 0) == 0, way

    run(kind, call_in_all_ways())
    assert clock.monotonic() == began_at


@KINDS
@CONSISTENCIES
@pytest.mark.parametrize("place", ["memory", "elsewhere"])
def test_it_counts_what_would_be_refused_if_it_were_enforced(
    kind: Any, consistency: Any, place: str
) -> None:
    """The same calls on one that is enforced are the oracle. Neither knows of the other."""
    told = Told()
    limits = ["10/second", "40/minute"]
    enforced, _, clock = made(kind, place, limits, consistency=consistency)
    shadow, _, clock_of_shadow = made(
        kind, place, limits, consistency=consistency, shadow=True, observer=told, metric_name="n"
    )
    chance = random.Random(consistency + place)
    refused = admitted = 0

    async def call_both() -> None:
        nonlocal refused, admitted
        for _ in range(300):
            key, cost = f"key {chance.randrange(2)}", chance.choice([1, 1, 3])
            decision = await result_of(enforced.try_acquire(key, cost))
            in_shadow = await result_of(shadow.try_acquire(key, cost))
            assert in_shadow.allowed
            assert (in_shadow.reason == "shadow") == (not decision.allowed)
            assert (in_shadow.limit, in_shadow.remaining) == (decision.limit, decision.remaining)
            assert in_shadow.retry_after == pytest.approx(decision.retry_after)
            refused, admitted = refused + (not decision), admitted + bool(decision)
            for each in (clock, clock_of_shadow):
                each.advance(0.05)
        await result_of(shadow.close() if kind is Limiter else shadow.aclose())

    run(kind, call_both())
    found = {True: 0, False: 0}
    for counts in told.counts:
        assert counts.shadow
        assert counts.name == "n"
        found[counts.result == "refused"] += counts.calls
    assert found == {True: refused, False: admitted}
    assert refused
    assert admitted


@KINDS
@CONSISTENCIES
@pytest.mark.parametrize("place", ["memory", "elsewhere"])
def test_reservations_leave_the_windows_as_if_it_were_enforced(
    kind: Any, consistency: Any, place: str
) -> None:
    """Each uses what it has reserved, or less, or more; in shadow also what would be refused."""

    async def use(limiter: Any, clock: ManualClock) -> list[int]:
        found, chance = [], random.Random(1)
        for _ in range(60):
            estimate, used = chance.choice([1, 2, 5]), chance.choice([0, 1, 2, 7])
            if chance.random() < 0.5:
                reserved = await result_of(limiter.try_reserve("key", estimate))
            else:
                reserved = await result_of(limiter.reserve_all([("key", "20/second", estimate)]))
            if reserved:
                await result_of(reserved.commit(used))
            await result_of(limiter.flush())
            found.append((await result_of(limiter.stats("key"))).windows[0].passed)
            clock.advance(0.05)
        await result_of(limiter.close() if kind is Limiter else limiter.aclose())
        return found

    found = []

    async def use_both() -> None:
        for shadow in (False, True):
            limiter, _, clock = made(
                kind, place, "20/second", consistency=consistency, shadow=shadow
            )
            found.append(await use(limiter, clock))

    run(kind, use_both())
    assert found[0] == found[1]
    assert max(found[0]) > 20, "something was refused, and a debt was counted"


def test_one_limit_is_enforced_while_another_is_tried_on_the_same_keys(
    redis_url: str, prefix: str
) -> None:
    with (
        Limiter(redis_url, "100/hour", prefix=prefix) as enforced,
        Limiter(redis_url, "20/hour", prefix=prefix, shadow=True) as shadow,
    ):
        found = [(enforced.try_acquire("key"), shadow.try_acquire("key")) for _ in range(60)]
        assert all(one and other for one, other in found)
        assert [other.reason for _, other in found].count("shadow") == 40
        assert enforced.stats("key").windows[0].passed == 60
        assert shadow.stats("key").windows[0].passed == 20
        assert shadow.prefix == f"{prefix}:shadow"


@pytest.mark.slow
@pytest.mark.parametrize("in_shadow", [True, False])
def test_stats_shows_what_is_in_shadow_apart(redis_url: str, prefix: str, in_shadow: bool) -> None:
    with (
        Limiter(redis_url, "5/hour", prefix=prefix) as enforced,
        Limiter(redis_url, "2/hour", prefix=prefix, shadow=True) as shadow,
    ):
        for _ in range(4):
            assert enforced.try_acquire("key")
            assert shadow.try_acquire("key")
    arguments = ["stats", "--json", "--url", redis_url, "--prefix", prefix]
    result = run_python("-m", "distwindow", *arguments, *(["--shadow"] if in_shadow else []))
    (found,) = json.loads(result.stdout)
    (window,) = found["windows"]
    assert (window["passed"], window["blocked"]) == ((2, 2) if in_shadow else (4, 0))


def test_the_documented_rights_are_enough(redis_url: str, server: redis.Redis) -> None:
    """And without any right it still admits."""
    name, prefix = f"user-{uuid.uuid4().hex[:8]}", f"p{uuid.uuid4().hex[:8]}"
    rights = (
        f"~{prefix}:* resetchannels -@all +time +info +evalsha +eval +hget +hset +hmget +hincrby "
        "+hdel +hgetall +hlen +hrandfield +del +pexpire"
    ).split()
    server.execute_command("ACL", "SETUSER", name, "on", ">word", *rights)
    try:
        with Limiter(
            redis_url.replace("redis://", f"redis://{name}:word@"), "2/hour", prefix=prefix,
            shadow=True,
        ) as limiter:  # fmt: skip
            assert [limiter.try_acquire("key").reason for _ in range(3)] == ["ok", "ok", "shadow"]
            server.execute_command("ACL", "SETUSER", name, "-evalsha")
            assert {limiter.try_acquire("other").reason for _ in range(3)} == {"store_down"}
    finally:
        server.execute_command("ACL", "DELUSER", name)


def test_it_is_logged_once_a_minute_and_at_the_end_with_the_keys_that_suffer_most(
    caplog: pytest.LogCaptureFixture,
) -> None:
    limiter, _, clock = made(
        Limiter, "elsewhere", ["1/hour", "3/day"], shadow=True, metric_name="search"
    )
    for number in range(8):
        for _ in range(number + 1):
            limiter.try_acquire(f"key {number}")
    limiter.flush()
    assert caplog.records == []
    clock.advance(60)
    limiter.flush()
    limiter.flush()
    (record,) = caplog.records
    text = record.getMessage()
    assert "search in shadow would have refused 28 calls by 1/hour" in text
    assert "'key 7' (7), 'key 6' (6), 'key 5' (5), 'key 4' (4), 'key 3' (3)" in text
    clock.advance(3600)
    for _ in range(5):
        limiter.try_acquire("key 7")
    limiter.close()
    assert len(caplog.records) == 2
    assert "refused 4 calls" in caplog.records[1].getMessage()


@pytest.mark.slow
@pytest.mark.parametrize(("value", "refused"), [("1", 0), ("0", 3), ("", 3)])
def test_a_variable_puts_all_limits_of_a_process_in_shadow(value: str, refused: int) -> None:
    program = """
from distwindow import Limiter
limiters = [Limiter("memory://", "2/hour") for _ in range(3)]
print(sum(not limiter.try_acquire("key") for _ in range(3) for limiter in limiters))
"""
    result = run_python("-c", program, env={"DISTWINDOW_SHADOW": value})
    assert result.stdout == f"{refused}\n"
    assert result.stderr.count("no rate limit of this process refuses anything") == (value == "1")


def test_mistakes_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigurationError, match="shadow='yes'"):
        Limiter("memory://", "2/hour", shadow="yes")  # type: ignore[arg-type]
    monkeypatch.setenv("DISTWINDOW_SHADOW", "yes")
    with pytest.raises(ConfigurationError, match="DISTWINDOW_SHADOW='yes'"):
        Limiter("memory://", "2/hour")
    monkeypatch.setenv("DISTWINDOW_SHADOW", "0")
    for key in ("", 4):
        with pytest.raises((TypeError, ValueError)):
            Limiter("memory://", "2/hour", shadow=True).try_acquire(key)  # type: ignore[arg-type]


def test_a_mistake_is_logged_once_whatever_its_text_says(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may have the key of a call."""
    monkeypatch.setattr(shadow_rules, "_mistakes_logged_at", {})
    store = Unwell(ManualClock())
    with Limiter(store, "2/hour", time=store.clock, shadow=True) as limiter:
        for number in range(5):
            store.failure = ConfigurationError(f"the key 'user-{number}' is of another kind")
            assert limiter.try_acquire("key")
    logged = [each for each in caplog.records if "in shadow cannot be decided" in each.message]
    assert len(logged) == 1
