"""Malformed arguments on rings with coming permits: an error, and the rings are unchanged. Calls of
`borrow` without them are with the other scripts in test_hostile_calls.py.
"""

from __future__ import annotations

from typing import Any

import pytest
import redis

from distwindow import Limit
from distwindow.ring.commands import Refund
from distwindow.ring.decision import BorrowedCharge
from tests.lua.target import (
    HOSTILE,
    LIMIT,
    NOW,
    OTHER,
    Target,
    W,
    admitted,
    is_allowed,
    is_respelled,
    malformed,
    places,
)

MOMENTS = {"same bucket": NOW + 5, "next bucket": NOW + W + 5, "past the last": NOW + 7 * W}
SCRIPTS = ["acquire", "borrow", "peek", "lease", "flush", "refund"]


def test_the_rings_have_coming_permits(server: redis.Redis) -> None:
    target = Target(server, (LIMIT, OTHER), NOW, 5, borrowed=True)
    heads: list[Any] = [server.hget(charge.ring, "head") for charge in target.charges]
    assert any(head is not None and head.startswith(b"99999999999999999999 ") for head in heads)


@pytest.mark.parametrize("moment", MOMENTS)
@pytest.mark.parametrize("limits", [(LIMIT,), (LIMIT, OTHER)], ids=["one ring", "two rings"])
@pytest.mark.parametrize("name", SCRIPTS)
def test_a_hostile_argument_changes_nothing(
    server: redis.Redis, name: str, limits: tuple[Limit, ...], moment: str
) -> None:
    target = Target(server, limits, NOW, 5, borrowed=True)
    target.now = MOMENTS[moment]
    words = target.words(target.command(name, full=name != "acquire"))
    tries = [
        (at, place, word)
        for at, place in enumerate(places(name, len(words), len(limits)))
        for word in HOSTILE
        if not is_allowed(name, place, word)
        if not (place == "bucket_start_ms" and word.startswith("9"))  # there is no such bucket
        if not (is_respelled(name, place, word) and len(limits) == 1)
    ]
    each = [[*words[:at], word, *words[at + 1 :]] for at, _, word in tries]
    wrong = [
        (place, word, reply)
        for (_, place, word), (reply, same) in zip(tries, target.run_each(name, each), strict=True)
        if admitted(reply) or not same
    ]
    assert wrong == []


@pytest.mark.parametrize("word", [*HOSTILE, "2", "10000000000001"])
def test_a_flag_of_a_refund_is_0_or_1(server: redis.Redis, word: str) -> None:
    target = Target(server, (LIMIT, OTHER), NOW, 5, borrowed=True)
    coming = [BorrowedCharge(*c[:4], NOW + c.limit.bucket_ms) for c in target.charges]
    words = target.words(Refund(tuple(coming), NOW))
    before = target.content()
    for at in (-1, -2):
        changed = list(words)
        changed[at] = word
        assert malformed(target.run("refund", changed))
    assert malformed(target.run("refund", words[:-1]))
    assert malformed(target.run("refund", [*words, "1"]))
    assert target.content() == before


@pytest.mark.parametrize("place", [-1, -2, -3])
@pytest.mark.parametrize("word", [*HOSTILE, "10000000000001"])
def test_max_wait_and_max_borrowed_are_numbers(server: redis.Redis, word: str, place: int) -> None:
    target = Target(server, (LIMIT, OTHER), NOW, 5, borrowed=True)
    words = target.words(target.command("borrow", full=True))
    before = target.content()
    words[place] = word
    assert malformed(target.run("borrow", words))
    assert target.content() == before
