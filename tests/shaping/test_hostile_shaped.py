"""Malformed arguments of `acquire_shaped` and `peek_shaped` that are sent with EVALSHA give an
error, and leave the rings, the promised moments and the tokens unchanged.
"""

from __future__ import annotations

from typing import Any

import pytest
import redis

from distwindow import Limit
from distwindow.ring.command import load_script
from distwindow.ring.replies import PAST_DEADLINE
from distwindow.shaping.commands import AcquireShaped
from tests.lua.target import COMMANDS, FAR_DEADLINES, HOSTILE, NOW, OTHER, STAMP, Target, malformed

LIMITS = {
    "paced": (Limit(5, per=300, buckets=5, max_wait=600.0),),
    "warming": (Limit(50, per=300, buckets=5, warmup=900.0),),
    "both, and a plain ring": (Limit(50, per=300, max_wait=9.0, warmup=900.0), OTHER),
}
NAMES = ("acquire_shaped", "peek_shaped")


class ShapedTarget(Target):
    """A target after three shaped calls."""

    def __init__(self, server: redis.Redis, limits: tuple[Limit, ...]) -> None:
        super().__init__(server, limits, NOW + 5, 0)
        for _ in range(3):
            self.send(AcquireShaped(self.charges, NOW))

    def content(self) -> list[Any]:
        return [self.server.dump(key) for key in self.keys("acquire_shaped")]

    def words_of(self, name: str) -> list[Any]:
        return self.words(COMMANDS[name](self.charges, self.now))


def places(name: str, rings: int) -> list[str]:
    ring = ["permits", "limit", "bucket_ms", "shape"] * rings
    flag = ["write_limit", "cap_ms"] if name == "acquire_shaped" else []
    return ["stamp", *ring, "now_ms", *flag, *["max_wait_ms", "warmup_ms", "cold_factor"] * rings]


def is_allowed(place: str, before: Any, word: str) -> bool:
    """True for a deadline far ahead, the server's own clock, a limit that is not paced, and a
    caller that waits as long as the limits say.
    """
    if place == "stamp":
        return word in (*FAR_DEADLINES, "99999999999999")
    return (word == "" and place in ("now_ms", "max_wait_ms", "cap_ms")) or word == str(before)


@pytest.mark.parametrize("kind", LIMITS)
@pytest.mark.parametrize("name", NAMES)
def test_a_hostile_argument_is_an_error_and_changes_nothing(
    server: redis.Redis, name: str, kind: str
) -> None:
    target = ShapedTarget(server, LIMITS[kind])
    words, before, wrong = target.words_of(name), target.content(), []
    for at, place in enumerate(places(name, len(LIMITS[kind]))):
        for word in (*HOSTILE, "86400001", "101", "10000001", "99999999999999"):
            if is_allowed(place, words[at], word) or not is_above_the_most(place, word):
                continue
            if at == 5 and word.isdecimal() and int(word) <= 10**13:
                continue  # the plain ring refuses so many permits, and counts them as blocked
            reply = target.run(name, [*words[:at], word, *words[at + 1 :]])
            done = isinstance(reply, list) and reply[1] != PAST_DEADLINE
            if done or target.content() != before:
                wrong.append((place, word, reply))
    assert wrong == []


def is_above_the_most(place: str, word: str) -> bool:
    """False for a number that is within the bounds of this argument."""
    if word not in ("86400001", "101", "10000001"):
        return True
    return word in {
        "permits": ("86400001", "101", "10000001"),
        "max_wait_ms": ("86400001",),
        "cap_ms": ("86400001",),
        "warmup_ms": ("86400001",),
        "cold_factor": ("86400001", "101", "10000001"),
    }.get(place, ())


@pytest.mark.parametrize("name", NAMES)
def test_missing_further_and_misplaced_arguments_are_errors(server: redis.Redis, name: str) -> None:
    target = ShapedTarget(server, LIMITS["both, and a plain ring"])
    words, before = target.words_of(name), target.content()
    for count in range(1, len(words)):
        reply = target.run(name, words[:count])
        assert isinstance(reply, redis.ResponseError), count
    assert malformed(target.run(name, [*words, "1"]))
    # The smallest limit that is not too large, without enough demand to be counted while it warms.
    few = [*words]
    few[-5] = "300000"
    few[2] = "1"
    assert malformed(target.run(name, few))
    assert target.content() == before


@pytest.mark.parametrize("name", NAMES)
def test_the_second_keys_have_to_be_those_of_the_rings(server: redis.Redis, name: str) -> None:
    target = ShapedTarget(server, LIMITS["paced"])
    words, before, sha = target.words_of(name), target.content(), load_script(name).sha
    (ring, shaping) = target.keys(name)
    for keys in (
        [ring],
        [ring, ring],
        [ring, shaping + b"x"],
        [shaping, ring],
        [ring, shaping, ring],
    ):
        with pytest.raises(redis.ResponseError, match="malformed arguments"):
            server.evalsha(sha, len(keys), *keys, *words)
    assert target.content() == before


@pytest.mark.parametrize("name", NAMES)
def test_past_the_deadline_nothing_is_done(server: redis.Redis, name: str) -> None:
    target = ShapedTarget(server, LIMITS["paced"])
    words, before = target.words_of(name), target.content()
    past = f"{NOW - 1}.000001"
    assert target.run(name, [past, *words[1:]]) == [past.encode(), PAST_DEADLINE, target.now]
    assert words[0] == STAMP
    assert target.content() == before


@pytest.mark.parametrize("field", ["decided", "moment", "tokens"])
def test_a_hash_that_is_no_shaping_is_an_error_and_no_admission(
    server: redis.Redis, field: str
) -> None:
    target = ShapedTarget(server, LIMITS["both, and a plain ring"])
    shaping = target.keys("acquire_shaped")[2]
    server.hset(shaping.decode(), field, "soon")
    before = target.content()
    for name in NAMES:
        assert isinstance(target.run(name, target.words_of(name)), redis.ResponseError)
    assert target.content() == before
