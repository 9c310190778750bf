"""`distwindow stats`: which keys it finds, and what it says of them."""

from __future__ import annotations

import dataclasses
import io
import json
import os
import re
import subprocess
import sys
from typing import Any

import pytest
from rich.console import Console

from distwindow import Key, Limiter, Stats
from distwindow.cli import stats as stats_command
from distwindow.cli.progress import ProgressLine
from distwindow.inspect import query as stats_query
from distwindow.inspect.query import Query
from distwindow.inspect.ranking import Order
from distwindow.inspect.selection import all_keys
from distwindow.inspect.servers import Server, open_servers
from tests.cli.conftest import Cli, fill, use
from tests.servers import Standalone


def test_a_row_for_each_key_and_limit(cli: Cli, redis_url: str, prefix: str) -> None:
    with Limiter(redis_url, ["10/hour", "100/day strict"], prefix=prefix) as limiter:
        for _ in range(12):
            limiter.try_acquire("k")
    lines = cli("stats").out.splitlines()
    assert lines[0].split() == ["KEY", "LIMIT", "USED", "PASS/S", "BLOCK/S"]
    assert lines[1].split()[:4] == ["k", "10/hour", "10", "█" * 10]
    assert lines[2].split()[:4] == ["k", "100/day", "strict", "10"]
    assert "1 key" in lines[-1]


def test_recorded_outcomes_have_columns(cli: Cli, redis_url: str, prefix: str) -> None:
    with Limiter(redis_url, "10/hour", prefix=prefix) as limiter:
        with limiter.entry("k"):
            pass
        with pytest.raises(KeyError), limiter.entry("k"):
            raise KeyError
    head, row, *_ = cli("stats").out.splitlines()
    assert head.split()[5:] == ["OK", "ERR", "AVG", "MS", "MIN", "MS"]
    assert row.split()[6:8] == ["1", "1"]


def test_a_debt_is_shown_beyond_the_limit(cli: Cli, redis_url: str, prefix: str) -> None:
    with Limiter(redis_url, "100/hour", prefix=prefix) as limiter:
        limiter.reserve("tokens:acme", 10).commit(150)
    row = cli("stats").out.splitlines()[1]
    assert row.split()[:4] == ["tokens:acme", "100/hour", "150", "█" * 10]


def test_borrowed_permits_have_a_column(cli: Cli, redis_url: str, prefix: str) -> None:
    with Limiter(redis_url, "10/hour 1 buckets", prefix=prefix, max_wait=3600) as limiter:
        limiter.try_acquire("k", 10)
        limiter.try_acquire("plain")
        for cost in (2, 1):
            assert limiter.try_acquire("k", cost, priority=True).reason == "borrowed"
    head, *rows = (line.split() for line in cli("stats", "--sort", "key").out.splitlines()[:3])
    assert head == ["KEY", "LIMIT", "USED", "PASS/S", "BLOCK/S", "BORROWED"]
    assert [(row[0], row[-1]) for row in rows] == [("k", "3"), ("plain", "-")]
    (result,) = json.loads(cli("stats", "k", "--json").out)
    assert (result["passed"], result["borrowed"], result["remaining"]) == (10, 3, 0)
    assert result["windows"][0]["borrowed_coming"] == 3


def test_json_has_the_fields_of_the_library(cli: Cli, redis_url: str, prefix: str) -> None:
    with Limiter(redis_url, ["10/hour", "100/day"], prefix=prefix) as limiter:
        for _ in range(12):
            limiter.try_acquire("k", cost=1)
        with pytest.raises(Exception, match="exceeded"), limiter.entry("k"):
            pass
        stats = limiter.stats("k")
    (result,) = json.loads(cli("stats", "--json").out)
    assert set(result) == {field.name for field in dataclasses.fields(Stats)}
    assert result["limits"] == ["10/hour", "100/day"]
    same = ("key", "passed", "blocked", "success", "error", "remaining", "window_ms", "pass_qps")
    assert [result[name] for name in same] == [getattr(stats, name) for name in same]
    assert result["buckets"] == [dataclasses.asdict(bucket) for bucket in stats.buckets]
    assert [window["limit"] for window in result["windows"]] == result["limits"]
    assert result["windows"][1]["passed"] == stats.windows[1].passed
    assert abs(result["now_ms"] - stats.now_ms) < 60_000


def test_without_keys_it_names_the_prefix_and_the_options(cli: Cli, prefix: str) -> None:
    result = cli("stats")
    assert result.code == 0
    assert prefix in result.out
    assert "--prefix" in result.out
    assert "--url" in result.out


def test_json_of_nothing_is_an_empty_array(cli: Cli) -> None:
    result = cli("stats", "--json")
    assert (result.code, json.loads(result.out)) == (0, [])
    assert "no limits on any key" in result.err


@pytest.mark.parametrize(
    ("pattern", "found"),
    [
        ("user:*", ["user:1", "user:2"]),
        ("user:[!1]", ["user:2"]),
        ("user:1", ["user:1"]),
        ("*é*", ["caffè é {x}"]),
        ("caff*", ["caffè é {x}"]),
        ("caffè é {x}", ["caffè é {x}"]),
        ("{acme}*", ["{acme}all"]),
        ("{*", ["{acme}all", "{plain}brace"]),
        ("{acme}all", ["{acme}all"]),
        ("{plain}brace", ["{plain}brace"]),
        ("a b\n*", ["a b\nc"]),
        ("x" * 200, ["long"]),
        ("xxx*", ["long"]),
        ("nobody", []),
        ("50%*", ["50%"]),
        ("star*", ["star*"]),
        ("USER*", []),
    ],
)
def test_patterns(cli: Cli, redis_url: str, prefix: str, pattern: str, found: list[str]) -> None:
    keys = ["user:1", "user:2", "caffè é {x}", "{plain}brace", "a b\nc", "x" * 200, "50%", "star*"]
    use(redis_url, prefix, *keys, Key("all", tag="acme"))
    if found:
        result = [one["key"] for one in json.loads(cli("stats", pattern, "--json").out)]
        assert sorted("long" if "~" in key else key for key in result) == sorted(found)
    else:
        assert "no limits on" in cli("stats", pattern).out


def test_what_stats_shows_of_a_long_key_finds_it_again(
    cli: Cli, redis_url: str, prefix: str
) -> None:
    use(redis_url, prefix, "x" * 200)
    (result,) = json.loads(cli("stats", "--json").out)
    (again,) = json.loads(cli("stats", result["key"], "--json").out)
    assert again["key"] == result["key"]


def test_the_records_of_senders_are_neither_listed_nor_skipped(
    cli: Cli, redis_url: str, prefix: str, client: Any
) -> None:
    with Limiter(redis_url, "10/hour", prefix=prefix) as limiter:
        for key in ("k", Key("k", tag="acme")):
            with limiter.entry(key):
                pass
        limiter.flush()
        assert len(list(client.scan_iter(f"{prefix}:*:10:senders"))) == 2
        assert len(list(client.scan_iter(f"{prefix}:*:minute:senders"))) == 2
    result = cli("stats").out
    assert "2 keys" in result
    assert "skipped" not in result
    assert "senders" not in result


def test_other_keys_are_skipped_and_counted(
    cli: Cli, redis_url: str, prefix: str, client: Any
) -> None:
    client.set(f"{prefix}:{{text}}:100:10", "x")
    client.hset(f"{prefix}:{{hash}}:100:10", "x", "y")
    client.hset(
        f"{prefix}:{{odd}}:100:10",
        mapping={"head": 1, "used": 0, "closed": 0, "limit": "0", "finished": "0", "block": "0"},
    )
    client.set(f"{prefix}:settings", "x")
    assert "4 skipped" in cli("stats").out
    use(redis_url, prefix, "k")
    result = cli("stats").out
    assert "1 key; 4 skipped" in result
    assert len(json.loads(cli("stats", "--json").out)) == 1
    assert client.get(f"{prefix}:settings") == b"x"


def test_a_key_in_shadow_is_not_called_foreign(cli: Cli, redis_url: str, prefix: str) -> None:
    with Limiter(redis_url, "10/hour", prefix=prefix, shadow=True) as limiter:
        limiter.try_acquire("k")
    assert "1 skipped: in shadow (--shadow, " in cli("stats").out
    assert "1 key" in cli("stats", "--shadow").out


def test_a_changed_limit_is_shown_at_once(cli: Cli, redis_url: str, prefix: str) -> None:
    for limit in ("10/hour", "25/hour"):
        use(redis_url, prefix, "k", limits=limit)
    assert "25/hour" in cli("stats").out


@pytest.mark.slow
def test_every_primary_of_a_cluster_is_scanned(cli: Cli, cluster_url: str, prefix: str) -> None:
    use(cluster_url, prefix, *(f"k{i}" for i in range(30)), limits=["10/hour", "99/day"])
    for more in ([], ["--top", "30"]):
        result = json.loads(cli("stats", "--json", *more, store=cluster_url).out)
        assert {one["key"] for one in result} == {f"k{i}" for i in range(30)}
        assert all(one["limits"] == ["10/hour", "99/day"] for one in result)
    deleted = cli("reset", *[f"k{i}" for i in range(30)], store=cluster_url).out
    assert deleted.count("2 windows deleted") == 30
    assert "no limits on" in cli("stats", store=cluster_url).out


def test_fakeredis_is_supported(cli: Cli, fake_url: str, prefix: str) -> None:
    use(fake_url, prefix, "k")
    assert json.loads(cli("stats", "--json", store=fake_url).out)[0]["passed"] == 1
    assert "1 window deleted" in cli("reset", "k", store=fake_url).out


@pytest.mark.slow
def test_a_hundred_thousand_keys_without_a_long_command(shell: Cli, prefix: str) -> None:
    with Standalone() as server:
        fill(server.url, prefix, 100_000)
        where = ("--url", server.url, "--prefix", prefix)
        first = shell("stats", "--top", "3", "--sort", "blocked", *where, timeout=110).out
        assert "of 100,000 limits in use" in first
        # On every tenth key equally many are blocked. Of these, the fullest are first: 91 of 100.
        assert [line.split()[0] for line in first.splitlines()[1:4]] == [
            "user:10090",
            "user:10190",
            "user:10290",
        ]
        # No SCAN looks at more keys than the server does within milliseconds. How long one took
        # would depend on what else the machine does.
        scans = server.client().info("commandstats")["cmdstat_scan"]["calls"]
        assert scans >= 100_000 / 1000


@pytest.mark.slow
def test_the_memory_does_not_grow_with_the_keys_and_the_first_rows_come_early(
    prefix: str,
) -> None:
    with Standalone() as server, server.client() as client:
        fill(server.url, prefix, 20_000)
        command = [sys.executable, "-m", "distwindow", "stats", "--json", "--url", server.url]

        def scans() -> int:
            return int(client.info("commandstats").get("cmdstat_scan", {}).get("calls", 0))

        peaks = []
        for more in (["--top", "3"], []):
            before = scans()
            process = subprocess.Popen(
                [*command, "--prefix", prefix, *more],
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
            )
            assert process.stdout is not None
            with process.stdout as out:
                lines = [out.readline(), out.readline()]
                # The command cannot go on while nobody reads the pipe.
                assert more or scans() - before < 20_000 / 1000
                lines += out
            _, status, usage = os.wait4(process.pid, 0)
            process.returncode = os.waitstatus_to_exitcode(status)
            assert process.returncode == 0
            assert len(json.loads(b"".join(lines))) == (3 if more else 20_000)
            peaks.append(usage.ru_maxrss / 1024)
        assert peaks[1] < peaks[0] + 20, "MB"


@pytest.mark.parametrize("more", [[], ["--sort", "passed"]], ids=str)
def test_beyond_those_that_can_be_ranked_each_key_comes_once_with_all_its_windows(
    cli: Cli, redis_url: str, prefix: str, monkeypatch: pytest.MonkeyPatch, more: list[str]
) -> None:
    monkeypatch.setattr(stats_query, "MOST_RANKED", 20)
    limits = ["10/hour", "90/day", "20/minute paced 9s"]
    use(redis_url, prefix, *(f"k{i}" for i in range(300)), limits=limits)
    use(redis_url, prefix, *(f"one{i}" for i in range(40)), limits="50/week")
    result = cli("stats", "--json", *more)
    found = json.loads(result.out)
    if more:
        said = "the first 20 by passed, then by share used, of 940 limits in use"
        assert (len(found), result.err) == (20, f"distwindow: {said}\n")
        return
    # SCAN returns a name again where the server makes its table larger meanwhile.
    assert {one["key"]: sorted(one["limits"]) for one in found} == {
        **{f"k{i}": sorted(limits) for i in range(300)},
        **{f"one{i}": ["50/week"] for i in range(40)},
    }
    head, *rows = cli("stats").out.splitlines()
    assert head.startswith("KEY ")
    shown = {tuple(re.split(r"\s{2,}", row)[:2]) for row in rows[:-2]}  # pages have widths
    assert len(shown) == 940
    assert int(rows[-1].removesuffix(" keys")) >= 340


@pytest.mark.slow
def test_a_window_that_is_met_late_is_shown(
    cli: Cli, redis_url: str, prefix: str, monkeypatch: pytest.MonkeyPatch, client: Any
) -> None:
    """A kind of ring that is in none of the first pages: the key may be shown before."""
    monkeypatch.setattr(stats_query, "MOST_RANKED", 50)
    fill(redis_url, prefix, 3000)
    rare = [f"user:{i}" for i in range(0, 3000, 100)]
    for number, key in enumerate(rare):
        use(redis_url, prefix, key, limits=f"10/{number + 2} hours")
    last = {one["key"]: one for one in json.loads(cli("stats", "--json").out)}
    assert len(last) == 3000
    assert [len(last[key]["limits"]) for key in rare] == [2] * len(rare)


def test_a_terminal_shows_the_first_keys_of_those_found_so_far(
    redis_url: str, prefix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A ranked answer is known at the end of the scan, and a million keys take half a minute."""
    monkeypatch.setattr(stats_command, "_PAGE_EVERY_S", 0.0)
    monkeypatch.setattr(stats_command, "_FIRST_PAGE_S", 0.0)
    fill(redis_url, prefix, 3000)
    screen = io.StringIO()
    monkeypatch.setattr(screen, "isatty", lambda: True)
    console = Console(file=screen, force_terminal=True, color_system=None, width=160, height=20)
    first = Query(prefix, all_keys(prefix), Order.KEY, 5, False, "all")
    with open_servers(redis_url) as servers:
        stats_command._View(first, console, "nothing").print_tables(servers)
    *pages, last = screen.getvalue().split("the first ones so far; scanning: ")
    assert [page.count("user:") for page in pages] == [5] * len(pages) != []
    assert re.findall(r"(user:\d+) ", last) == [f"user:{i}" for i in (0, 1, 10, 100, 1000)]
    assert "the first 5 by key, of 3,000 limits in use" in last


def test_in_a_pipe_the_progress_is_a_line_now_and_then(
    client: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    now = [100.0]
    monkeypatch.setattr("distwindow.cli.progress.time.monotonic", lambda: now[0])
    with ProgressLine([Server("", client, None)]) as line:
        for names in range(80):
            line.update(names * 1000)
            now[0] += 0.125
    assert capsys.readouterr().err.splitlines() == [
        f"distwindow: scanning: {names:,} names; the store has {client.dbsize():,} keys"
        for names in (8_000, 48_000)
    ]
