"""`distwindow reset`"""

from __future__ import annotations

import json

import redis

from distwindow import Key, Limiter
from tests.cli.conftest import Cli


def test_all_windows_of_a_key_are_forgotten_whatever_their_shape(
    cli: Cli, redis_url: str, prefix: str
) -> None:
    with Limiter(redis_url, ["1/hour", "1/day strict"], prefix=prefix) as limiter:
        limiter.try_acquire("k")
        limiter.try_acquire("kk")
        said = cli("reset", "k")
        assert (said.code, said.out) == (0, "k: 2 windows forgotten\n")
        assert limiter.try_acquire("k").allowed
        assert not limiter.try_acquire("kk").allowed


def test_an_unknown_key_is_said_and_no_error(cli: Cli, redis_url: str, prefix: str) -> None:
    with Limiter(redis_url, "1/hour", prefix=prefix) as limiter:
        limiter.try_acquire("k")
    said = cli("reset", "nobody", "k")
    assert said.code == 0
    assert said.out.splitlines() == [
        f"nobody: nothing to forget under the prefix {prefix!r}",
        "k: 1 window forgotten",
    ]


def test_wildcards_stand_for_themselves(cli: Cli, redis_url: str, prefix: str) -> None:
    keys = ["*", "k?", "k[1]", "k1", "back\\slash", "new\nline", "x" * 300]
    with Limiter(redis_url, "1/hour", prefix=prefix) as limiter:
        for key in keys:
            limiter.try_acquire(key)
        assert cli("reset", "*").out == "*: 1 window forgotten\n"
        assert "1 window" in cli("reset", "k[1]").out
        assert limiter.stats("k1").passed == 1
        for key in ["k?", "back\\slash", "new\nline", "x" * 300]:
            assert cli("reset", key).out.count("1 window forgotten") == 1
        assert limiter.stats("k1").passed == 1


def test_keys_are_named_as_stats_names_them(cli: Cli, redis_url: str, prefix: str) -> None:
    with Limiter(redis_url, "1/hour", prefix=prefix) as limiter:
        limiter.try_acquire(Key("all", tag="acme"))
        limiter.try_acquire("x" * 300)
    for stats in json.loads(cli("stats", "--json").out):
        assert "1 window forgotten" in cli("reset", stats["key"]).out
    assert "no limits on" in cli("stats").out


def test_what_was_flushed_before_is_remembered(cli: Cli, redis_url: str, prefix: str) -> None:
    """Or a flush whose reply was lost would be counted again in the new window."""
    with Limiter(redis_url, "10/hour", prefix=prefix) as limiter:
        with limiter.entry("k"):
            pass
        limiter.flush()
        assert cli("reset", "k").out == "k: 1 window forgotten\n"
    with redis.Redis.from_url(redis_url) as client:
        (left,) = client.scan_iter(f"{prefix}:*")
        assert left.endswith(b":senders")
        assert 0 < client.pttl(left) <= 11 * 360_000


def test_what_is_no_ring_stays(cli: Cli, redis_url: str, prefix: str) -> None:
    names = [f"{prefix}:{{k}}:100:10", f"{prefix}:{{k}}:note", f"{prefix}:{{k}}"]
    with redis.Redis.from_url(redis_url) as client:
        for name in names:
            client.set(name, "x")
        assert "nothing to forget" in cli("reset", "k").out
        assert client.exists(*names) == 3
