"""The scripts of concurrency limits: their heads say what Python sends and accepts, and malformed
arguments that are sent with EVALSHA are an error and change nothing.
"""

from __future__ import annotations

import re
from typing import Any

import pytest
import redis

from distwindow.concurrency.commands import (
    MAX_HOLDERS,
    MAX_PLACES,
    PLACE_MS,
    SLOT_COMMANDS,
    Free,
    FreeReply,
    Hold,
    HolderName,
    Holders,
    HoldersReply,
    HoldReply,
    Renew,
    RenewReply,
)
from distwindow.ring.command import Command
from distwindow.ring.key import slots_name
from distwindow.ring.replies import PAST_DEADLINE
from tests.clock_and_stores import T0, fresh_key
from tests.lua.target import FAR_DEADLINES, HOSTILE, STAMP, evalsha, head_of, malformed

TTL_MS = 600_000
LIMIT = 2


def holder(number: int) -> bytes:
    return HolderName(LIMIT, TTL_MS, f"ab.{number}", "host:1").encode()


class Slots:
    """The slots of a new key, of which this many are held."""

    def __init__(self, server: redis.Redis, held: int = 1) -> None:
        self.server = server
        self.name = slots_name("hostile", fresh_key())
        for number in range(held):
            assert self.run("hold", self.words(self.hold(number)))[3] == 1

    def hold(self, number: int = 9, **asks: Any) -> Hold:
        return Hold(
            (), T0, slots_name=self.name, limit=LIMIT, ttl_ms=TTL_MS, holder=holder(number), **asks
        )

    def command(self, name: str) -> Command[Any]:
        """Return a call that is executed, with all its arguments."""
        holders = (holder(0), holder(9))
        if name == "hold":
            return self.hold(is_head=True, waited_ms=(5, 4))
        if name == "renew":
            return Renew((), T0, slots_name=self.name, ttl_ms=2 * TTL_MS, holders=holders)
        if name == "free":
            return Free((), T0, slots_name=self.name, holders=holders)
        return Holders((), T0, slots_name=self.name)

    def words(self, command: Command[Any]) -> list[Any]:
        return [STAMP, *command.arguments()]

    def run(self, name: str, words: list[Any], keys: int = 1) -> Any:
        return evalsha(self.server, name, [self.name] * keys, words)

    def content(self) -> Any:
        members = self.server.zrange(self.name, 0, -1, withscores=True)
        return members, self.server.pttl(self.name) > 0


PLACES = {
    "hold": ["stamp", "limit", "ttl_ms", "holder", "now_ms", "asks", "waited_ms", "waited_ms"],
    "renew": ["stamp", "ttl_ms", "now_ms", "holder", "holder"],
    "free": ["stamp", "now_ms", "holder", "holder"],
    "holders": ["stamp", "now_ms"],
}


def lines(name: str, word: str) -> list[str]:
    found = [row.removeprefix(word) for row in head_of(name) if row.startswith(word)]
    return [re.split(r"\s{3,}", row.strip())[0] for row in found]


@pytest.mark.parametrize("name", SLOT_COMMANDS)
def test_the_head_names_the_key_and_the_arguments(server: redis.Redis, name: str) -> None:
    assert head_of(name)[0].startswith(f"{name}: ")
    assert lines(name, "KEYS") == ["slots"]
    (line,) = lines(name, "ARGV")
    named = [word.strip("[]") for word in line.split()]
    sent = Slots(server).words(Slots(server).command(name))
    if named[-1].endswith("..."):
        named = [*named[:-1], *[named[-1].removesuffix("...")] * (len(sent) - len(named) + 1)]
    assert named == PLACES[name]
    assert len(sent) == len(named)


@pytest.mark.parametrize("name", SLOT_COMMANDS)
def test_the_time_is_the_servers_unless_it_is_sent(server: redis.Redis, name: str) -> None:
    slots = Slots(server, held=0)
    command = slots.command(name)
    command.now_ms = None
    seconds, _ = server.time()
    _, _, now_ms, *_ = slots.run(name, slots.words(command))
    assert 0 <= now_ms - seconds * 1000 < 60_000


def test_each_reply_is_parsed_as_the_head_says() -> None:
    stamp, now = b"9999999999999.000001", 1_700_000_000_123
    hold, renew, free, holders = (SLOT_COMMANDS[name](()) for name in SLOT_COMMANDS)
    assert lines("hold", "RETURN")[:2] == [
        "stamp held now_ms 1 ttl_ms",
        "stamp held now_ms 0 first_ends_ms ahead age_ms",
    ]
    assert hold.reply([stamp, 7, now, 1, 500]) == HoldReply(True, 7, 500, now)
    assert hold.reply([stamp, 7, now, 0, 400, 3, 20]) == HoldReply(False, 7, 400, now, 3, 20)
    assert lines("renew", "RETURN")[0] == "stamp renewed now_ms place..."
    assert renew.reply([stamp, 3, now, 1, 4]) == RenewReply((0, 3), now)
    assert lines("free", "RETURN")[0] == "stamp freed now_ms"
    assert free.reply([stamp, 2, now]) == FreeReply(2, now)
    assert lines("holders", "RETURN")[0] == "stamp held now_ms (holder ends_ms ...)"
    assert holders.reply([stamp, 1, now, [b"h", 9]]) == HoldersReply({b"h": 9}, now)
    assert all("stamp -2 now_ms" in lines(name, "RETURN") for name in SLOT_COMMANDS)


@pytest.mark.parametrize("held", [0, 1, 2])
@pytest.mark.parametrize("name", SLOT_COMMANDS)
def test_a_hostile_argument_is_an_error_and_changes_nothing(
    server: redis.Redis, name: str, held: int
) -> None:
    slots = Slots(server, held)
    words, before = slots.words(slots.command(name)), slots.content()
    for at, place in enumerate(PLACES[name]):
        for word in HOSTILE:
            # A far deadline is one; without a time the script takes the server's.
            if (place == "stamp" and word in FAR_DEADLINES) or (place == "now_ms" and not word):
                continue
            reply = slots.run(name, [*words[:at], word, *words[at + 1 :]])
            # Compared with a time that is no number, every deadline has passed.
            if place not in ("stamp", "now_ms") or isinstance(reply, redis.ResponseError):
                assert isinstance(reply, redis.ResponseError), (place, word)
            else:
                assert reply[1] == PAST_DEADLINE, (place, word)
            assert slots.content() == before, (place, word)


@pytest.mark.parametrize("name", SLOT_COMMANDS)
@pytest.mark.parametrize(
    "word",
    [b"", b"3", b"3:4", b"3:4:id", b"3:4:id:", b"3:4::x", b"-1:4:id:x", b"3:4:id:a b",
     b"3:4:id:\xff", b"3:4:i-d:x", b"3:4:id:" + b"x" * 122],
)  # fmt: skip
def test_what_is_no_holder_is_refused(server: redis.Redis, name: str, word: bytes) -> None:
    slots = Slots(server)
    words, before = slots.words(slots.command(name)), slots.content()
    for at, place in enumerate(PLACES[name]):
        if place == "holder":
            assert malformed(slots.run(name, [*words[:at], word, *words[at + 1 :]]))
    assert slots.content() == before


@pytest.mark.parametrize("name", SLOT_COMMANDS)
def test_arguments_missing_or_too_many_change_nothing(server: redis.Redis, name: str) -> None:
    slots = Slots(server)
    words, before = slots.words(slots.command(name)), slots.content()
    fewest = {"hold": 4, "renew": 4, "free": 3, "holders": 1}[name]
    for count in range(fewest):
        assert isinstance(slots.run(name, words[:count]), redis.ResponseError)
    too_many = [*words, *[1 if name == "hold" else holder(1)] * (MAX_HOLDERS + 1)]
    assert isinstance(slots.run(name, too_many), redis.ResponseError)
    for keys in (0, 2, 3):
        assert isinstance(slots.run(name, words, keys), redis.ResponseError)
    assert slots.content() == before


@pytest.mark.parametrize("name", SLOT_COMMANDS)
def test_past_the_deadline_nothing_is_done(server: redis.Redis, name: str) -> None:
    slots = Slots(server)
    words, before = slots.words(slots.command(name)), slots.content()
    for stamp in (f"{T0 - 1}.000001", "nan", "-inf", "-1", "0"):
        assert slots.run(name, [stamp, *words[1:]]) == [stamp.encode(), PAST_DEADLINE, T0]
    assert slots.content() == before


@pytest.mark.parametrize("name", SLOT_COMMANDS)
def test_the_key_of_another_program_is_an_error(server: redis.Redis, name: str) -> None:
    slots = Slots(server, held=0)
    server.set(slots.name, "text")
    reply = slots.run(name, slots.words(slots.command(name)))
    assert isinstance(reply, redis.ResponseError)
    assert "WRONGTYPE" in str(reply)
    assert server.get(slots.name) == b"text"


def test_as_many_holders_as_allowed_are_renewed_and_freed_by_one_call(server: redis.Redis) -> None:
    slots = Slots(server, held=0)
    holders = tuple(map(holder, range(MAX_HOLDERS)))
    server.zadd(slots.name, dict.fromkeys(holders, T0 + 1))
    renew = Renew((), T0, slots_name=slots.name, ttl_ms=TTL_MS, holders=holders)
    assert slots.run("renew", slots.words(renew))[1] == MAX_HOLDERS
    free = Free((), T0, slots_name=slots.name, holders=holders)
    assert slots.run("free", slots.words(free))[1] == MAX_HOLDERS
    assert server.exists(slots.name) == 0


def test_who_is_new_takes_one_place(server: redis.Redis) -> None:
    slots = Slots(server)
    for asks, waited in (("new", []), ("new", [1, 1]), ("head", [1] * (MAX_PLACES + 1))):
        words = [*slots.words(slots.hold()), asks, *waited]
        assert malformed(slots.run("hold", words))


@pytest.mark.parametrize("held", [0, 1, 2])
def test_who_waits_is_in_the_set_of_the_slots_before_all_holders(
    server: redis.Redis, held: int
) -> None:
    """Old processes, which look at scores above the time, do not take them for holders."""
    slots = Slots(server, held)
    waits = Hold(
        (), T0, slots_name=slots.name, limit=0, ttl_ms=TTL_MS, holder=holder(9), is_head=True,
        waited_ms=(5, 4),
    )  # fmt: skip
    assert slots.run("hold", slots.words(waits))[3] == 0
    members = server.zrange(slots.name, 0, -1, withscores=True)
    places = [(b"ab", -(T0 + PLACE_MS) - 2e13), (b"ab.1", T0 - 5 - 2e13), (b"ab.2", T0 - 4 - 2e13)]
    assert members[:3] == places
    assert len(members) == 3 + held
    assert server.zcount(slots.name, f"({T0}", "+inf") == held


def test_a_line_without_holders_expires_when_nobody_asks_any_more(server: redis.Redis) -> None:
    slots = Slots(server, held=0)
    waits = slots.hold(is_head=True, waited_ms=(5, 4))
    waits.limit = 0
    assert slots.run("hold", slots.words(waits))[3] == 0
    assert 0 < server.pttl(slots.name) <= PLACE_MS


def test_a_line_does_not_expire_before_its_places(server: redis.Redis) -> None:
    slots = Slots(server, held=0)
    short = slots.hold(is_head=True, waited_ms=(5, 4))
    short.ttl_ms = 50
    assert slots.run("hold", slots.words(short))[3] == 1
    assert PLACE_MS // 2 < server.pttl(slots.name) <= PLACE_MS


def test_the_key_expires_with_its_last_deadline(server: redis.Redis) -> None:
    slots = Slots(server, held=2)
    assert 0 < server.pttl(slots.name) <= TTL_MS
    renew = Renew((), T0, slots_name=slots.name, ttl_ms=3 * TTL_MS, holders=(holder(1),))
    slots.run("renew", slots.words(renew))
    assert 2 * TTL_MS < server.pttl(slots.name) <= 3 * TTL_MS
