"""`distwindow stats` shows upstreams that have asked to wait, and `reset` ends their pauses."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import redis

from distwindow import Key
from distwindow.lifecycle.connect import open_store
from distwindow.ring.clock import SYSTEM
from distwindow.ring.key import AnyKey
from distwindow.runtime.options import Options
from distwindow.upstream.commands import PAUSED, PROBE, SEND, PauseCommand, pause_name
from tests.cli.conftest import Cli, use
from tests.cli.terminal import Terminal

Pause = Callable[..., Any]
CAP_MS = 600_000


@pytest.fixture
def pause(redis_url: str, prefix: str) -> Iterator[Pause]:
    """Return a function that sends a command on the pause of a key, `after_ms` from now."""
    store = open_store(redis_url, Options())

    def send(
        key: AnyKey,
        what: Any = "tell",
        first_ms: int = 0,
        second_ms: int = CAP_MS,
        after_ms: int = 0,
    ) -> Any:
        now_ms, name = SYSTEM.now_ms() + after_ms, pause_name(prefix, key)
        return store.execute(
            PauseCommand(
                (), now_ms, name=name, what=what, call="c", first_ms=first_ms, second_ms=second_ms
            )
        )

    yield send
    store.close()


@pytest.fixture
def pauses(pause: Pause) -> None:
    """One upstream is paused for as long as is possible, and one on a tagged key; of one the pause
    is over, and one is called by more and more.
    """
    pause("api.example", first_ms=277_403_000)
    pause(Key("gpt", tag="acme"), first_ms=60_000)
    for key in ("over.example", "back.example"):
        pause(key, first_ms=1000, after_ms=-5000)
    state, probe_ms, *_ = pause("back.example", "ask", first_ms=60_000)
    assert state == PROBE
    pause("back.example", "ok", first_ms=probe_ms, after_ms=30_000)


@pytest.mark.usefixtures("pauses")
def test_stats_shows_who_is_paused_above_the_keys(cli: Cli, redis_url: str, prefix: str) -> None:
    use(redis_url, prefix, "user:42", limits="5/minute")
    out = cli("stats").out
    lines = out.splitlines()
    assert lines[0].split() == ["UPSTREAM", "STATE", "FOR", "S", "SAID", "S", "IN", "A", "ROW"]
    rows = [line.split() for line in lines[1 : lines.index("")]]
    shown = {row[0]: row[1] for row in rows}
    assert [row[0] for row in rows[:2]] == ["api.example", "'{acme}gpt'"]
    assert shown["api.example"] == shown["'{acme}gpt'"] == "paused"
    assert (shown["over.example"], shown["back.example"]) == ("over", "returning")
    assert 599.0 < float(rows[0][2]) <= 600.0
    assert 277_402.0 < float(rows[0][3].replace(",", "")) <= 277_403.0
    assert lines[lines.index("") + 2].startswith("user:42  5/minute")
    assert "skipped" not in out


@pytest.mark.usefixtures("pauses")
def test_stats_of_a_key_has_its_pause(cli: Cli) -> None:
    for key in ("api.example", "api.*", "{acme}gpt"):
        _, row = [line.split() for line in cli("stats", key).out.splitlines()]
        assert row[:2] == ["'{acme}gpt'" if "gpt" in key else "api.example", "paused"]


@pytest.mark.usefixtures("pauses")
def test_as_json(cli: Cli) -> None:
    found = json.loads(cli("stats", "--pauses", "--json").out)
    assert [one["key"] for one in found[:2]] == ["api.example", "{acme}gpt"]
    first, over = found[0], next(one for one in found if one["key"] == "over.example")
    fields = {"key", "state", "paused_for", "said", "in_a_row", "until_ms", "now_ms"}
    assert all(one.keys() == fields for one in found)
    assert (first["state"], first["in_a_row"]) == ("paused", 1)
    assert first["paused_for"] == (first["until_ms"] - first["now_ms"]) / 1000
    assert first["said"] - first["paused_for"] == 277_403 - CAP_MS / 1000
    assert (over["state"], over["paused_for"], over["said"]) == ("over", 0, 0)
    as_json = cli("stats", "--json")
    assert as_json.out == "[]\n"
    assert as_json.err.endswith("; there is more with --pauses\n")


def test_nothing_is_paused(cli: Cli, redis_url: str, prefix: str) -> None:
    use(redis_url, prefix, "user:42", limits="5/minute")
    shown = cli("stats", "--pauses")
    assert shown.out.startswith(f"no upstream of any key under the prefix {prefix!r} ")
    assert " has asked to wait, or they are elsewhere " in shown.out


def test_what_is_left_out_is_counted(cli: Cli, pause: Pause) -> None:
    for i in range(7):
        pause(f"api{i}", first_ms=60_000 + i * 1000)
    lines = cli("stats", "--pauses", "--top", "5").out.splitlines()
    assert [line.split()[0] for line in lines[1:6]] == [f"api{i}" for i in (6, 5, 4, 3, 2)]
    assert lines[-1] == "2 of 7 upstreams that have asked to wait left out (2 paused)"


@pytest.mark.slow
@pytest.mark.skipif(os.name != "posix", reason="needs a terminal")
@pytest.mark.usefixtures("pauses")
def test_watch_shows_pauses(redis_url: str, prefix: str) -> None:
    where = ("stats", "--watch", "--url", redis_url, "--prefix", prefix)
    with Terminal(*where, columns=120, rows=12) as terminal:
        terminal.shows(r"UPSTREAM +STATE +FOR S(?s:.*)api.example +paused +5\d\d")


def test_the_kinds_exclude_each_other(cli: Cli) -> None:
    result = cli("stats", "--pauses", "--breakers")
    assert (result.code, result.out) == (2, "")
    assert "give one of them" in result.err


def test_another_programs_key_of_that_name_is_left_alone(
    cli: Cli, redis_url: str, prefix: str
) -> None:
    with redis.Redis.from_url(redis_url) as server:
        server.set(f"{prefix}:{{text}}:pause", "1")
        server.hset(f"{prefix}:{{hash}}:pause", "until", "soon")
        assert cli("stats", "--pauses", "--json").out == "[]\n"
        cli("reset", "text")
        assert server.exists(f"{prefix}:{{text}}:pause")


@pytest.mark.usefixtures("pauses")
def test_reset_ends_pauses(cli: Cli, pause: Pause, redis_url: str, prefix: str) -> None:
    use(redis_url, prefix, "api.example", limits="5/minute")
    planned = cli("reset", "--dry-run", "api.example").out
    assert planned == "api.example: 1 window and 1 pause would be deleted\n"
    assert pause("api.example", "ask")[0] == PAUSED
    assert cli("reset", "api.example", "{acme}gpt").out == (
        "api.example: 1 window and 1 pause deleted\n{acme}gpt: 1 pause deleted\n"
    )
    assert pause("api.example", "ask")[0] == pause(Key("gpt", tag="acme"), "ask")[0] == SEND
