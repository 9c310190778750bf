"""The scripts of circuit breakers: their heads describe what Python sends, and hostile arguments
give an error and change nothing.
"""

from __future__ import annotations

from typing import Any

import pytest
import redis

from distwindow import ConsecutiveFailures, ErrorCount, ErrorRatio
from distwindow.breaker.commands import (
    BREAKER_COMMANDS,
    PROBE_ACTIONS,
    AdaptiveFlush,
    AdaptiveReply,
    BreakerCommand,
    BreakerFlush,
    BreakerProbe,
    BreakerReply,
    adaptive_name_suffix,
    breaker_name,
)
from distwindow.breaker.record import AdaptiveCounts, CallCounts
from distwindow.ring.key import ring_name_prefix
from distwindow.ring.replies import PAST_DEADLINE
from tests.clock_and_stores import T0, fresh_key
from tests.lua.target import FAR_DEADLINES, HOSTILE, STAMP, evalsha, malformed
from tests.lua.test_heads import lines, parsed

RULE = ErrorRatio(0.5, window=300, min_calls=3, open_for=120, buckets=5, probe_timeout=60)
W = RULE.bucket_ms
NOW = T0 // W * W + 5
ARGUMENTS = (
    "stamp", "measure", "threshold", "min_calls", "open_ms", "probe_ms", "probes", "bucket_ms",
    "buckets", "now_ms",
)  # fmt: skip


class Breaker:
    """One breaker in Redis, and calls of the scripts on it."""

    def __init__(self, server: redis.Redis) -> None:
        self.server = server
        self.name = breaker_name("hostile", fresh_key(), RULE)

    def flush(self, bad: int = 0, now: int = NOW, **more: Any) -> BreakerFlush:
        counts = (CallCounts(0, now, 3, bad),)
        return BreakerFlush((), now, rule=RULE, name=self.name, counts=counts, **more)

    def probe(self, action: Any = "take", now: int = NOW) -> BreakerProbe:
        return BreakerProbe((), now, rule=RULE, name=self.name, action=action, probe_id="a.1")

    def run(self, command: BreakerCommand, words: list[Any] | None = None) -> Any:
        words = [STAMP, *command.arguments()] if words is None else words
        return evalsha(self.server, command.script, command.keys, words)

    def content(self) -> list[Any]:
        return [self.server.dump(key) for key in self.flush().keys]


def in_state(server: redis.Redis, state: str) -> tuple[Breaker, int]:
    """Return a breaker in this state, and the time for the next command."""
    breaker, later = Breaker(server), NOW + RULE.open_ms
    if state == "absent":
        return breaker, NOW
    breaker.run(breaker.flush(bad=3 if state in ("open", "half-open") else 1, sender="0a", seq=1))
    if state == "half-open":
        breaker.run(breaker.probe(now=later))
    return breaker, NOW if state == "closed" else later


STATES = ("absent", "closed", "open", "half-open")


def test_the_heads_describe_what_is_sent(server: redis.Redis) -> None:
    breaker = Breaker(server)
    sent: list[BreakerCommand] = [
        breaker.flush(),
        breaker.flush(sender="0fa1", seq=7),
        BreakerFlush((), rule=ErrorCount(50), name=breaker.name),
        BreakerFlush((), rule=ConsecutiveFailures(5), name=breaker.name),
        *(breaker.probe(action) for action in PROBE_ACTIONS),
    ]
    for command in sent:
        (line,) = lines(command.script, "ARGV")
        found = parsed(line, [STAMP, *command.arguments()], 1)
        rule = command.rule
        assert found is not None
        assert rule is not None
        assert found["measure"] == rule.measure
        assert float(found["threshold"]) == rule.threshold
        assert [found[name] for name in ("open_ms", "probe_ms", "bucket_ms", "buckets")] == [
            str(n) for n in (rule.open_ms, rule.probe_ms, rule.bucket_ms, rule.buckets)
        ]
        assert found["now_ms"] == ('""' if command.now_ms is None else str(NOW))
        assert lines(command.script, "KEYS") == ["breaker senders"]
        assert command.keys == [breaker.name, breaker.name + b":senders"]


@pytest.mark.parametrize("name", BREAKER_COMMANDS)
def test_a_reply_is_parsed_from_the_form_of_the_head(name: str) -> None:
    form, late = lines(name, "RETURN")
    assert late == "stamp -2 now_ms"
    done = "taken" if name == "breaker_flush" else "done"
    assert form == f"stamp {done} now_ms state epoch retry_in_ms total bad"
    raw = [STAMP, 1, NOW, 2, 90, 7, 30, 20]
    assert BREAKER_COMMANDS[name](()).reply(raw) == BreakerReply(True, 2, 90, 7, 30, 20, NOW)


@pytest.mark.parametrize("threshold", [1e-7, 1 / 3, 0.1, 1.0, 0.30000000000000004])
def test_a_threshold_arrives_exactly(server: redis.Redis, threshold: float) -> None:
    rule = ErrorRatio(threshold)
    sent = BreakerFlush((), rule=rule).rule_arguments()[1]
    assert float(str(sent)) == threshold
    lua = server.eval("return string.format('%.17g', tonumber(ARGV[1]))", 0, sent)
    assert float(lua) == threshold


def is_allowed(place: str, word: str) -> bool:
    """Return True for words of `HOSTILE` that these arguments allow."""
    if place == "stamp":
        return word in FAR_DEADLINES
    if place == "sender":
        return set(word) <= set("0123456789abcdefABCDEF")
    if place == "probe_id":
        return word != "" and set(word) <= set("0123456789abcdefABCDEF.")
    return word == "" and place in ("now_ms", "counts")


@pytest.mark.parametrize("state", STATES)
@pytest.mark.parametrize("name", BREAKER_COMMANDS)
def test_hostile_arguments_give_an_error_and_change_nothing(
    server: redis.Redis, name: str, state: str
) -> None:
    breaker, now = in_state(server, state)
    command: BreakerCommand = (
        breaker.flush(bad=3, now=now, sender="0a", seq=9)
        if name == "breaker_flush"
        else breaker.probe(now=now)
    )
    words: list[Any] = [STAMP, *command.arguments()]
    last = ("sender", "seq", "counts") if name == "breaker_flush" else ("action", "probe_id")
    places = [*ARGUMENTS, *last]
    assert len(places) == len(words)
    before = breaker.content()
    for at, place in enumerate(places):
        for word in HOSTILE:
            if is_allowed(place, word):
                continue
            reply = breaker.run(command, [*words[:at], word, *words[at + 1 :]])
            refused = malformed(reply)
            if place in ("stamp", "now_ms"):
                # These are compared before the others are looked at.
                late = isinstance(reply, list) and reply[1] == PAST_DEADLINE
                refused = late or isinstance(reply, redis.ResponseError)
            assert refused, (place, word, reply)
            assert breaker.content() == before, (place, word)
    for count in range(2, len(words)):
        assert isinstance(breaker.run(command, words[:count]), redis.ResponseError), count
    assert malformed(breaker.run(command, [*words, "1"]))
    assert breaker.content() == before
    for unusual in ("1 2 3;", "1 2 3 4", "1 2 3 4;x", f"0 {now} 1 2;", "1 2 nan 4;", "1 2 1e5 4;"):
        if name == "breaker_flush":
            assert malformed(breaker.run(command, [*words[:-1], unusual]))
    assert breaker.content() == before


@pytest.mark.parametrize("state", STATES)
@pytest.mark.parametrize("name", BREAKER_COMMANDS)
def test_past_the_deadline_nothing_is_done(server: redis.Redis, name: str, state: str) -> None:
    breaker, now = in_state(server, state)
    before = breaker.content()
    command = breaker.flush(3, now) if name == "breaker_flush" else breaker.probe(now=now)
    stamp = f"{now - 1}.000001"
    reply = breaker.run(command, [stamp, *command.arguments()])
    assert reply == [stamp.encode(), PAST_DEADLINE, now]
    assert breaker.content() == before


def test_a_key_that_is_no_breaker_is_left_alone(server: redis.Redis) -> None:
    for fields in ({"a": "1"}, {"state": "open"}, {"state": "9 0 0 0 0"}):
        breaker = Breaker(server)
        server.hset(breaker.name, mapping=fields)  # type: ignore[arg-type]  # they are text
        before = breaker.content()
        assert malformed(breaker.run(breaker.flush()))
        assert malformed(breaker.run(breaker.probe()))
        assert breaker.content() == before


def test_the_hash_expires_with_its_window_or_an_hour_after_an_open_breaker(
    server: redis.Redis,
) -> None:
    closed, _ = in_state(server, "closed")
    assert 5 * W < server.pttl(closed.name) <= 6 * W
    opened, _ = in_state(server, "open")
    hour = 3_600_000
    assert hour < server.pttl(opened.name) <= hour + RULE.open_ms + RULE.window_ms


def test_a_row_expires_an_open_time_after_what_is_flushed_late(server: redis.Redis) -> None:
    rule = ConsecutiveFailures(5, open_for=7.0)
    name = breaker_name("hostile", fresh_key(), rule)
    for bad, more_ms in ((0, 0), (1, rule.open_ms), (0, 0)):
        command = BreakerFlush((), NOW, rule=rule, name=name, counts=(CallCounts(0, NOW, 1, bad),))
        Breaker(server).run(command)
        least = rule.window_ms + more_ms
        assert least < server.pttl(name) <= least + rule.bucket_ms


def test_sender_records_of_many_processes_do_not_accumulate(server: redis.Redis) -> None:
    breaker, now = Breaker(server), NOW
    for number in range(600):
        now += W // 10
        breaker.run(breaker.flush(now=now, sender=f"{number:x}", seq=1))
    # Fifty processes flush in one window.
    assert server.hlen(breaker.name + b":senders") < 3 * 50


# -- adaptive breakers ----------------------------------------------------------------------------

ADAPTIVE = (
    "stamp", "bucket_ms", "buckets", "now_ms", "passed_ms", "force_ms", "sender", "seq", "counts",
)  # fmt: skip


SUFFIX = adaptive_name_suffix(1.5, 250, 40)


def adaptive(name: bytes, sender: str = "0a", seq: int = 1) -> AdaptiveFlush:
    counts = (AdaptiveCounts(NOW, 3, 2, 1),)
    return AdaptiveFlush(
        (), NOW, name=name, counts=counts, sender=sender, seq=seq, passed_ms=NOW - 5, force_ms=1000
    )


def test_the_head_of_the_adaptive_breaker_describes_what_is_sent(server: redis.Redis) -> None:
    command = adaptive(ring_name_prefix("hostile", fresh_key()) + SUFFIX)
    (line,) = lines("breaker_adaptive", "ARGV")
    found = parsed(line, [STAMP, *command.arguments()], 1)
    assert found is not None
    assert list(found) == list(ADAPTIVE)
    assert lines("breaker_adaptive", "KEYS") == ["breaker senders"]
    form, late = lines("breaker_adaptive", "RETURN")
    assert form == "stamp forced now_ms passed_ms (number success failure drop)..."
    assert late == "stamp -2 now_ms"
    raw = [STAMP, 1, NOW, NOW - 5, 7, 3, 2, 1]
    assert command.reply(raw) == AdaptiveReply(True, NOW - 5, (AdaptiveCounts(1750, 3, 2, 1),), NOW)


@pytest.mark.parametrize("exists", [False, True])
def test_hostile_arguments_do_not_change_an_adaptive_breaker(
    server: redis.Redis, exists: bool
) -> None:
    name = ring_name_prefix("hostile", fresh_key()) + SUFFIX
    command = adaptive(name, seq=9)
    words: list[Any] = [STAMP, *command.arguments()]

    def run(words: list[Any]) -> Any:
        return evalsha(server, "breaker_adaptive", command.keys, words)

    if exists:
        run([STAMP, *adaptive(name).arguments()])
    before = [server.dump(key) for key in command.keys]
    for at, place in enumerate(ADAPTIVE):
        for word in HOSTILE:
            if is_allowed(place, word) or (place == "seq" and word == "1e13"):
                continue
            reply = run([*words[:at], word, *words[at + 1 :]])
            if place in ("stamp", "now_ms"):
                late = isinstance(reply, list) and reply[1] == PAST_DEADLINE
                assert late or isinstance(reply, redis.ResponseError), (place, word)
            else:
                assert malformed(reply), (place, word)
            assert [server.dump(key) for key in command.keys] == before, (place, word)
    for count in range(2, len(words)):
        assert isinstance(run(words[:count]), redis.ResponseError)
    assert run([f"{NOW - 1}.000001", *words[1:]])[1] == PAST_DEADLINE
    assert [server.dump(key) for key in command.keys] == before
