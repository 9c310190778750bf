"""`distwindow stats` shows circuit breakers, and `reset` closes them."""

from __future__ import annotations

import json
import os
from contextlib import suppress

import pytest

from distwindow import (
    AdaptiveBreaker,
    CircuitBreaker,
    ConsecutiveFailures,
    ErrorCount,
    Key,
    SlowRatio,
)
from tests.cli.conftest import Cli, use
from tests.cli.terminal import Terminal


@pytest.fixture
def breakers(redis_url: str, prefix: str) -> None:
    """One breaker that is open, one that is closed, and one on a tagged key."""
    with CircuitBreaker(redis_url, ErrorCount(2, open_for=600), prefix=prefix) as breaker:
        for key, fails in (("payments", 3), ("search", 1)):
            for _ in range(fails):
                with pytest.raises(OSError), breaker.call(key):  # noqa: PT011 - it is passed on
                    raise OSError
        breaker.flush()
    with CircuitBreaker(redis_url, SlowRatio(60), prefix=prefix) as slow:
        with slow.call(Key("all", tag="acme")):
            pass


def open_breakers(url: str, prefix: str, count: int) -> None:
    """Open the breakers of `service:00`.. for ten minutes."""
    with CircuitBreaker(url, ErrorCount(2, open_for=600), prefix=prefix) as breaker:
        for i in range(count):
            for _ in range(2):
                with suppress(OSError), breaker.call(f"service:{i:02}"):
                    raise OSError
        breaker.flush()


@pytest.mark.usefixtures("breakers")
def test_the_states_are_above_the_keys_while_one_is_open(
    cli: Cli, redis_url: str, prefix: str
) -> None:
    use(redis_url, prefix, "user:42", limits="5/minute")
    lines = cli("stats").out.splitlines()
    assert lines[0].split() == ["BREAKER", "RULE", "STATE", "SINCE", "S", "CALLS", "BAD", "PROBES"]
    rows = [line.split() for line in lines[1 : lines.index("")]]
    assert [(*row[:-4], *row[-3:]) for row in rows] == [
        ("payments", "error_count", "count=2", "open_for=600", "open", "3", "3", "-"),
        ("search", "error_count", "count=2", "open_for=600", "closed", "1", "1", "-"),
        ("'{acme}all'", "slow_ratio", "max_rt=60", "closed", "1", "0", "-"),
    ]
    assert lines[lines.index("") + 2].startswith("user:42  5/minute")
    assert lines[-1] == "1 key"


def test_what_is_left_out_is_counted(cli: Cli, redis_url: str, prefix: str) -> None:
    use(redis_url, prefix, *(f"user:{i}" for i in range(70)), limits="5/minute")
    open_breakers(redis_url, prefix, 60)
    left_out = "50 of 60 circuit breakers left out (50 not closed): --breakers"
    first = "the first 10 by blocked, then by share used, of 70 limits in use"
    lines = cli("stats", "--top", "10").out.splitlines()
    assert (lines[1].split()[:5], lines[-1]) == (
        ["service:00", "error_count", "count=2", "open_for=600", "open"],
        f"{first}; {left_out}",
    )
    assert cli("stats", "--breakers", "--top", "58").out.splitlines()[-1] == (
        "2 of 60 circuit breakers left out (2 not closed)"
    )
    assert cli("stats", "--json").err == (
        "distwindow: 70 keys; 60 of 60 circuit breakers left out (60 not closed): --breakers\n"
    )


@pytest.mark.slow
@pytest.mark.skipif(os.name != "posix", reason="needs a terminal")
def test_watch_has_rows_of_each_kind(redis_url: str, prefix: str) -> None:
    use(redis_url, prefix, *(f"user:{i}" for i in range(70)), limits="5/minute")
    open_breakers(redis_url, prefix, 3)
    where = ("stats", "--watch", "--url", redis_url, "--prefix", prefix)
    with Terminal(*where, columns=120, rows=9) as terminal:
        terminal.shows(
            r"service:00 +error_count count=2 open_for=600 +open(?s:.*)\nuser:0(?s:.*)"
            r"the first 2 by blocked, then by share used, of 70 limits in use; "
            r"2\s+of\s+3\s+circuit\s+breakers\s+left\s+out\s+\(2\s+not\s+closed\):\s+--breakers"
        )


def test_failures_in_a_row_are_shown_as_calls_and_bad_ones(
    cli: Cli, redis_url: str, prefix: str
) -> None:
    with CircuitBreaker(redis_url, ConsecutiveFailures(5, open_for=60), prefix=prefix) as breaker:
        for fails in (True, False, True, True):
            with suppress(OSError), breaker.call("search"):
                if fails:
                    raise OSError
        breaker.flush()
    (row,) = [line.split() for line in cli("stats", "--breakers").out.splitlines()[1:]]
    expected = ["search", "consecutive_failures", "count=5", "open_for=60", "closed", "-", "2", "2"]
    assert row[:8] == expected


@pytest.mark.usefixtures("breakers")
def test_without_keys_the_breakers_alone_are_shown(cli: Cli) -> None:
    out = cli("stats", "pay*").out
    assert [line.split()[0] for line in out.splitlines()] == ["BREAKER", "payments"]
    as_json = cli("stats", "--json")
    assert as_json.out == "[]\n"
    assert as_json.err.endswith("(--prefix, --url); there is more with --breakers\n")


@pytest.mark.usefixtures("breakers")
def test_as_json(cli: Cli) -> None:
    found = json.loads(cli("stats", "--breakers", "--json").out)
    assert [(one["key"], one["state"], one["calls"], one["bad"]) for one in found] == [
        ("payments", "open", 3, 3),
        ("search", "closed", 1, 1),
        ("{acme}all", "closed", 1, 0),
    ]
    opened = found[0]
    assert opened["retry_ms"] - opened["since_ms"] == 600_000
    assert (opened["rule"], opened["window_ms"], opened["probes"]) == ("error_count", 10_000, 0)
    rule = ErrorCount(2, open_for=600)
    assert ErrorCount(**opened["settings"]) == rule, "the name in the store has the whole rule"


@pytest.mark.usefixtures("breakers")
def test_reset_closes_breakers(cli: Cli, redis_url: str, prefix: str) -> None:
    use(redis_url, prefix, "search", limits="5/minute")
    would = cli("reset", "payments", "--dry-run").out
    assert would == "payments: 1 circuit breaker would be deleted\n"
    assert cli("reset", "payments", "{acme}all").out == (
        "payments: 1 circuit breaker deleted\n{acme}all: 1 circuit breaker deleted\n"
    )
    left = json.loads(cli("stats", "--breakers", "--json").out)
    assert [one["key"] for one in left] == ["search"]
    assert cli("reset", "--pattern", "*").out == (
        "*: 1 key, 1 window and 1 circuit breaker deleted\n"
    )


@pytest.mark.parametrize("command", ["reset", "stats"])
def test_the_breaker_of_a_key_that_is_too_long_for_a_name_is_found(
    cli: Cli, redis_url: str, prefix: str, command: str
) -> None:
    key = "service:" * 20
    with CircuitBreaker(redis_url, ErrorCount(2), prefix=prefix) as breaker, breaker.call(key):
        pass
    found = {"reset": f"{key}: 1 circuit breaker deleted", "stats": "error_count"}
    assert found[command] in cli(command, key).out


def test_adaptive_breakers_have_no_state(cli: Cli, redis_url: str, prefix: str) -> None:
    with AdaptiveBreaker(redis_url, prefix=prefix) as breaker:
        for fails in (False, True, True):
            with suppress(OSError), breaker.call("search"):
                if fails:
                    raise OSError
    (found,) = json.loads(cli("stats", "--breakers", "--json").out)
    assert (found["key"], found["state"], found["calls"], found["bad"]) == (
        "search", "adaptive", 3, 2,
    )  # fmt: skip


def test_where_there_are_none_it_says_what_there_is_none_of(
    cli: Cli, redis_url: str, prefix: str
) -> None:
    use(redis_url, prefix, "k", limits="5/minute")
    for option, kind in (("--breakers", "no circuit breakers"), ("--slots", "no slots are held")):
        for end in ([], ["--json"]):
            result = cli("stats", "nokey", option, *end)
            said = result.err if end else result.out
            assert said.startswith(f"{kind} on 'nokey' under the prefix {prefix!r} at "), said
            assert said.rstrip().endswith("or they are elsewhere (--prefix, --url)")
        assert kind in cli("stats", option).out
