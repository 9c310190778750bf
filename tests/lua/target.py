"""The rings of one key in a given state, and calls of the scripts on them with any arguments."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

import redis

from distwindow import Limit
from distwindow.borrow.commands import BORROW_COMMANDS, Borrow
from distwindow.ring import commands as wire
from distwindow.ring.command import Command, load_script
from distwindow.ring.commands import RING_COMMANDS, charges_of
from distwindow.ring.key import ring_name_prefix
from distwindow.ring.stats import Bucket
from distwindow.shaping.commands import SHAPING_COMMANDS
from distwindow.waiting.commands import WAITING_COMMANDS
from tests.clock_and_stores import T0, fresh_key

LUA = Path(__file__).parents[2] / "lua"


def head_of(name: str) -> list[str]:
    """Return the `---` lines of a script: its name, KEYS, ARGV, RETURN."""
    lines = (LUA / f"{name}.lua").read_text("utf-8").splitlines()
    return [line[4:] for line in lines if line.startswith("--- ")]


COMMANDS: dict[str, type[Command[Any]]] = {
    command.script: command
    for command in (*RING_COMMANDS, *BORROW_COMMANDS, *SHAPING_COMMANDS, *WAITING_COMMANDS)
}
"""The commands on rings, by the names of their scripts."""

W = 60_000
NOW = T0 // W * W
STAMP = "9999999999999.000001"
LIMIT = Limit(5, per=300, buckets=5)
OTHER = Limit(9, per=3600, buckets=2, bound="strict")

HOSTILE = (
    "nan", "NaN", "-nan", "inf", "-inf", "Infinity", "1e400", "-1", "-0", "9007199254740992",
    "9223372036854775807", "9223372036854775808", "1e3", "1e13", "0x10", "1.5", "+1", " 1", "1 ",
    "1\n", "1\x00", "", "abc", "١", "1'2", "{}", "nil", "true",
)  # fmt: skip


class Try(NamedTuple):
    at: int
    place: str
    word: str


class Target:
    """The rings of one key in some state, and the calls of them."""

    def __init__(
        self,
        server: redis.Redis,
        limits: tuple[Limit, ...],
        now: int,
        used: int,
        *,
        borrowed: bool = False,
    ) -> None:
        self.server = server
        self.now = now
        key = fresh_key()
        self.charges = charges_of(key, ring_name_prefix("hostile", key), limits, 1)
        for _ in range(used):
            self.send(wire.Acquire(self.charges, NOW))
        if borrowed:
            whole = tuple(limit.amount for limit in limits)
            reply = self.send(Borrow(self.charges, NOW, 10**7, whole))
            assert reply[5] > 0, "nothing was borrowed"

    def words(self, command: Command[Any]) -> list[bytes | int | str]:
        return [STAMP, *command.arguments()]

    def send(self, command: Command[Any]) -> Any:
        return self.run(command.script, self.words(command))

    def keys(self, name: str) -> list[bytes]:
        return COMMANDS[name](self.charges).keys

    def run(self, name: str, words: list[Any]) -> Any:
        return evalsha(self.server, name, self.keys(name), words)

    def content(self) -> list[Any]:
        """Return the bytes of the rings and of their sender records."""
        return [self.server.dump(key) for key in self.keys("flush")]

    def run_each(self, name: str, each: list[list[Any]]) -> list[tuple[Any, bool]]:
        """Return the reply to each of these calls, and whether the rings were unchanged."""
        keys, dumped = self.keys(name), self.keys("flush")
        pipe = self.server.pipeline(transaction=False)
        for words in each:
            pipe.evalsha(load_script(name).sha, len(keys), *keys, *words)
            for key in dumped:
                pipe.dump(key)
        content, answers = self.content(), []
        replies = pipe.execute(raise_on_error=False)
        for at in range(0, len(replies), 1 + len(dumped)):
            before, content = content, replies[at + 1 : at + 1 + len(dumped)]
            answers.append((replies[at], content == before))
        return answers

    def tries(self, name: str, words: list[Any], hostile: Iterable[str]) -> list[Try]:
        """Return each place of these arguments with each hostile word that is not allowed there."""
        return [
            Try(at, place, word)
            for at, place in enumerate(places(name, len(words), len(self.charges)))
            for word in hostile
            if not is_allowed(name, place, word)
        ]

    def run_tries(self, name: str, words: list[Any], tries: list[Try]) -> list[tuple[Any, bool]]:
        """Do as `run_each`, with the word of each try in its place."""
        return self.run_each(name, [[*words[:at], word, *words[at + 1 :]] for at, _, word in tries])

    def command(self, name: str, *, full: bool) -> Command[Any]:
        """Return a call that changes the ring, with all arguments or as few as possible."""
        if name == "acquire":
            return wire.Acquire(self.charges, self.now, calls=1, write_limit=full)
        if name == "lease":
            return wire.Lease(self.charges, self.now, extra=2, prefetch=not full)
        if name == "flush":
            return self.flush(pull=full)
        if name == "borrow":
            wait = 10 * W if full else 0
            return Borrow(self.charges, self.now, wait, (5, 9)[: len(self.charges)])
        if name == "refund":
            return wire.Refund(self.charges, self.now, NOW)
        return COMMANDS[name](self.charges, self.now)

    def flush(self, seq: int = 7, *, pull: bool = False) -> wire.Flush:
        """Return a flush of counts of the current bucket and of the one before."""
        seen = (Bucket(self.now, 1, 2, 3, 4, 50, 6), Bucket(self.now - W, 1, 2, 3, 4, 50, 6))
        counts = (seen,) * len(self.charges)
        return wire.Flush(self.charges, self.now, counts=counts, sender="0fa1", seq=seq, pull=pull)


STATES = {
    "absent": (NOW, 0),
    "open": (NOW + 5, 3),
    "at its limit": (NOW + 5, 5),
    "with a stored refusal": (NOW + 5, 7),
    "due for the next bucket": (NOW + W + 5, 3),
    "after its window": (NOW + 50 * W, 3),
    "ahead of now": (NOW - W, 3),
}


def admitted(reply: Any) -> bool:
    return isinstance(reply, list) and reply[1] >= 0


SPELLINGS_OF_ONE = ("+1", " 1", "1 ", "1\n", "1\x00")
FAR_DEADLINES = ("inf", "Infinity", "1e400", "1e13", "9007199254740992", "9223372036854775807",
             "9223372036854775808")  # fmt: skip


def is_allowed(name: str, place: str, word: str) -> bool:
    """Return True for arguments of `HOSTILE` that are allowed: a deadline far ahead, another
    spelling of one call, any word for `write_limit`, the server's own clock, no counts, any
    hexadecimal sender; and for arguments that the script ignores.
    """
    if place == "calls":
        return name != "acquire" or word in SPELLINGS_OF_ONE
    if place == "stamp":
        return word in FAR_DEADLINES
    if place == "sender":
        return set(word) <= set("0123456789abcdefABCDEF")
    return place == "write_limit" or (word == "" and place in ("now_ms", "counts"))


def is_respelled(name: str, place: str, word: str) -> bool:
    """Return True where the hot path accepts another spelling of a number (lua/README.md)."""
    return name == "acquire" and place in ("limit", "bucket_ms") and word in ("1e3", "1e13", "0x10")


def places(name: str, count: int, rings: int) -> list[str]:
    """Return the names of the first `count` arguments of this script."""
    last = {
        "lease": ["extra", "prefetch"],
        "flush": ["sender", "seq", "pull", *(["counts"] * rings)],
        "borrow": ["max_wait_ms", *(["max_borrowed"] * rings)],
        "refund": [*(["bucket_start_ms"] * rings), *(["borrowed"] * rings)],
    }.get(name, ["write_limit"])
    ring = ["permits", "limit", "bucket_ms", "shape"] * rings
    return ["stamp", *ring, "calls", "now_ms", *last][:count]


def evalsha(server: redis.Redis, name: str, keys: list[bytes], words: list[Any]) -> Any:
    """Return the reply of a script, or its error."""
    try:
        return server.evalsha(load_script(name).sha, len(keys), *keys, *words)
    except redis.ResponseError as exc:
        return exc


def malformed(reply: Any) -> bool:
    """Return True for the error of malformed arguments. redis-py removes the `ERR ` before it."""
    message = "distwindow: malformed arguments"
    return isinstance(reply, redis.ResponseError) and str(reply).removeprefix("ERR ") == message
