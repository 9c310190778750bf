"""The two scripts of upstreams: their heads say what Python sends and accepts, and malformed
arguments that are sent with EVALSHA are an error and change nothing.
"""

from __future__ import annotations

import re
from typing import Any

import pytest
import redis

from distwindow import Limit
from distwindow.ring.command import Command, load_script
from distwindow.ring.commands import charges_of
from distwindow.ring.key import ring_name_prefix
from distwindow.ring.replies import PAST_DEADLINE
from distwindow.upstream.commands import (
    Lower,
    LowerReply,
    PauseCommand,
    PauseReply,
    pause_name,
)
from tests.clock_and_stores import T0, fresh_key
from tests.lua.target import FAR_DEADLINES, HOSTILE, STAMP, head_of, malformed

LIMITS = Limit(100, per=60), Limit(1000, per=3600)
PLACES = {
    "upstream_pause": ["stamp", "now_ms", "what", "call", "first_ms", "second_ms", "jitter"],
    "upstream_lower": [
        "stamp", "used", "limit", "bucket_ms", "shape", "used", "limit", "bucket_ms", "shape",
        "now_ms", "reset_ms", "reset_ms",
    ],
}  # fmt: skip
EVERY_SCRIPT = pytest.mark.parametrize("name", PLACES)


class Stored:
    """What is stored of a new upstream: nothing, or a pause and a window that is half full."""

    def __init__(self, server: redis.Redis, *, is_empty: bool = False) -> None:
        self.server, self.key = server, fresh_key()
        if not is_empty:
            for name in PLACES:
                assert not isinstance(self.run(self.command(name)), Exception)

    def command(self, name: str, what: Any = "tell") -> Command[Any]:
        if name == "upstream_pause":
            return PauseCommand(
                (), T0, name=pause_name("hostile", self.key), what=what, call="a1", first_ms=5000,
                second_ms=600_000, jitter=7,
            )  # fmt: skip
        prefix = ring_name_prefix("hostile", self.key)
        return Lower(charges_of(self.key, prefix, LIMITS, 50), T0, resets_ms=(0, 5000))

    def run(self, command: Command[Any], words: list[Any] | None = None, keys: Any = None) -> Any:
        keys = command.keys if keys is None else keys
        words = [STAMP, *command.arguments()] if words is None else words
        try:
            return self.server.evalsha(load_script(command.script).sha, len(keys), *keys, *words)
        except redis.ResponseError as exc:
            return exc

    def content(self) -> list[Any]:
        return [self.server.dump(key) for name in PLACES for key in self.command(name).keys]


def lines(name: str, word: str) -> list[str]:
    found = [row.removeprefix(word) for row in head_of(name) if row.startswith(word)]
    return [re.split(r"\s{3,}", row.strip())[0] for row in found]


@EVERY_SCRIPT
def test_the_head_names_the_keys_and_the_arguments(server: redis.Redis, name: str) -> None:
    assert head_of(name)[0].startswith(f"{name}: ")
    assert lines(name, "KEYS") == [{"upstream_pause": "pause"}.get(name, "ring...")]
    (line,) = lines(name, "ARGV")
    named = re.sub(r"\(([^)]*)\)\.\.\.|(\w+)\.\.\.", r"\1\2 \1\2", line).split()
    sent = Stored(server).command(name).arguments()
    assert named == PLACES[name]
    assert len(named) == len(sent) + 1


def test_each_reply_is_parsed_as_the_head_says() -> None:
    stamp, now = b"9999999999999.000001", T0
    pause, lower = PauseCommand(()), Lower(())
    assert lines("upstream_pause", "RETURN") == [
        "stamp 0 now_ms", "stamp 1 now_ms", "stamp 2 now_ms wait_ms said_ms",
        "stamp 3 now_ms wait_ms longest_ms", "stamp 4 now_ms", "stamp -2 now_ms",
    ]  # fmt: skip
    assert pause.reply([stamp, 0, now]) == PauseReply(0, now)
    assert pause.reply([stamp, 2, now, 5, 9]) == PauseReply(2, now, wait_ms=5, said_ms=9)
    assert pause.reply([stamp, 3, now, 5]) == PauseReply(3, now, wait_ms=5)
    assert lines("upstream_lower", "RETURN") == ["stamp 0 now_ms added...", "stamp -2 now_ms"]
    assert lower.reply([stamp, 0, now, 3, 0]) == LowerReply((3, 0), now)


@EVERY_SCRIPT
def test_the_time_is_the_servers_unless_it_is_sent(server: redis.Redis, name: str) -> None:
    stored = Stored(server, is_empty=True)
    command = stored.command(name)
    command.now_ms = None
    seconds, _ = server.time()
    assert 0 <= stored.run(command)[2] - seconds * 1000 < 60_000


@pytest.mark.parametrize("is_empty", [False, True])
@pytest.mark.parametrize(
    ("name", "what"),
    [(name, what) for name in PLACES for what in ("ask", "tell", "ok", "free")][:5],
)
def test_a_hostile_argument_is_an_error_and_changes_nothing(
    server: redis.Redis, name: str, what: str, is_empty: bool
) -> None:
    stored = Stored(server, is_empty=is_empty)
    command, before = stored.command(name, what), stored.content()
    words = [STAMP, *command.arguments()]
    for at, place in enumerate(PLACES[name]):
        for word in HOSTILE:
            is_usable = (
                (place == "stamp" and word in FAR_DEADLINES)
                or (place == "now_ms" and not word)
                or (place == "call" and word.isalnum() and word.isascii())
            )
            if is_usable:
                continue
            reply = stored.run(command, [*words[:at], word, *words[at + 1 :]])
            if not isinstance(reply, redis.ResponseError):
                assert reply[1] == PAST_DEADLINE, (place, word)
                assert place in ("stamp", "now_ms")
            assert stored.content() == before, (place, word)


@EVERY_SCRIPT
def test_arguments_and_keys_that_are_missing_or_too_many_change_nothing(
    server: redis.Redis, name: str
) -> None:
    stored = Stored(server)
    command, before = stored.command(name), stored.content()
    words = [STAMP, *command.arguments()]
    for wrong in (words[:-2], words[:2], [STAMP]):
        assert malformed(stored.run(command, wrong)), wrong
    if name == "upstream_lower":
        assert malformed(stored.run(command, [*words, "1"]))
    for keys in ([], [*command.keys, command.keys[0]]):
        assert isinstance(stored.run(command, words, keys), redis.ResponseError)
    assert stored.content() == before


@EVERY_SCRIPT
def test_past_its_deadline_nothing_is_done(server: redis.Redis, name: str) -> None:
    stored = Stored(server, is_empty=True)
    command = stored.command(name)
    reply = stored.run(command, ["1.000001", *command.arguments()])
    assert reply[1] == PAST_DEADLINE
    assert stored.content() == Stored(server, is_empty=True).content()


def test_what_is_kept_of_a_pause_expires(server: redis.Redis) -> None:
    """A minute after its end it is forgotten, and a minute later deleted."""
    stored = Stored(server)
    (name,) = stored.command("upstream_pause").keys
    ttl_ms: Any = server.pttl(name)
    assert 5035 + 60_000 < ttl_ms <= 5035 + 120_000
    for what in ("ask", "ok", "free"):
        stored.run(stored.command("upstream_pause", what))
        later_ms: Any = server.pttl(name)
        assert 0 < later_ms <= ttl_ms
