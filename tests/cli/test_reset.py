"""`distwindow reset`"""

from __future__ import annotations

import json
from typing import Any

import pytest
import redis

from distwindow import Key, Limiter
from tests.cli.conftest import Cli, fill, use


def test_all_windows_of_a_key_are_deleted(cli: Cli, redis_url: str, prefix: str) -> None:
    with Limiter(redis_url, ["1/hour", "1/day strict"], prefix=prefix) as limiter:
        limiter.try_acquire("k")
        limiter.try_acquire("kk")
        result = cli("reset", "k")
        assert (result.code, result.out) == (0, "k: 2 windows deleted\n")
        assert limiter.try_acquire("k").allowed
        assert not limiter.try_acquire("kk").allowed


def test_the_line_of_those_who_wait_goes_with_the_window(
    cli: Cli, redis_url: str, prefix: str
) -> None:
    with Limiter(redis_url, "1/hour", prefix=prefix) as limiter:
        for _ in range(3):
            limiter.try_acquire("k", enqueue=True)
        with redis.Redis.from_url(redis_url) as server:
            assert len(list(server.scan_iter(f"{prefix}:*:line"))) == 1
            (row,) = json.loads(cli("stats", "--json").out)
            assert (row["passed"], row["blocked"]) == (1, 2)
            assert "not" not in cli("stats").err, "a line is no foreign name"
            assert cli("reset", "k").out == "k: 1 window deleted\n"
            assert list(server.scan_iter(f"{prefix}:*")) == []


def test_an_unknown_key_is_not_an_error(cli: Cli, redis_url: str, prefix: str) -> None:
    use(redis_url, prefix, "k", limits="1/hour")
    result = cli("reset", "nobody", "k")
    assert result.code == 0
    assert result.out.splitlines() == [
        f"nobody: nothing to delete under the prefix {prefix!r}",
        "k: 1 window deleted",
    ]


def test_wildcards_are_ordinary_characters(cli: Cli, redis_url: str, prefix: str) -> None:
    keys = ["*", "k?", "k[1]", "k1", "back\\slash", "new\nline", "x" * 300]
    with Limiter(redis_url, "1/hour", prefix=prefix) as limiter:
        for key in keys:
            limiter.try_acquire(key)
        assert cli("reset", "*").out == "*: 1 window deleted\n"
        assert "1 window" in cli("reset", "k[1]").out
        assert limiter.stats("k1").passed == 1
        for key in ["k?", "back\\slash", "new\nline", "x" * 300]:
            assert cli("reset", key).out.count("1 window deleted") == 1
        assert limiter.stats("k1").passed == 1


def test_keys_can_be_spelled_as_stats_shows_them(cli: Cli, redis_url: str, prefix: str) -> None:
    use(redis_url, prefix, Key("all", tag="acme"), "x" * 300, limits="1/hour")
    for stats in json.loads(cli("stats", "--json").out):
        assert "1 window deleted" in cli("reset", stats["key"]).out
    assert "no limits on" in cli("stats").out


def test_the_records_of_senders_are_kept(cli: Cli, redis_url: str, prefix: str) -> None:
    """Otherwise a flush that is sent again after a lost reply would be counted twice."""
    with Limiter(redis_url, "10/hour", prefix=prefix) as limiter:
        with limiter.entry("k"):
            pass
        limiter.flush()
        assert cli("reset", "k").out == "k: 1 window deleted\n"
    with redis.Redis.from_url(redis_url) as client:
        left, *views = sorted(client.scan_iter(f"{prefix}:*"))
        assert left.endswith(b":10:senders")
        assert [name.split(b":")[2] for name in views] == [b"minute", b"minute"]
        assert 0 < client.pttl(left) <= 11 * 360_000


@pytest.mark.parametrize("arguments", [["k"], ["--pattern", "*"]], ids=" ".join)
def test_other_keys_are_kept(cli: Cli, client: Any, prefix: str, arguments: list[str]) -> None:
    ends = ("{k}:100:10", "{k}:note", "{k}", "settings")
    client.mset({f"{prefix}:{end}": "x" for end in ends})
    assert "nothing to delete" in cli("reset", *arguments).out
    assert len(list(client.scan_iter(f"{prefix}:*"))) == len(ends)


def test_a_pattern_needs_the_option(cli: Cli, redis_url: str, prefix: str) -> None:
    with Limiter(redis_url, ["9/hour", "9/day"], prefix=prefix) as limiter:
        for key in ("user:1", "user:2", "other"):
            limiter.try_acquire(key)
        result = cli("reset", "user:*", "user:?", "us[e]r", "nobody")
        assert result.code == 0
        nothing = f"nothing to delete under the prefix {prefix!r}"
        hint = "; this names one key: for a pattern add --pattern"
        assert result.out.splitlines() == [
            f"user:*: {nothing}{hint}",
            f"user:?: {nothing}{hint}",
            f"us[e]r: {nothing}{hint}",
            f"nobody: {nothing}",
        ]
        assert limiter.stats("user:1").passed == 1
        result = cli("reset", "--pattern", "user:*")
        assert (result.code, result.out) == (0, "user:*: 2 keys, 4 windows deleted\n")
        assert limiter.stats("user:1").passed == limiter.stats("user:2").passed == 0
        assert limiter.stats("other").passed == 1
        result = cli("reset", "--pattern", "user:*")
        assert result.out == f"user:*: {nothing}\n"


def test_several_patterns(cli: Cli, redis_url: str, prefix: str) -> None:
    with Limiter(redis_url, "9/hour", prefix=prefix) as limiter:
        for key in ("a1", "a2", "b1", "c1", Key("all", tag="acme")):
            limiter.try_acquire(key)
        assert cli("reset", "a*", "--pattern", "*1", "b1", "{acme}*").out.splitlines() == [
            "a*: 2 keys, 2 windows deleted",
            "*1: 3 keys, 3 windows deleted",
            "b1: 1 key, 1 window deleted",
            "{acme}*: 1 key, 1 window deleted",
        ]
    assert "no limits on" in cli("stats").out


def test_a_dry_run_prints_what_a_reset_would_delete(cli: Cli, redis_url: str, prefix: str) -> None:
    with Limiter(redis_url, ["9/hour", "9/day"], prefix=prefix) as limiter:
        for key in ("user:2", "user: 1", "other"):
            limiter.try_acquire(key)
        result = cli("reset", "--dry-run", "--pattern", "user:*")
        assert result.out.splitlines() == [
            "'user: 1': 2 windows would be deleted",
            "user:2: 2 windows would be deleted",
            "user:*: 2 keys, 4 windows would be deleted",
        ]
        assert cli("reset", "--dry-run", "other", "user:*").out.splitlines() == [
            "other: 2 windows would be deleted",
            f"user:*: nothing to delete under the prefix {prefix!r}; "
            "this names one key: for a pattern add --pattern",
        ]
        for key in ("user:2", "user: 1", "other"):
            assert limiter.stats(key).passed == 1


def test_a_pattern_reaches_every_node_of_a_cluster(cli: Cli, cluster_url: str, prefix: str) -> None:
    use(cluster_url, prefix, *(f"k{i}" for i in range(30)), "other", limits="9/hour")
    result = cli("reset", "--pattern", "k*", store=cluster_url)
    assert result.out == "k*: 30 keys, 30 windows deleted\n"
    assert cli("reset", "other", store=cluster_url).out == "other: 1 window deleted\n"


def test_a_pattern_takes_more_keys_than_one_page_of_scan(
    cli: Cli, redis_url: str, prefix: str
) -> None:
    fill(redis_url, prefix, 2500)
    assert cli("reset", "--pattern", "user:*").out == "user:*: 2,500 keys, 2,500 windows deleted\n"
    assert "no limits on" in cli("stats").out


def test_the_promised_moment_of_a_paced_limit_is_deleted_too(
    cli: Cli, redis_url: str, prefix: str, client: Any
) -> None:
    with Limiter(redis_url, "1/minute paced 1h", prefix=prefix) as limiter:
        limiter.try_acquire("k")
        assert limiter.try_acquire("k").wait > 0
        assert cli("reset", "k").out == "k: 1 window deleted\n"
        assert limiter.try_acquire("k").wait == 0.0
        # Also where the window has expired, and only the moment is left.
        client.delete(f"{prefix}:{{k}}:6000:10")
        assert "k: 1 window would be deleted" in cli("reset", "--dry-run", "k").out
        assert cli("reset", "k").out == "k: 1 window deleted\n"
        assert list(client.scan_iter(match=f"{prefix}:*", count=10_000)) == []


def test_the_promised_moment_is_no_key_of_its_own(cli: Cli, redis_url: str, prefix: str) -> None:
    with Limiter(redis_url, "1/minute paced 1h", prefix=prefix) as limiter:
        limiter.try_acquire("k")
        assert "1 key" in cli("stats").out
