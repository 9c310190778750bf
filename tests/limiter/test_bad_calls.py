"""Keys and costs of calls: every key of text or bytes works, and all others raise one clear error
that names the value. No such call leaves keys in Redis.
"""

from __future__ import annotations

import asyncio
import math
import re
from collections.abc import Iterator
from typing import Any

import pytest
import redis
import redis.asyncio

from distwindow import AsyncLimiter, ConfigurationError, DistwindowError, Key, Limiter
from distwindow.ring.key import escape
from distwindow.support.async_use import result_of
from tests.clock_and_stores import fresh_key
from tests.limiter.first_call import attempt, each_limiter, error_of
from tests.servers import Standalone


@each_limiter
@pytest.mark.parametrize("consistency", ["direct", "leased", "eventual"])
@pytest.mark.parametrize(
    ("key", "cost"),
    [("", 1), (None, 1), (5, 1), (["k"], 1), ("k", 0), ("k", -1), ("k", 1.0), ("k", True),
     ("k", "1"), ("k", None), ("k", 6)],
)  # fmt: skip
def test_a_call_that_can_never_work_raises_in_every_mode(
    limiter_class: type, redis_url: str, prefix: str, consistency: str, key: Any, cost: Any
) -> None:
    """This holds also where the process would decide without the store, and where the window is
    full.
    """

    async def check() -> None:
        limiter = limiter_class(
            redis_url, "5/hour", prefix=prefix, consistency=consistency, timeout=5
        )

        messages = set()
        for _ in range(8):
            with pytest.raises((ValueError, TypeError)) as caught:
                await result_of(limiter.try_acquire(key, cost))
            messages.add(str(caught.value))
            await result_of(limiter.try_acquire("k", 1))
        assert len(messages) == 1
        await result_of(limiter.close() if limiter_class is Limiter else limiter.aclose())

    asyncio.run(check())


# -- costs ----------------------------------------------------------------------------------------


COSTS: list[Any] = [
    0, -1, 1.5, 1.0, True, False, math.nan, math.inf, "1", None, b"1", [1], 6, 10**30,
]  # fmt: skip


@pytest.fixture(scope="module")
def watched() -> Iterator[Standalone]:
    """Yield a server of its own, so that every key in it was written by these tests."""
    with Standalone() as server:
        yield server


@each_limiter
@pytest.mark.parametrize("cost", COSTS, ids=repr)
def test_a_cost_that_is_none(limiter_class: type, watched: Standalone, cost: Any) -> None:
    async def acquire(name: str) -> None:
        if limiter_class is Limiter:
            with Limiter(watched.url, "5/minute") as blocking:
                getattr(blocking, name)("key", cost)
        else:
            async with AsyncLimiter(watched.url, "5/minute") as async_limiter:
                await getattr(async_limiter, name)("key", cost)

    for name in ("try_acquire", "acquire"):
        with pytest.raises(ValueError, match="cost=") as caught:
            asyncio.run(acquire(name))
        assert not isinstance(caught.value, DistwindowError)
        assert f"cost={cost!r}" in str(caught.value)
        remedy = "the smallest limit is 5" if cost in (6, 10**30) else "at least 1"
        assert remedy in str(caught.value)
    with watched.client() as client:
        assert client.dbsize() == 0, "nothing was sent"


def test_a_cost_above_one_of_several_limits() -> None:
    limiter = Limiter("memory://", ["5/second", "3/minute"])
    with pytest.raises(ValueError, match="cost=4 can never be admitted: the smallest limit is 3"):
        limiter.try_acquire("key", 4)
    assert limiter.try_acquire("key", 3).allowed


# -- keys -----------------------------------------------------------------------------------------

KEYS: list[Any] = [
    "x", "x" * 64, "x" * 65, "x" * 1_000_000, b"\xff" * 1_000_000, "漢" * 300_000, "{", "}", "{}",
    "{a}b", "}{", "\x00", "a\x00b", "\n", "a\r\nb", " ", "\t", "\x7f", "%41", "~", ":", "*", "[a]",
    "\ud800", "\udfff\ud800", b"\xff\xfe", b"\x80", "é", "🙂", "'; DROP", "$(x)", "\\", "\u202e",
    Key("a", "b"), Key("{", "}"), Key(b"\xff", "\ud800"), Key("x" * 1_000_000, "y" * 1_000_000),
]  # fmt: skip


@pytest.mark.parametrize("key", KEYS, ids=lambda key: ascii(key)[:20])
@pytest.mark.parametrize(
    ("limiter_class", "server"),
    [(Limiter, "memory"), (Limiter, "redis"), (Limiter, "cluster"), (AsyncLimiter, "redis")],
)
def test_a_key_of_any_content(
    request: pytest.FixtureRequest, limiter_class: type, server: str, key: Any
) -> None:
    url = "memory://" if server == "memory" else request.getfixturevalue(f"{server}_url")
    prefix = fresh_key("weird")
    decision = asyncio.run(attempt(limiter_class, url, key, prefix=prefix))
    assert (decision.allowed, decision.key, decision.remaining) == (True, key, 4)
    if server == "redis":
        with redis.Redis.from_url(url) as client:
            (name,) = client.scan_iter(f"{prefix}:*", count=10_000)
            assert len(name) <= len(prefix) + 64 * 2 + 12
            text = name.decode("utf-8")
            assert not re.search(r"[\x00-\x20\x7f]", text)
            assert text.count("{") == text.count("}") == 1


@each_limiter
@pytest.mark.parametrize("key", ["", b""])
def test_an_empty_key(limiter_class: type, key: Any) -> None:
    exc = error_of(limiter_class, "memory://", key=key)
    assert isinstance(exc, ValueError)
    assert "must not be empty" in str(exc)


@each_limiter
@pytest.mark.parametrize(
    "key", [None, 5, 1.5, True, ("a",), ["a"], {"a": 1}, bytearray(b"a"), object], ids=repr
)
def test_a_key_that_is_none(limiter_class: type, key: Any) -> None:
    exc = error_of(limiter_class, "memory://", key=key)
    assert isinstance(exc, TypeError)
    assert repr(key) in str(exc)
    assert "a key is str, bytes or Key" in str(exc)


def test_ten_thousand_weird_keys_are_ten_thousand_windows(redis_url: str) -> None:
    keys = [f"{{{n}}}\x00%{n:x}~\n" for n in range(5_000)] + [b"\xff%d" % n for n in range(5_000)]
    assert len({escape(key) for key in keys}) == 10_000

    async def all_of_them() -> list[int]:
        async with AsyncLimiter(
            redis_url, "5/hour", timeout=30, prefix=fresh_key("many")
        ) as limiter:
            return [d.remaining for d in await asyncio.gather(*map(limiter.try_acquire, keys))]

    assert asyncio.run(all_of_them()) == [4] * 10_000


# -- keys that exist already ----------------------------------------------------------------------


@each_limiter
@pytest.mark.parametrize("kind", ["string", "list", "set", "zset", "stream"])
def test_a_key_whose_type_is_something_else(limiter_class: type, redis_url: str, kind: str) -> None:
    prefix = fresh_key("taken")
    ring = f"{prefix}:{{key}}:6000:10"
    with redis.Redis.from_url(redis_url) as client:
        {
            "string": lambda: client.set(ring, "mine"),
            "list": lambda: client.rpush(ring, "mine"),
            "set": lambda: client.sadd(ring, "mine"),
            "zset": lambda: client.zadd(ring, {"mine": 1}),
            "stream": lambda: client.xadd(ring, {"mine": 1}),
        }[kind]()
        before = client.dump(ring)
        exc = error_of(limiter_class, redis_url, prefix=prefix)
        assert isinstance(exc, ConfigurationError)
        assert ring in str(exc)
        assert "choose a prefix that nothing else uses" in str(exc)
        assert client.dump(ring) == before


@each_limiter
def test_a_refusal_writes_nothing_to_the_other_rings(limiter_class: type, redis_url: str) -> None:
    """One of several rings is a key of another type: the other rings are not charged."""
    prefix = fresh_key("half")
    with redis.Redis.from_url(redis_url) as client:
        client.set(f"{prefix}:{{key}}:360000:10", "mine")
        exc = error_of(limiter_class, redis_url, limits=["5/minute", "50/hour"], prefix=prefix)
        assert "WRONGTYPE" in str(exc)
        assert list(client.scan_iter(f"{prefix}:*", count=10_000)) == [
            f"{prefix}:{{key}}:360000:10".encode()
        ]
