"""Malformed arguments of `acquire_turn` that are sent with EVALSHA give an error, and leave the
rings and their lines unchanged.
"""

from __future__ import annotations

from typing import Any

import pytest
import redis

from distwindow import Limit
from distwindow.ring.command import load_script
from distwindow.ring.replies import PAST_DEADLINE
from distwindow.waiting.commands import AcquireTurn
from tests.lua.target import FAR_DEADLINES, HOSTILE, LIMIT, NOW, OTHER, Target, malformed

KINDS = {"one ring": (LIMIT,), "two rings": (LIMIT, OTHER)}
NAME = "acquire_turn"


class TurnTarget(Target):
    """A target whose window is full, and whose line has two places."""

    def __init__(self, server: redis.Redis, limits: tuple[Limit, ...]) -> None:
        super().__init__(server, limits, NOW + 5, 5)
        for _ in range(2):
            assert self.send(AcquireTurn(self.charges, NOW))[1] == -1

    def content(self) -> list[Any]:
        return [self.server.dump(key) for key in self.keys(NAME)]

    def call(self) -> list[Any]:
        return self.words(AcquireTurn(self.charges, self.now, held_ms=NOW, takes_next=True))


def is_allowed(place: str, word: str) -> bool:
    far = (*FAR_DEADLINES, "10000000000001", "99999999999999")
    return (place == "stamp" and word in far) or (place == "now_ms" and word == "")


@pytest.mark.parametrize("kind", KINDS)
def test_a_hostile_argument_is_an_error_and_changes_nothing(server: redis.Redis, kind: str) -> None:
    target = TurnTarget(server, KINDS[kind])
    rings = ["permits", "limit", "bucket_ms", "shape"] * len(KINDS[kind])
    words, before, wrong = target.call(), target.content(), []
    for at, place in enumerate(["stamp", *rings, "now_ms", "held_ms", "takes_next"]):
        for word in (*HOSTILE, "10000000000001", "99999999999999"):
            if is_allowed(place, word):
                continue
            reply = target.run(NAME, [*words[:at], word, *words[at + 1 :]])
            done = isinstance(reply, list) and reply[1] != PAST_DEADLINE
            if done or target.content() != before:
                wrong.append((place, word, reply))
    assert wrong == []


@pytest.mark.parametrize("kind", KINDS)
def test_missing_and_further_arguments_are_errors(server: redis.Redis, kind: str) -> None:
    target = TurnTarget(server, KINDS[kind])
    words, before = target.call(), target.content()
    for count in range(1, len(words)):
        assert isinstance(target.run(NAME, words[:count]), redis.ResponseError), count
    assert malformed(target.run(NAME, [*words, "1"]))
    assert malformed(target.run(NAME, [*words[:-1], "2"]))
    assert target.content() == before


def test_the_second_keys_have_to_be_those_of_the_rings(server: redis.Redis) -> None:
    target = TurnTarget(server, KINDS["one ring"])
    words, before, sha = target.call(), target.content(), load_script(NAME).sha
    ring, line = target.keys(NAME)
    for keys in ([ring], [ring, ring], [ring, line + b"x"], [line, ring], [ring, line, ring]):
        with pytest.raises(redis.ResponseError, match="malformed arguments"):
            server.evalsha(sha, len(keys), *keys, *words)
    assert target.content() == before


def test_past_the_deadline_nothing_is_done(server: redis.Redis) -> None:
    target = TurnTarget(server, KINDS["two rings"])
    words, before = target.call(), target.content()
    past = f"{NOW - 1}.000001"
    assert target.run(NAME, [past, *words[1:]]) == [past.encode(), PAST_DEADLINE, target.now]
    assert target.content() == before


@pytest.mark.parametrize("field", ["tail", "seen"])
def test_a_hash_that_is_no_line_is_an_error_and_no_admission(
    server: redis.Redis, field: str
) -> None:
    target = TurnTarget(server, KINDS["two rings"])
    server.hset(target.keys(NAME)[2].decode(), field, "soon")
    before = target.content()
    assert isinstance(target.run(NAME, target.call()), redis.ResponseError)
    assert target.content() == before


def test_a_line_expires_two_windows_after_it_was_last_used(server: redis.Redis) -> None:
    target = TurnTarget(server, KINDS["one ring"])
    line = target.keys(NAME)[1]
    window_ms = LIMIT.span * LIMIT.bucket_ms
    assert 2 * window_ms - 60_000 < server.pttl(line) <= 2 * window_ms
    assert server.object("encoding", line) in (b"listpack", b"ziplist")


def test_a_key_that_nobody_was_refused_on_has_no_line(server: redis.Redis) -> None:
    target = Target(server, (LIMIT,), NOW, 0)
    for _ in range(LIMIT.amount):
        assert target.send(AcquireTurn(target.charges, NOW))[1] >= 0
    assert server.exists(target.keys(NAME)[1]) == 0
    assert target.send(AcquireTurn(target.charges, NOW))[1] == -1
    assert server.exists(target.keys(NAME)[1]) == 1
