"""Malformed arguments of `flush`, `refund` and `lease` that are sent with EVALSHA count nothing,
and a flush is counted once.

The library refuses all of them before it sends anything. The scripts do not rely on that.
"""

from __future__ import annotations

import time
from typing import Any

import pytest
import redis

from distwindow import Limit
from distwindow.ring import commands as wire
from distwindow.ring.command import Command, load_script
from distwindow.ring.key import senders_name
from distwindow.ring.replies import PAST_DEADLINE
from distwindow.ring.ring import MAX_TOTAL
from distwindow.ring.stats import Bucket
from distwindow.stores.memory import MemoryStore
from tests.lua.target import (
    HOSTILE,
    LIMIT,
    NOW,
    OTHER,
    STATES,
    Target,
    Try,
    W,
    malformed,
)

pytestmark = pytest.mark.slow  # the quick tier stays under a minute


@pytest.mark.parametrize("state", STATES)
@pytest.mark.parametrize("limits", [(LIMIT,), (LIMIT, OTHER)], ids=["one ring", "two rings"])
@pytest.mark.parametrize("name", ["flush", "refund"])
def test_a_hostile_argument_counts_nothing(
    server: redis.Redis, name: str, limits: tuple[Limit, ...], state: str
) -> None:
    now, used = STATES[state]
    target = Target(server, limits, now, used)
    words = target.words(target.command(name, full=True))
    tries = [
        one
        for one in target.tries(name, words, HOSTILE)
        # There is no such bucket:
        if not (one.place == "bucket_start_ms" and one.word.startswith("9"))
    ]
    answers = target.run_tries(name, words, tries)
    for (_, place, word), (reply, same) in zip(tries, answers, strict=True):
        assert isinstance(reply, redis.ResponseError) or reply[1] == PAST_DEADLINE, (place, word)
        assert same, (place, word)


@pytest.mark.parametrize("state", STATES)
@pytest.mark.parametrize("name", ["lease", "flush"])
def test_malformed_arguments_are_reported(server: redis.Redis, name: str, state: str) -> None:
    """Not the stamp and the time, with which the scripts compute before they validate."""
    now, used = STATES[state]
    for limits in ((LIMIT,), (LIMIT, OTHER)):
        target = Target(server, limits, now, used)
        words = target.words(target.command(name, full=True))
        tries = [
            one
            for one in target.tries(name, words, (*HOSTILE, "10000000000001", "2", "0 0", "1;"))
            if one.place not in ("stamp", "calls", "now_ms")
            if one.place != "shape" or one.word not in ("2", "10000000000001")
            if one.place in ("prefetch", "pull", "counts", "sender") or one.word != "2"
        ]
        each = [[*words[:at], word, *words[at + 1 :]] for at, _, word in tries]
        tries += [Try(at, "missing", "") for at in range(2, len(words))]
        each += [words[:at] for at in range(2, len(words))]
        tries.append(Try(0, "too many", "1"))
        each += [[*words, "1"]]
        wrong = []
        for what, (reply, same) in zip(tries, target.run_each(name, each), strict=True):
            if not malformed(reply) or not same:
                wrong.append((what, reply))
        assert wrong == []


def count_of(*words: str) -> str:
    return " ".join(words) + ";"


GOOD = ("1", "2", "3", "4", "5", "6")


@pytest.mark.slow
@pytest.mark.parametrize("pull", ["0", "1"])
@pytest.mark.parametrize("state", STATES)
def test_malformed_counts_count_nothing(server: redis.Redis, state: str, pull: str) -> None:
    """Nothing is counted in any ring, even if other counts of the same flush are valid."""
    now, used = STATES[state]
    target = Target(server, (LIMIT, OTHER), now, used)
    words = target.words(target.command("flush", full=True))
    good = count_of(str(now), *GOOD)
    seven = (str(now), *GOOD)
    bad = [
        *(count_of(*seven[:at], word, *seven[at + 1 :]) for at in range(7) for word in HOSTILE),
        *(count_of(*seven[:at], "10000000000001", *seven[at + 1 :]) for at in range(7)),
        *(count_of(*seven[:at]) for at in range(7)),
        *(count_of(*seven, "7"), good[:-1], good + ";", ";" + good, good + " ", "\n" + good),
        *(good.replace(" ", "  ", 1), good.replace(" ", "\t"), good.replace(" ", ","), "x" + good),
        *(good.replace(";", "\x00;"), good[:-1] + "|", f"{now} " + good),
        *("0 ", "-", "-;", "nil", "[]", "\x00", "%d", "(%d+)"),
    ]
    wrong = []
    for counts in ([bad_one, good] for bad_one in bad):
        both = (counts, counts[::-1], [good + counts[0], good], [counts[0] + good, ""])
        each = [[*words[:-3], pull, *pair] for pair in both]
        for pair, (reply, same) in zip(both, target.run_each("flush", each), strict=True):
            if not malformed(reply) or not same:
                wrong.append((pair, reply))
    assert wrong == []


@pytest.mark.parametrize("state", STATES)
def test_a_flush_sent_again_changes_nothing(server: redis.Redis, state: str) -> None:
    now, used = STATES[state]
    target = Target(server, (LIMIT, OTHER), now, used)
    first = target.send(target.flush(7))
    assert isinstance(first, list)
    before = target.content()
    for seq in (7, 6, 0):
        for pull in (False, True):
            assert isinstance(target.send(target.flush(seq, pull=pull)), list)
            assert target.content() == before, (seq, pull)
    words = target.words(target.flush(7))
    words[words.index("0fa1") + 1] = "0" * 70 + "7"
    assert isinstance(target.run("flush", words), list)
    assert target.content() == before
    target.send(target.flush(8))
    assert target.content() != before


def test_a_seq_is_stored_without_leading_zeros(server: redis.Redis) -> None:
    target = Target(server, (LIMIT,), NOW, 1)
    words = target.words(target.flush(7))
    words[words.index("0fa1") + 1] = "0" * 7000 + "7"
    target.run("flush", words)
    seen = server.hget(senders_name(target.charges[0].ring), "0fa1")
    assert seen == b"7 %d" % (NOW // W)


@pytest.mark.parametrize("words", [b"1" * 10**6, b"1 " * 500_000, b"1 1 1 1 1 1 1" * 70_000])
def test_a_megabyte_of_digits_does_not_stall_the_server(server: redis.Redis, words: bytes) -> None:
    """The script scans it once. Once for each digit would take minutes."""
    target = Target(server, (LIMIT,), NOW, 1)
    before = target.content()
    began = time.monotonic()
    assert malformed(target.run("flush", [*target.words(target.flush())[:-1], words]))
    assert malformed(target.run("flush", [*target.words(target.flush())[:-1], words + b";"]))
    assert time.monotonic() - began < 30
    assert target.content() == before


@pytest.mark.parametrize("late", [0, W], ids=["newest bucket", "closed bucket"])
def test_a_total_stops_at_the_largest_number_of_plain_digits(
    server: redis.Redis, late: int
) -> None:
    """However much is flushed, it expires with its bucket, and then the ring admits again."""
    target = Target(server, (LIMIT,), NOW, 1)
    memory = MemoryStore()
    memory.execute(wire.Acquire(target.charges, NOW))

    def agreed(command: Command[Any]) -> Any:
        reply = command.reply(target.send(command))
        assert reply == memory.execute(command), command
        return reply

    huge = Bucket(NOW - late, MAX_TOTAL, 10**12, 10**12, 10**12, MAX_TOTAL, 1)
    for _ in range(120):
        agreed(wire.Flush(target.charges, NOW, counts=((huge, huge),)))
    agreed(wire.Read(target.charges, NOW))
    for later in range(12):
        now = NOW + later * W
        admitted = agreed(wire.Acquire(target.charges, now)).admitted
        assert admitted == (later * W >= 5 * W - late)
        agreed(wire.Refund(target.charges, now, charged_ms=now))
        agreed(wire.Read(target.charges, now))
        agreed(wire.Flush(target.charges, now, pull=True))


def test_a_flush_takes_no_other_keys_for_its_records(server: redis.Redis) -> None:
    """Each ring has its own records: another ring may not have taken the same flush."""
    target = Target(server, (LIMIT, OTHER), NOW, 1)
    one, other, of_one, of_other = target.keys("flush")
    words, before = target.words(target.flush()), target.content()
    for keys in (
        [one, other, of_one],
        [one, other, of_one, of_one],
        [one, other, of_other, of_one],
        [one, other, one, other],
        [one, other, of_one, of_other, b"x"],
        [one, other, of_one, of_other, of_one, of_other],
        [one, other],
        [one],
    ):
        with pytest.raises(redis.ResponseError):
            server.evalsha(load_script("flush").sha, len(keys), *keys, *words)
        assert target.content() == before, keys
