"""The scripts of minute views: their heads describe what Python sends, and hostile arguments give
an error and change nothing.
"""

from __future__ import annotations

from typing import Any

import pytest
import redis

from distwindow.minute.commands import ViewFlush, ViewFlushReply, ViewRead, views_name
from distwindow.ring.command import Command
from distwindow.ring.replies import PAST_DEADLINE
from distwindow.ring.ring import MAX_TOTAL
from distwindow.ring.stats import Bucket
from distwindow.runtime.options import OTHER_ORIGINS
from tests.clock_and_stores import T0, fresh_key
from tests.lua.target import FAR_DEADLINES, HOSTILE, STAMP, evalsha, malformed
from tests.lua.test_heads import lines, parsed

NOW = T0 // 1000 * 1000 + 5


class Views:
    """The views of one key in Redis, and calls of the scripts on them."""

    def __init__(self, server: redis.Redis) -> None:
        self.server = server
        self.name = views_name("hostile", fresh_key())

    def flush(self, now: int = NOW, *, origin: str = "app", **more: Any) -> ViewFlush:
        seconds = (Bucket(now - 1005, 1, 2, 3, 4, 50, 6), Bucket(now - 5, 1, 2, 3, 4, 50, 6))
        return ViewFlush((), now, name=self.name, counts=((origin, seconds),), **more)

    def read(self, now: int = NOW) -> ViewRead:
        return ViewRead((), now, name=self.name)

    def run(self, command: Command[Any], words: list[Any] | None = None) -> Any:
        words = [STAMP, *command.arguments()] if words is None else words
        return evalsha(self.server, command.script, command.keys, words)

    def content(self) -> list[Any]:
        return [self.server.dump(key) for key in self.flush().keys]


def in_state(server: redis.Redis, state: str) -> Views:
    views = Views(server)
    if state != "absent":
        views.run(views.flush(sender="0a", seq=1))
    if state == "full":
        views.run(views.flush(origin="other", max_origins=1))
    return views


STATES = ("absent", "counted", "full")


def test_the_heads_describe_what_is_sent(server: redis.Redis) -> None:
    views = Views(server)
    for command in (views.flush(), views.flush(sender="0fa1", seq=7, max_origins=9)):
        (line,) = lines("view_flush", "ARGV")
        found = parsed(line, [STAMP, *command.arguments()], 1)
        assert found is not None
        assert found["max_origins"] == str(command.max_origins)
        assert found["origin_1"] == "b'app'"
        assert found["counts_1"].count(";") == 2
        assert lines("view_flush", "KEYS") == ["views senders"]
        assert command.keys == [views.name, views.name + b":senders"]
    (line,) = lines("view_read", "ARGV")
    assert parsed(line, [STAMP, *views.read().arguments()], 1) == {
        "stamp": STAMP,
        "now_ms": str(NOW),
    }


def test_a_reply_has_the_form_of_the_head(server: redis.Redis) -> None:
    views = Views(server)
    assert lines("view_flush", "RETURN") == ["stamp taken now_ms", "stamp -2 now_ms"]
    assert lines("view_read", "RETURN") == [
        "stamp 0 now_ms (origin seconds ...)",
        "stamp -2 now_ms",
    ]
    command = views.flush()
    reply = views.run(command)
    assert command.reply(reply) == ViewFlushReply(True, NOW)
    found, now = views.read().reply(views.run(views.read()))
    assert (sorted(found), now) == (["", "app"], NOW)
    assert found[""] == found["app"] == command.counts[0][1] or len(found["app"]) == 2


@pytest.mark.parametrize("state", STATES)
def test_past_the_deadline_nothing_is_done(server: redis.Redis, state: str) -> None:
    views = in_state(server, state)
    before = views.content()
    for command in (views.flush(), views.read()):
        reply = views.run(command, ["1.000001", *command.arguments()])
        assert reply == [b"1.000001", PAST_DEADLINE, NOW]
    assert views.content() == before


@pytest.mark.parametrize("state", STATES)
def test_hostile_arguments_change_nothing(server: redis.Redis, state: str) -> None:
    views = in_state(server, state)
    before, allowed = views.content(), 0
    command = views.flush(sender="0fa1", seq=7)
    words = [STAMP, *command.arguments()]
    names = ("stamp", "now_ms", "sender", "seq", "max_origins", "origin", "counts")
    for at, place in enumerate(names):
        for word in HOSTILE:
            if place == "origin" or is_allowed(place, word):
                allowed += 1
                continue
            reply = views.run(command, [*words[:at], word, *words[at + 1 :]])
            is_error = isinstance(reply, redis.ResponseError)
            assert is_error or reply[1] == PAST_DEADLINE, (place, word)
            if place not in ("stamp", "now_ms"):  # the script computes with these first
                assert malformed(reply), (place, word, reply)
            assert views.content() == before, (place, word)
    assert allowed > len(HOSTILE)


def is_allowed(place: str, word: str) -> bool:
    """True for a deadline far ahead, the server's own clock, no counts, and any hexadecimal
    sender.
    """
    if place == "stamp":
        return word in FAR_DEADLINES
    if place == "sender":
        return set(word) <= set("0123456789abcdefABCDEF")
    return word == "" and place in ("now_ms", "counts")


@pytest.mark.parametrize(
    "change",
    [
        lambda words: words[:-1],
        lambda words: words[:5],
        lambda words: [*words, "origin"],
        lambda words: [*words[:5], b"x" * 513, words[6]],
        lambda words: [*words[:6], words[6] + "1 2 3;"],
        lambda words: [*words[:6], words[6].replace(" ", "  ")],
        lambda words: [*words[:6], f"{NOW // 1000} {MAX_TOTAL + 1} 0 0 0 0 0;"],
        lambda words: [*words[:4], "0", *words[5:]],
        lambda words: [*words[:4], "1001", *words[5:]],
    ],
)  # fmt: skip
def test_malformed_calls_are_errors_and_change_nothing(server: redis.Redis, change: Any) -> None:
    views = in_state(server, "counted")
    before, command = views.content(), views.flush()
    assert malformed(views.run(command, change([STAMP, *command.arguments()])))
    assert views.content() == before


def test_foreign_senders_are_refused(server: redis.Redis) -> None:
    views = Views(server)
    words = [STAMP, *views.flush().arguments()]
    assert malformed(evalsha(server, "view_flush", [views.name, views.name + b":other"], words))
    assert views.content() == [None, None]


def test_an_origin_may_have_any_bytes(server: redis.Redis) -> None:
    views = Views(server)
    origins = ["", OTHER_ORIGINS, "{a}", "a b;c", "\x00", "\ud800", "é" * 128, "1795332256 1 1;"]
    for origin in origins:
        assert views.run(views.flush(origin=origin))[1] == 1
    found = views.read().reply(views.run(views.read())).views
    assert set(found) == set(origins)
    assert {b.passed for b in found[""]} == {len(origins)}


def test_totals_end_at_the_largest_exact_number(server: redis.Redis) -> None:
    views = Views(server)
    most = Bucket(NOW, *[MAX_TOTAL] * 6)
    for _ in range(3):
        assert views.run(ViewFlush((), NOW, name=views.name, counts=(("", (most,)),)))[1] == 1
    (second,) = views.read().reply(views.run(views.read())).views[""]
    assert second == Bucket(NOW // 1000 * 1000, *[MAX_TOTAL] * 6)


def test_the_views_expire_a_minute_after_their_last_second(server: redis.Redis) -> None:
    views = Views(server)
    views.run(views.flush(sender="0a", seq=1))
    for key in views.flush().keys:
        assert 60_000 < server.pttl(key) <= 61_000
