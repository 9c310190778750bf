"""`distwindow stats`: limits that are paced or warm up."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import pytest

from distwindow import Limiter, ShapingStats
from tests.cli.conftest import Cli, use


def rows(out: str) -> list[dict[str, str]]:
    """Return the rows of the table by their titles. The bar has none, and limits have words."""
    head, *lines = out.split("\n\n")[0].splitlines()
    titles = [title for title in head.split("  ") if title]
    numbers = [title.strip() for title in titles][2:]
    return [
        dict(zip(reversed(numbers), reversed([w for w in line.split("  ") if w]), strict=False))
        for line in lines
    ]


def test_a_paced_limit_shows_its_pace_and_how_far_ahead_starts_are_promised(
    cli: Cli, redis_url: str, prefix: str
) -> None:
    use(redis_url, prefix, *["k"] * 4, limits="10/hour paced 10h")
    use(redis_url, prefix, "plain")
    out = cli("stats", "--sort", "key").out
    paced, plain = rows(out)
    assert "10/hour paced 10h" in out
    assert paced["PACE MS"].strip() == "360,000"
    backlog_ms = int(paced["BACKLOG MS"].replace(",", ""))
    assert 3 * 360_000 - 60_000 < backlog_ms <= 3 * 360_000
    assert (plain["PACE MS"].strip(), plain["BACKLOG MS"].strip()) == ("-", "-")
    assert "RATE/S" not in out
    assert "TOKENS" not in out


def test_a_limit_that_warms_up_shows_its_rate_and_its_tokens(
    cli: Cli, redis_url: str, prefix: str
) -> None:
    use(redis_url, prefix, "k", limits="3600/hour warmup 2h")
    (row,) = rows(cli("stats").out)
    assert float(row["RATE/S"]) == pytest.approx(1 / 3, abs=0.01)
    assert row["TOKENS"].strip() == "7,200 of 7,200"
    assert "PACE MS" not in row


def test_json_has_the_shaping_of_the_library(cli: Cli, redis_url: str, prefix: str) -> None:
    limits = ["1000/hour cold factor 5 warmup 90m paced 2h", "5000/day strict"]
    use(redis_url, prefix, *["k"] * 3, limits=limits)
    with Limiter(redis_url, limits, prefix=prefix) as limiter:
        stats = limiter.stats("k")
    (result,) = json.loads(cli("stats", "--json").out)
    assert result["limits"] == limits == [str(limit) for limit in stats.limits]
    shaped, plain = result["windows"]
    assert plain["shaping"] is None is stats.windows[1].shaping
    found, own = ShapingStats(**shaped["shaping"]), stats.windows[0].shaping
    assert own is not None
    assert own.promised_until_ms is not None
    assert own.backlog_ms == pytest.approx(2 * 5 * 3600, abs=60_000)
    # Read a moment later, nothing but the backlog is other.
    assert dataclasses.replace(found, backlog_ms=own.backlog_ms) == own


def test_each_limit_is_shown_with_its_terms(cli: Cli, redis_url: str, prefix: str) -> None:
    limits = [
        "7/hour strict paced 0ms",
        "60/2 hours strict 24 buckets paced 24h",
        "3600/hour 5 buckets warmup 1h",
        "10000000/hour cold factor 100 warmup 24h paced 1500ms",
    ]
    for number, limit in enumerate(limits):
        use(redis_url, prefix, f"k{number}", limits=limit)
    found = json.loads(cli("stats", "--sort", "key", "--json").out)
    assert [one["limits"] for one in found] == [[limit] for limit in limits]


@pytest.mark.parametrize("more", [[], ["--top", "5"]], ids=str)
def test_a_limit_of_which_only_the_promised_moment_is_left_is_shown(
    cli: Cli, redis_url: str, prefix: str, client: Any, more: list[str]
) -> None:
    use(redis_url, prefix, *["paced"] * 4, limits="10/hour paced 10h")
    use(redis_url, prefix, "plain")
    (ring,) = client.keys(f"{prefix}:{{paced}}:*:10")
    client.delete(ring)  # as if it had expired: the backlog may be longer than the window
    paced, plain = json.loads(cli("stats", "--sort", "key", "--json", *more).out)
    assert (paced["key"], paced["limits"], paced["passed"]) == ("paced", ["10/hour paced 10h"], 0)
    assert paced["windows"][0]["shaping"]["backlog_ms"] > 0
    assert plain["windows"][0]["shaping"] is None
    assert "2 keys" in cli("stats").out
    assert "of 2 limits in use" in cli("stats", "--top", "1").out


def test_a_shaped_limit_is_counted_once(cli: Cli, redis_url: str, prefix: str) -> None:
    use(redis_url, prefix, "k", limits=["10/hour paced 1h", "10/day"])
    assert "1 key" in cli("stats").out
    assert "of 2 limits in use" in cli("stats", "--top", "1").out
    assert "skipped" not in cli("stats").out


def test_a_limit_that_is_no_longer_paced_is_shown_without_its_pace(
    cli: Cli, redis_url: str, prefix: str
) -> None:
    use(redis_url, prefix, "k", limits="10/hour paced 1h")
    use(redis_url, prefix, "k", limits="20/hour")
    (result,) = json.loads(cli("stats", "--json").out)
    assert (result["limits"], result["windows"][0]["shaping"]) == (["20/hour"], None)
    use(redis_url, prefix, "k", limits="30/hour paced 1h")
    (result,) = json.loads(cli("stats", "--json").out)
    assert result["limits"] == ["30/hour paced 1h"]


def test_the_longest_wait_is_that_of_the_limit_and_not_of_the_last_caller(
    cli: Cli, redis_url: str, prefix: str
) -> None:
    with Limiter(redis_url, "10/s paced 1h", prefix=prefix) as limiter:
        limiter.acquire("k", timeout=0.5)
    (result,) = json.loads(cli("stats", "--json").out)
    assert result["limits"] == ["10/second paced 1h"]


def test_a_foreign_hash_of_that_name_is_skipped(cli: Cli, prefix: str, client: Any) -> None:
    client.hset(f"{prefix}:{{k}}:100:10:shaping", "terms", "10,5,,")
    client.hset(f"{prefix}:{{j}}:100:10:shaping", "terms", "10,5,x,")
    client.set(f"{prefix}:{{i}}:100:10:shaping", "x")
    assert "no limits on any key" in cli("stats").out
