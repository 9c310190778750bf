"""The head of each script describes what Python sends and accepts."""

from __future__ import annotations

import itertools
import re
from typing import Any

import pytest

from distwindow import Key, Limit
from distwindow.borrow.commands import Borrow
from distwindow.breaker.commands import BREAKER_COMMANDS, AdaptiveFlush
from distwindow.concurrency.commands import SLOT_COMMANDS
from distwindow.minute.commands import VIEW_COMMANDS
from distwindow.ring import command as script
from distwindow.ring import commands as wire
from distwindow.ring.command import Command
from distwindow.ring.commands import charges_of
from distwindow.ring.decision import BorrowedCharge, Charge
from distwindow.ring.key import ring_name_prefix
from distwindow.ring.replies import PAST_DEADLINE, FleetCounts
from distwindow.ring.stats import Bucket
from distwindow.shaping.commands import AcquireShaped, PeekShaped, ReadShaped
from distwindow.upstream.commands import UPSTREAM_COMMANDS
from distwindow.waiting.commands import AcquireTurn
from tests.lua.target import COMMANDS, head_of

STAMP = b"9999999999999.000007"
NOW = 1_700_000_000_123

LEAP = Limit(21, per=60, buckets=6)
STRICT = Limit(34, per=3600, buckets=60, bound="strict")


def charges(*limits: Limit, cost: int = 5) -> tuple[Charge, ...]:
    return charges_of("key", ring_name_prefix("heads", "key"), limits, cost)


def lines(name: str, word: str) -> list[str]:
    """Return the lines of the head that begin with `word`, without it and without comments."""
    found = [line.removeprefix(word) for line in head_of(name) if line.startswith(word)]
    return [re.split(r"\s{3,}", line.strip())[0] for line in found]


def grammar(text: str, rings: int) -> re.Pattern[str]:
    """Return a grammar line as a pattern over words: `name`, `[optional]...`, `(of a ring)...`,
    `-1`.

    Names of a ring get its number: `limit_1`.
    """
    pattern = ""
    for group, part in re.findall(r"(\([^)]*\)\.\.\.|\[[^\]]*\])|(\S+)", text):
        if group.startswith("("):
            for ring in range(1, rings + 1):
                pattern += "".join(_word(f"{n}_{ring}") for n in group[1:-4].split())
        elif group:
            inner = "".join(
                "".join(_word(f"{name[:-3]}_{ring}") for ring in range(1, rings + 1))
                if name.endswith("...")
                else _word(name + "_again" * (name in pattern))
                for name in group[1:-1].split()
            )
            pattern += f"(?:{inner})?"
        elif part.endswith("..."):
            pattern += "".join(_word(f"{part[:-3]}_{ring}") for ring in range(1, rings + 1))
        else:
            pattern += _word(part)
    return re.compile(pattern)


def _word(name: str) -> str:
    return rf"(?:^|(?<= ))(?P<{name}>\S+)(?: |$)" if name.isidentifier() else rf"{name}(?: |$)"


def parsed(text: str, words: list[Any], rings: int) -> dict[str, str] | None:
    sent = " ".join(map(shown, words))
    found = grammar(text, rings).fullmatch(sent)
    return None if found is None else {k: v for k, v in found.groupdict().items() if v is not None}


def shown(word: Any) -> str:
    """Return an argument as one word without spaces, even if it is empty."""
    return str(word).replace(" ", "_") or '""'


def test_there_is_a_script_for_each_command_and_no_other() -> None:
    commands = [*COMMANDS, *BREAKER_COMMANDS, AdaptiveFlush.script, *SLOT_COMMANDS, *VIEW_COMMANDS]
    commands += [command.script for command in UPSTREAM_COMMANDS]
    assert script.script_names() == sorted(commands)


@pytest.mark.parametrize("name", COMMANDS)
def test_a_head_has_its_name_and_each_line(name: str) -> None:
    head = head_of(name)
    assert head[0].startswith(f"{name}: ")
    assert [line.split()[0] for line in head[1:4]] == ["KEYS", "ARGV", "RETURN"]
    assert lines(name, "KEYS") == [KEYS.get(name, "ring...")]


KEYS = {
    "flush": "ring... senders...",
    "acquire_shaped": "ring... shaping...",
    "peek_shaped": "ring... shaping...",
    "acquire_turn": "ring... line...",
    "read": "ring... [shaping...]",
}
"""The scripts whose KEYS are not `ring...`."""


@pytest.mark.parametrize("name", COMMANDS)
def test_the_keys_are_those_of_the_head(name: str) -> None:
    sent = COMMANDS[name](charges(LEAP, STRICT)).keys
    rings = [b"heads:{key}:10000:6", b"heads:{key}:60000:61"]
    of_all = re.sub(r" ?\[.*\]", "", KEYS.get(name, ""))  # without those of shaped limits only
    second = of_all.removeprefix("ring...").removesuffix("...").strip().encode()
    assert sent == (rings + [ring + b":" + second for ring in rings] if second else rings)


def test_a_read_of_shaped_limits_has_their_keys() -> None:
    both = shaped(charges(LEAP, STRICT))
    plain = charges(LEAP)
    rings = [b"heads:{key}:10000:6", b"heads:{key}:60000:61"]
    assert ReadShaped(both).keys == rings + [ring + b":shaping" for ring in rings]
    assert ReadShaped(plain + both[1:]).keys == [*rings, rings[1] + b":shaping"]


# -- ARGV -----------------------------------------------------------------------------------------


SEEN = (
    Bucket(NOW // 60_000 * 60_000, 2, 3, 4, 5, 60, 7),
    Bucket(wire.CURRENT_BUCKET, success=1, rt_sum_ms=8, rt_min_ms=8),
)
COUNTS = ("1699999980000 2 3 4 5 60 7;10000000000000 0 0 1 0 8 8;", "")


def borrowed(rings: tuple[Charge, ...]) -> tuple[Charge, ...]:
    """Return these charges, of which the last is counted in a bucket that had not begun."""
    return (*rings[:-1], BorrowedCharge(*rings[-1][:4], NOW // 60_000 * 60_000 + 120_000))


def shaped(rings: tuple[Charge, ...]) -> tuple[Charge, ...]:
    """Return these charges with limits of which the first is paced, and the second warms up."""
    terms: tuple[dict[str, Any], ...] = (
        {"max_wait": 0.5},
        {"warmup": 7200.0, "cold_factor": 4},
    )
    limits = [
        Limit(r.limit.amount, r.limit.per, r.limit.buckets, r.limit.bound, **t)
        for r, t in zip(rings, terms, strict=False)
    ]
    return tuple(r._replace(limit=limit) for r, limit in zip(rings, limits, strict=True))


def variants() -> list[Command[Any]]:
    one, two = charges(LEAP), charges(LEAP, STRICT)
    sent: list[Command[Any]] = []
    for rings, now in itertools.product((one, two), (None, NOW)):
        sent += [
            *(
                wire.Acquire(rings, now, calls=n, write_limit=t)
                for n in (1, 3)
                for t in (False, True)
            ),
            wire.Peek(rings, now),
            *(wire.Lease(rings, now, extra=n, prefetch=q) for n in (0, 9) for q in (False, True)),
            wire.Flush(rings, now, pull=True),
            wire.Flush(rings, now, counts=(SEEN, ())[: len(rings)]),
            wire.Flush(
                rings, now, counts=(SEEN, ())[: len(rings)], sender="0fa1", seq=12, pull=True
            ),
            Borrow(rings, now, max_wait_ms=500, max_borrowed=(10, 17)[: len(rings)]),
            wire.Refund(rings, now, charged_ms=NOW - 70_000),
            wire.Refund(borrowed(rings), now, charged_ms=NOW - 70_000),
            *(AcquireShaped(shaped(rings), now, write_limit=t) for t in (False, True)),
            AcquireShaped(shaped(rings), now, cap_ms=77),
            PeekShaped(shaped(rings), now),
            *(AcquireTurn(rings, now, held_ms=n, takes_next=q) for n, q in ((0, True), (9, False))),
            wire.Read(rings, now),
            ReadShaped(shaped(rings), now),
            wire.Reset(rings, now),
        ]
    return sent


@pytest.mark.parametrize("command", variants(), ids=lambda c: f"{c.script}-{len(c.charges)}")
def test_the_arguments_are_those_of_the_head(command: Command[Any]) -> None:
    rings = len(command.charges)
    (line,) = lines(command.script, "ARGV")
    found = parsed(line, [STAMP.decode(), *command.arguments()], rings)
    assert found is not None, f"{command.arguments()} does not fit {line!r}"
    calls = getattr(command, "calls", 1)
    expected = {"stamp": STAMP.decode(), "calls": str(calls), "write_limit": "1"}
    expected["now_ms"] = '""' if command.now_ms is None else str(command.now_ms)
    for i, charge in enumerate(command.charges, 1):
        limit = charge.limit
        expected |= {
            f"permits_{i}": str(charge.cost * calls),
            f"limit_{i}": str(limit.amount),
            f"bucket_ms_{i}": str(limit.bucket_ms),
            f"shape_{i}": f"{limit.buckets}+1" if limit.bound == "strict" else str(limit.buckets),
            f"bucket_start_ms_{i}": str((NOW - 70_000) // limit.bucket_ms * limit.bucket_ms),
            f"max_borrowed_{i}": str((10, 17)[i - 1]),
            f"borrowed_{i}": str(int(isinstance(charge, BorrowedCharge))),
        }
        if isinstance(charge, BorrowedCharge):
            expected[f"bucket_start_ms_{i}"] = str(charge.bucket_start_ms)
    if isinstance(command, (AcquireShaped, PeekShaped)):
        expected |= {"max_wait_ms_1": "500", "warmup_ms_1": '""', "cold_factor_1": '""'}
        expected |= {"max_wait_ms_2": '""', "warmup_ms_2": "7200000", "cold_factor_2": "4"}
        expected["write_limit"] = str(int(getattr(command, "write_limit", False)))
        expected["cap_ms"] = "77" if getattr(command, "cap_ms", None) else '""'
    names = ("max_wait_ms", "held_ms", "takes_next", "extra", "prefetch", "sender", "seq", "pull")
    for name in names:
        value = getattr(command, name, "")
        expected[name] = shown(int(value) if isinstance(value, bool) else value)
    counts = COUNTS if getattr(command, "counts", ()) else ("", "")
    expected |= {f"counts_{i}": shown(count) for i, count in enumerate(counts, 1)}
    assert found == {name: expected[name] for name in found}
    if command.now_ms is not None:
        assert found["now_ms"] == str(NOW)
    assert found.get("calls", "1") == str(calls)
    if not isinstance(command, AcquireShaped):  # which always has it, as 0 or 1
        assert ("write_limit" in found) == getattr(command, "write_limit", False)


def test_a_bucket_is_written_in_the_order_of_the_head() -> None:
    head = " ".join(head_of("flush"))
    (names,) = re.findall(r"`counts` of a ring: '([^;]*);' for each bucket", head)
    order = {"start": 10, "pass": 11, "block": 12, "success": 13, "error": 14}
    order |= {"rt_sum_ms": 15, "rt_min_ms": 16}
    seen = Bucket(10, 11, 12, 13, 14, 15, 16)
    written = wire.Flush(charges(LEAP), counts=((seen,),)).arguments()[-1]
    assert written == " ".join(str(order[name]) for name in names.split()) + ";"


@pytest.mark.parametrize("command", variants(), ids=lambda c: f"{c.script}-{len(c.charges)}")
def test_a_frame_is_the_evalsha_of_these_words(command: Command[Any]) -> None:
    for frame, verb, text in (
        (command.frame(STAMP), b"EVALSHA", script.load_script(command.script).sha),
        (command.eval_frame(STAMP), b"EVAL", script.load_script(command.script).text),
    ):
        words = unpacked(frame)
        assert words == [
            verb,
            text.encode(),
            str(len(command.keys)).encode(),
            *command.keys,
            STAMP,
            *(str(word).encode() for word in command.arguments()),
        ]


def unpacked(frame: bytes) -> list[bytes]:
    """Return the words of a RESP array."""
    head, _, rest = frame.partition(b"\r\n")
    words = []
    for _ in range(int(head[1:])):
        size, _, rest = rest.partition(b"\r\n")
        assert size[:1] == b"$"
        words.append(rest[: int(size[1:])])
        assert rest[int(size[1:]) : int(size[1:]) + 2] == b"\r\n"
        rest = rest[int(size[1:]) + 2 :]
    assert rest == b""
    return words


@pytest.mark.parametrize("name", COMMANDS)
def test_no_text_of_a_user_becomes_part_of_a_script(name: str) -> None:
    key = Key("'; redis.call('FLUSHALL') --", tag="]] return 1 --")
    hostile = charges_of(key, ring_name_prefix("p", key), [LEAP], 1)
    plain = charges_of("key", ring_name_prefix("p", "key"), [LEAP], 1)
    command = COMMANDS[name]
    text, sha = script.load_script(name).text.encode(), script.load_script(name).sha.encode()
    for given in (hostile, plain):
        assert unpacked(command(given).eval_frame(STAMP))[1] == text
        assert unpacked(command(given).frame(STAMP))[1] == sha


# -- RETURN ---------------------------------------------------------------------------------------

VALUES: dict[str, Any] = {
    "stamp": STAMP, "now_ms": NOW, "left": 8, "index": 2, "reset_ms": 1500, "retry_ms": 900,
    "admitted": 0, "refunded": 4, "deleted": 1, "extra": 6, "ends_in_ms": 450, "start": 60_000,
    "passed": 11, "wait_ms": 250, "wait_us": 1234, "turn_in_ms": 321, "queued": 5,
}  # fmt: skip
AGAIN: dict[str, Any] = {"index": 1, "left": 3, "reset_ms": 77}
STARTS = (1_699_999_980_000, 1_699_999_200_000)


def reply_of(form: str, rings: int) -> list[Any]:
    """Return a reply of this form with the values above. Where there is a list for each ring, only
    the first has values, and that of `read` has none: other tests parse hashes.
    """
    if listed := re.fullmatch(r"(.*) \((.*) \.\.\.\)\.\.\.", form):
        first = [VALUES[word] for word in listed[2].split() if word in VALUES]
        return [*reply_of(listed[1], rings), first, *([[]] * (rings - 1))]
    plain, _, optional = form.partition(" [")
    raw: list[Any] = []
    words = plain.split()
    for at, word in enumerate(words):
        if word == "bucket_start_ms...":
            raw += STARTS[:rings]
        elif word == "borrowed...":
            raw += (0, 1)[:rings]
        elif word in words[:at]:
            raw.append(AGAIN[word])
        else:
            raw.append(VALUES[word] if word in VALUES else int(word))
    return raw + [AGAIN[word] for word in optional.rstrip("]").split()]


def forms(name: str) -> list[str]:
    return [form for form in lines(name, "RETURN") if not form.startswith("stamp -2")]


@pytest.mark.parametrize("name", COMMANDS)
def test_every_script_has_the_reply_past_its_deadline(name: str) -> None:
    assert "stamp -2 now_ms" in lines(name, "RETURN")
    assert PAST_DEADLINE == -2


@pytest.mark.parametrize(("name", "form"), [(n, f) for n in ("acquire", "peek") for f in forms(n)])
def test_an_acquire_reply_is_parsed_from_each_form(name: str, form: str) -> None:
    command = COMMANDS[name](charges(LEAP, STRICT))
    reply = command.reply(reply_of(form, 2))
    assert reply.now_ms == NOW
    assert reply.left == 8
    if form == "stamp left now_ms":
        width, span = LEAP.bucket_ms, LEAP.span
        assert (reply.binding_index, reply.retry_ms) == (0, 0)
        assert reply.reset_ms == NOW // width * width + width * span - NOW
        return
    assert (reply.binding_index, reply.reset_ms) == (1, 1500)
    refused = "retry_ms" in form
    assert reply.retry_ms == (900 if refused else 0)
    assert reply.admitted == (0 if refused else 1)
    partly = form.count("index") == 2
    assert reply.admitted_binding == ((0, 3, 77) if partly else None)
    assert reply.bucket_starts_ms == (STARTS if "bucket_start_ms" in form else None)


def test_the_refusal_of_all_calls_has_no_admitted_ones() -> None:
    (form,) = [form for form in forms("acquire") if "[" in form]
    reply = wire.Acquire(charges(LEAP, STRICT)).reply(reply_of(form.partition(" [")[0], 2))
    assert reply.admitted_binding is None


def check_acquire_reply(reply: Any, form: str) -> bool:
    """Check what the reply to one call of another script has in common with that of `acquire`.
    Return whether it is a refusal.
    """
    refused = "retry_ms" in form
    assert (reply.now_ms, reply.left, reply.binding_index, reply.reset_ms) == (NOW, 8, 1, 1500)
    assert (reply.admitted, reply.retry_ms) == ((0, 900) if refused else (1, 0))
    assert reply.admitted_binding is None
    assert reply.bucket_starts_ms == (STARTS if "bucket_start_ms" in form else None)
    return refused


@pytest.mark.parametrize("form", forms("borrow"))
def test_a_borrow_reply_is_parsed_from_each_form(form: str) -> None:
    reply = Borrow(charges(LEAP, STRICT)).reply(reply_of(form, 2))
    check_acquire_reply(reply.acquire_reply, form)
    waits = "wait_ms" in form
    assert (reply.wait_ms, reply.borrowed) == ((250, (False, True)) if waits else (0, ()))


@pytest.mark.parametrize(
    ("name", "form"), [(n, f) for n in ("acquire_shaped", "peek_shaped") for f in forms(n)]
)
def test_a_shaped_reply_is_parsed_from_each_form(name: str, form: str) -> None:
    reply = COMMANDS[name](charges(LEAP, STRICT)).reply(reply_of(form, 2))
    assert reply.wait_us == (0 if check_acquire_reply(reply, form) else 1234)


@pytest.mark.parametrize("form", forms("acquire_turn"))
def test_a_turn_reply_is_parsed_from_each_form(form: str) -> None:
    turn = AcquireTurn(charges(LEAP, STRICT)).reply(reply_of(form, 2))
    refused = check_acquire_reply(turn.acquire_reply, form)
    assert (turn.turn_in_ms, turn.queued) == (321, 0 if refused else 5)


@pytest.mark.parametrize("form", forms("lease"))
def test_a_lease_reply_is_parsed_from_each_form(form: str) -> None:
    lease = wire.Lease(charges(LEAP, STRICT)).reply(reply_of(form, 2))
    refused = check_acquire_reply(lease.acquire_reply, form)
    assert (lease.extra, lease.ends_in_ms) == ((0, 0) if refused else (6, 450))


def test_fleet_counts_are_parsed_from_each_form() -> None:
    plain, listed = forms("flush")
    flush = wire.Flush(charges(LEAP, STRICT), pull=True)
    assert flush.reply(reply_of(plain, 2)) == FleetCounts((), NOW)
    assert flush.reply(reply_of(listed, 2)) == FleetCounts(({60_000: 11}, {}), NOW)


@pytest.mark.parametrize("name", ["refund", "read", "reset"])
def test_the_other_forms_are_parsed(name: str) -> None:
    (form,) = forms(name)
    reply = COMMANDS[name](charges(LEAP, STRICT)).reply(reply_of(form, 2))
    assert reply.now_ms == NOW
    if name == "read":
        assert (reply.states, reply.shapings) == ((None, None), ())
    else:
        assert reply.affected == {"refund": 4, "reset": 1}[name]


def test_the_forms_of_every_script_are_parsed_here() -> None:
    """A new script has to be added to the tests above."""
    assert set(COMMANDS) == {
        "acquire", "borrow", "peek", "lease", "flush", "refund", "read", "reset",
        "acquire_shaped",
        "peek_shaped",
        "acquire_turn",
    }  # fmt: skip
