"""`distwindow stats` shows the slots that are held, and `distwindow reset` deletes them."""

from __future__ import annotations

import json

import redis

from distwindow import Concurrency, Key, Limiter
from tests.cli.conftest import Cli


def test_stats_shows_who_holds_slots(cli: Cli, redis_url: str, prefix: str) -> None:
    with (
        Limiter(redis_url, "10/hour", prefix=prefix) as limiter,
        Concurrency(redis_url, 4, prefix=prefix, name="web-1") as one,
        Concurrency(redis_url, 4, prefix=prefix, name="web-2") as other,
    ):
        limiter.try_acquire("report")
        mine = [one.try_hold("report"), one.try_hold("report"), other.try_hold("report")]
        also = one.try_hold(Key("all", tag="acme"))
        assert all([*mine, also])
        out = cli("stats").out
        windows, slots = out.split("\n\n")[:2]
        assert windows.splitlines()[1].startswith("report  ")
        head, *rows = slots.splitlines()
        assert head.split() == ["KEY", "SLOTS", "HELD", "HELD", "BY"]
        assert [row.split()[0] for row in rows] == ["report", "'{acme}all'"]
        assert rows[0].split()[1:3] == ["4", "3"]
        assert rows[0].endswith("web-1 (2), web-2")
        assert "skipped" not in out
        only = cli("stats", "report").out
        assert "acme" not in only
        assert "web-2" in only
        objects = json.loads(cli("stats", "--slots", "--json").out)
        assert [(o["key"], o["slots"], o["held"]) for o in objects] == [
            ("report", 4, 3),
            ("{acme}all", 4, 1),
        ]
        assert {h["name"] for h in objects[0]["holders"]} == {"web-1", "web-2"}
        assert all(0 < h["expires_in"] <= one.ttl for h in objects[0]["holders"])
        assert ["windows" in one for one in json.loads(cli("stats", "--json").out)] == [True]
    assert "web-1" not in cli("stats").out


def test_lost_slots_are_counted_and_come_first(cli: Cli, redis_url: str, prefix: str) -> None:
    with (
        Limiter(redis_url, "10/hour", prefix=prefix) as limiter,
        Concurrency(redis_url, 4, prefix=prefix, name="web-1") as slots,
        redis.Redis.from_url(redis_url) as server,
    ):
        limiter.try_acquire("a")
        held = [slots.try_hold(key) for key in ("full", "full", "full", "report", "report")]
        assert all(held)
        (name,) = server.keys(f"{prefix}:{{report}}:slots")
        server.zadd(name, {server.zrange(name, 0, 0)[0]: 1}, xx=True)  # as if not renewed
        head, first, second = (line.split() for line in cli("stats").out.splitlines()[:3])
        assert head == ["KEY", "SLOTS", "HELD", "LOST", "HELD", "BY"]
        assert (first[0], first[4]) == ("report", "1")
        assert (second[0], second[4]) == ("full", "0")
        found = json.loads(cli("stats", "--slots", "--json").out)
        assert [(one["key"], one["held"], one["lost"]) for one in found] == [
            ("report", 1, 1),
            ("full", 3, 0),
        ]


def test_stats_of_slots_alone(cli: Cli, redis_url: str, prefix: str) -> None:
    assert "no limits on any key" in cli("stats").out
    with Concurrency(redis_url, 4, prefix=prefix) as slots, slots.hold("k"):
        assert cli("stats").out.splitlines()[0].split() == ["KEY", "SLOTS", "HELD", "HELD", "BY"]
        assert json.loads(cli("stats", "--slots", "--json").out)[0]["held"] == 1


def test_those_who_wait_are_no_holders_and_are_reset(cli: Cli, redis_url: str, prefix: str) -> None:
    name = f"{prefix}:{{k}}:slots"
    with Concurrency(redis_url, 1, prefix=prefix) as slots, redis.Redis.from_url(redis_url) as own:
        mine = slots.try_hold("k")
        shown = cli("stats")
        own.zadd(name, {"123456.1": -28_000_000_000_000, "123456": -1_700_000_000_000})
        with_line = cli("stats")
        assert (with_line.err, len(with_line.out)) == (shown.err, len(shown.out))
        assert json.loads(cli("stats", "--slots", "--json").out)[0]["held"] == 1
        cli("reset", "k")
        assert not own.exists(name)
        del mine


def test_a_key_of_another_program_with_that_name_is_left_alone(
    cli: Cli, redis_url: str, prefix: str
) -> None:
    with redis.Redis.from_url(redis_url) as server:
        server.set(f"{prefix}:{{text}}:slots", "1")
        server.zadd(f"{prefix}:{{set}}:slots", {"member": 1e13})
        server.zadd(f"{prefix}:{{ring}}:6000:10", {"member": 1})
        assert "no limits on any key" in cli("stats").out
        cli("reset", "text", "ring")
        assert server.exists(f"{prefix}:{{text}}:slots", f"{prefix}:{{ring}}:6000:10") == 2


def test_reset_deletes_slots(cli: Cli, redis_url: str, prefix: str) -> None:
    with (
        Limiter(redis_url, "10/hour", prefix=prefix) as limiter,
        Concurrency(redis_url, 1, prefix=prefix) as slots,
    ):
        limiter.try_acquire("k")
        mine = [slots.try_hold("k"), slots.try_hold("only slots")]
        planned = cli("reset", "--dry-run", "k").out
        assert planned == "k: 1 window and 1 set of slots would be deleted\n"
        assert slots.stats("k").held == 1
        assert cli("reset", "k").out == "k: 1 window and 1 set of slots deleted\n"
        assert cli("reset", "only slots").out == "only slots: 1 set of slots deleted\n"
        assert slots.stats("k").held == slots.stats("only slots").held == 0
        assert all(slot.held for slot in mine)
        for claim in slots._held._claims.values():
            claim.next_due_at = 0.0  # as after a third of the time to live
        slots.flush()
        assert all(slot.lost for slot in mine), "their holders were not told"
