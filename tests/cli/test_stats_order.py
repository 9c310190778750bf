"""The order of the keys that `distwindow stats` shows."""

from __future__ import annotations

import json

import pytest

from distwindow import Limiter
from tests.cli.conftest import Cli


@pytest.mark.parametrize("top", [[], ["--top", "3"]], ids=["all", "top"])
def test_the_order(cli: Cli, redis_url: str, prefix: str, top: list[str]) -> None:
    with Limiter(redis_url, ["10/hour", "20/day"], prefix=prefix) as limiter:
        for i, (passed, blocked) in enumerate([(1, 0), (10, 5), (3, 0), (10, 7), (2, 0)]):
            for _ in range(passed + blocked):
                limiter.try_acquire(f"k{i}")

    def order(*arguments: str) -> list[str]:
        result = json.loads(cli("stats", "--json", *arguments, *top).out)
        assert all(len(one["limits"]) == 2 for one in result)
        return [one["key"] for one in result][:3]

    assert order()[:2] == ["k3", "k1"]
    assert order("--sort", "passed") == ["k1", "k3", "k2"]
    assert order("--sort", "key") == ["k0", "k1", "k2"]


@pytest.mark.parametrize("top", [[], ["--top", "3"]], ids=["all", "top"])
@pytest.mark.parametrize("sort", ["blocked", "passed"])
def test_equal_counts_go_by_the_share_of_the_limit_that_is_used(
    cli: Cli, redis_url: str, prefix: str, top: list[str], sort: str
) -> None:
    """This is the order where nothing is blocked."""
    # Six permits of each key are used. Of several limits, the one with the largest share counts.
    limits = {"a": ["100/hour"], "b": ["7/hour"], "c": ["50/hour", "6/day"], "d": ["12/hour"]}
    for key, own in limits.items():
        with Limiter(redis_url, own, prefix=prefix) as limiter:
            limiter.try_acquire(key, cost=6)
    result = json.loads(cli("stats", "--json", "--sort", sort, *top).out)
    assert [one["key"] for one in result] == ["c", "b", "d", "a"][: len(result)]
    assert len(result) == (3 if top else 4)


def test_what_is_blocked_comes_before_what_is_full(cli: Cli, redis_url: str, prefix: str) -> None:
    with Limiter(redis_url, "10/hour", prefix=prefix) as limiter:
        limiter.try_acquire("full", cost=10)
        limiter.try_acquire("blocked", cost=2)
        limiter.try_acquire("blocked", cost=9)
    result = json.loads(cli("stats", "--json").out)
    assert [one["key"] for one in result] == ["blocked", "full"]


@pytest.mark.slow
def test_the_nearly_full_key_is_found_among_thousands(
    cli: Cli, redis_url: str, prefix: str
) -> None:
    with Limiter(redis_url, ["100/hour", "1000/day"], prefix=prefix) as limiter:
        for i in range(1300):  # more than are held in memory for a top of 2
            limiter.try_acquire(f"k{i:04}")
        limiter.try_acquire("k0700", cost=98)
        limiter.try_acquire("k0007", cost=50)
    result = cli("stats", "--top", "2")
    keys = [line.split()[0] for line in result.out.splitlines()[1:5]]
    assert keys == ["k0700", "k0700", "k0007", "k0007"]
    assert "the first 2 by blocked, then by share used, of 2,600 limits in use" in result.out
