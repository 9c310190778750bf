"""`distwindow stats --minute` and `--by origin`."""

from __future__ import annotations

import dataclasses
import json

import pytest

from distwindow import Limiter, MinuteStats, RateLimitExceeded
from distwindow.runtime.options import OTHER_ORIGINS
from tests.cli.conftest import Cli


@pytest.fixture
def limiter(redis_url: str, prefix: str) -> Limiter:
    """A limiter that has counted: two keys, of which one has origins, and a plain call."""
    limiter = Limiter(redis_url, "4/hour", prefix=prefix, max_origins=2, timeout=5.0)
    for origin in ("app-a", "app-b", "app-c", None):
        with limiter.entry("orders", origin=origin):
            pass
    for origin in ("app-a", "app-b"):
        with pytest.raises(RateLimitExceeded), limiter.entry("orders", 4, origin=origin):
            pytest.fail("refused, and entered all the same")
    with pytest.raises(KeyError), limiter.entry("it's\n"):
        raise KeyError
    limiter.try_acquire("plain")
    limiter.flush()
    return limiter


def test_a_row_for_each_origin(cli: Cli, limiter: Limiter) -> None:
    head, *rows = cli("stats", "--by", "origin").out.splitlines()
    titles = ["KEY", "ORIGIN", "PASS", "BLOCK", "OK", "ERR", "AVG", "MS", "MIN", "MS"]
    assert head.split() == titles
    assert [row.split()[:6] for row in rows[:3]] == [
        ["orders", "app-a", "1", "4", "1", "0"],
        ["orders", "app-b", "1", "4", "1", "0"],
        ["orders", OTHER_ORIGINS, "1", "0", "1", "0"],
    ]
    assert rows[3:] == ["", "the last minute, of entries only"]


def test_a_row_for_each_second(cli: Cli, limiter: Limiter) -> None:
    head, *rows = cli("stats", "orders", "--minute").out.splitlines()
    assert head.split()[:4] == ["KEY", "TIME", "PASS", "BLOCK"]
    cells = [row.split() for row in rows[:-2]]
    assert {row[0] for row in cells} == {"orders"}
    assert [sum(int(row[at]) for row in cells) for at in (2, 3, 4, 5)] == [4, 8, 4, 0]


def test_json_has_the_fields_of_the_library(cli: Cli, limiter: Limiter) -> None:
    for option, expected in (
        (("--by", "origin"), list(limiter.origins("orders").values())),
        (("--minute",), [limiter.minute("orders")]),
    ):
        found = json.loads(cli("stats", "orders", *option, "--json").out)
        assert [one.pop("now_ms") > 0 for one in found] == [True] * len(expected)
        same = [dataclasses.asdict(one) for one in expected]
        assert [set(one) for one in found] == [{f.name for f in dataclasses.fields(MinuteStats)} -
                                               {"now_ms"}] * len(expected)  # fmt: skip
        for one in same:
            del one["now_ms"]
        assert found == json.loads(json.dumps(same))


def test_keys_are_sorted_and_the_first_are_kept(cli: Cli, limiter: Limiter) -> None:
    def keys(*options: str) -> list[str]:
        return [one["key"] for one in json.loads(cli("stats", "--minute", "--json", *options).out)]

    assert keys() == ["orders", "it's\n"]
    assert keys("--sort", "key") == ["it's\n", "orders"]
    assert keys("--top", "1", "--sort", "passed") == ["orders"]


def test_views_are_no_limits(cli: Cli, limiter: Limiter) -> None:
    assert "not distwindow's" not in cli("stats").out
    assert cli("reset", "orders").code == 0
    assert limiter.minute("orders").passed == 4


def test_where_nothing_was_entered_that_is_said(cli: Cli) -> None:
    assert "no entries on any key in the last minute" in cli("stats", "--minute").out
    shown = cli("stats", "k", "--by", "origin", "--json")
    assert json.loads(shown.out) == []
    assert "no entries with an origin on 'k'" in shown.err


@pytest.mark.parametrize(
    ("options", "error"),
    [
        (["--minute", "--watch"], "--watch cannot be combined"),
        (["--by", "resource"], "--by resource is not known; the last minute is shown --by origin"),
    ],
)
def test_what_it_cannot_show_is_refused(cli: Cli, options: list[str], error: str) -> None:
    shown = cli("stats", *options)
    assert shown.code == 2
    assert error in shown.err
