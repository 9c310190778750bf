"""The short paths of acquire decide and write as its general path does, at a lower cost."""

from __future__ import annotations

import random
import re
from collections.abc import Iterator
from functools import cache
from typing import Any, get_args

import pytest
import redis

from distwindow import Limit
from distwindow.ring import commands as wire
from distwindow.ring.command import Command, load_script
from distwindow.ring.commands import charges_of
from distwindow.ring.key import ring_name_prefix
from distwindow.ring.limit import Bound
from distwindow.ring.stats import Bucket
from tests.clock_and_stores import T0, fresh_key
from tests.lua.target import LUA

STAMP = "9999999999999.000001"
SHORT_PATHS = {
    "acquire/hot.lua": "local key = KEYS[1]\n",
    "acquire/refuse.lua": "",
    "acquire/rotate.lua": "",
}
"""The pieces that the general path does without, and what it needs in their place."""
GENERAL_PATH = {"acquire/general.lua": "return 'general'\n"}


@cache
def general_only() -> str:
    """Return acquire without its short paths."""
    return acquire_with(SHORT_PATHS)


@cache
def short_only() -> str:
    """Return acquire without its general path: where that would decide, it answers `general`."""
    return acquire_with(GENERAL_PATH)


def acquire_with(replaced: dict[str, str]) -> str:
    root = LUA

    def piece(found: re.Match[str]) -> str:
        if found[1] in replaced:
            return replaced[found[1]]
        return (root / found[1]).read_text(encoding="utf-8")

    source = (root / "acquire.lua").read_text(encoding="utf-8")
    return re.sub(r"^--@include (\S+)\n", piece, source, flags=re.MULTILINE)


@pytest.fixture(scope="module")
def server(redis_url: str) -> Iterator[redis.Redis]:
    with redis.Redis.from_url(redis_url) as client:
        for name in ("acquire", "flush", "refund"):
            client.script_load(load_script(name).text)
        yield client


def random_ring(rng: random.Random, server: redis.Redis, key: str, limit: Limit) -> int:
    """Make some calls and flushes over about a window and a half; return the last time, ms."""
    charges = charges_of(key, ring_name_prefix("rotate", key), [limit], 1)
    now = T0 + rng.randrange(limit.bucket_ms)
    for _ in range(rng.randrange(1, 8)):
        now += rng.choice([0, 1, rng.randrange(limit.bucket_ms * (1 + limit.span // 2))])
        if rng.random() < 0.3:
            late = now - rng.randrange(limit.bucket_ms * limit.span)
            passed, blocked, success, error = (rng.randrange(3) for _ in range(4))
            seen = Bucket(late, passed, blocked, success, error, 9, rng.randrange(1, 9))
            run(server, wire.Flush(charges, now, counts=((seen,),)))
        else:
            cost = rng.randrange(1, limit.amount + 1)
            calls = rng.randrange(1, 4)
            charges = wire.charges_of(key, ring_name_prefix("rotate", key), [limit], cost)
            run(server, wire.Acquire(charges, now, calls=calls))
    return now


def run(server: redis.Redis, command: Command[Any]) -> Any:
    keys = command.keys
    sha = load_script(command.script).sha
    return server.evalsha(sha, len(keys), *keys, STAMP, *command.arguments())


def content(server: redis.Redis, ring: bytes, span: int, bucket_ms: int) -> dict[bytes, bytes]:
    """Return the hash without the slot of the newest bucket, whose value is not read any more."""
    fields: Any = server.hgetall(ring)
    newest = int(fields[b"head"].split()[0]) // bucket_ms
    fields.pop(b"%d" % (newest % span), None)
    return dict(fields)


def random_limit(rng: random.Random) -> Limit:
    buckets, bound = rng.choice([1, 2, 4, 5, 10, 40]), rng.choice(get_args(Bound))
    return Limit(rng.choice([3, 20]), per=60 * buckets, buckets=buckets, bound=bound)


def copy_of(server: redis.Redis, ring: bytes) -> bytes:
    twin = ring + b":twin"
    server.delete(twin)
    server.execute_command("COPY", ring, twin)
    return twin


def run_both(server: redis.Redis, limit: Limit, command: wire.Acquire, seed: int) -> Any:
    """Run the command on its ring, and without the short paths on a copy; return the reply."""
    (ring,) = command.keys
    twin, head = copy_of(server, ring), server.hget(ring, "head") or b""
    short = run(server, command)
    general: Any = server.eval(general_only(), 1, twin, STAMP, *command.arguments())
    assert command.reply(short) == command.reply(general), seed
    span, width = limit.span, limit.bucket_ms
    if b" " not in head:  # else acquire/hot.lua keeps the stored refusal; the general path does not
        short_content, general_content = (content(server, r, span, width) for r in (ring, twin))
        if (
            command.calls * command.charges[0].cost == limit.amount
            and b" " not in short_content[b"head"]
        ):
            # acquire/hot.lua does not store the refusal of the whole limit.
            general_content[b"head"] = general_content[b"head"].split()[0]
        assert short_content == general_content, seed
    assert abs(server.pttl(ring) - server.pttl(twin)) < width, seed
    return short


def test_the_rotation_of_one_ring_is_that_of_the_general_path(server: redis.Redis) -> None:
    short_replies = 0
    for seed in range(200):
        rng = random.Random(seed)
        limit, key = random_limit(rng), fresh_key()
        last = random_ring(rng, server, key, limit)
        charges = charges_of(key, ring_name_prefix("rotate", key), [limit], rng.randrange(1, 4))
        steps = rng.randrange(1, limit.span + 3)
        now = last + limit.bucket_ms * steps + rng.randrange(limit.bucket_ms)
        command = wire.Acquire(charges, now, calls=rng.randrange(1, 3))
        reply = run_both(server, limit, command, seed)
        short_replies += len(reply) == 3  # as acquire/rotate.lua answers; the general path has five
    assert short_replies > 50


def is_decided_shortly(server: redis.Redis, command: wire.Acquire) -> bool:
    """True if a short path decides the command; its ring stays as it is."""
    twin = copy_of(server, command.keys[0])
    return bool(server.eval(short_only(), 1, twin, STAMP, *command.arguments()) != b"general")


def test_the_first_refusal_of_a_key_is_that_of_the_general_path(server: redis.Redis) -> None:
    """A short path decides it where all permits are in the newest bucket."""
    short = []
    for seed in range(150):
        rng = random.Random(seed)
        key, buckets = fresh_key(), rng.choice([1, 2, 5, 10, 40])
        # (A bucket of ten days is a window of more ms than 2^31.)
        per = buckets * rng.choice([60, 60, 864_000])
        # (A refusal by a limit of 10**12 may be too long to be stored.)
        amount, bound = rng.choice([1, 1, 3, 20, 10**12]), rng.choice(get_args(Bound))
        limit = Limit(amount, per=per, buckets=buckets, bound=bound)

        def charges(cost: int, key: str = key, limit: Limit = limit) -> Any:
            return charges_of(key, ring_name_prefix("first", key), [limit], cost)

        now = T0 - T0 % limit.bucket_ms + rng.randrange(limit.bucket_ms // 2)
        if rng.random() < 0.3:
            run(server, wire.Acquire(charges(rng.randrange(1, amount + 1)), now - limit.bucket_ms))
        run(server, wire.Acquire(charges(rng.randrange(1, amount + 1)), now))
        if rng.random() < 0.3:  # more than the limit may pass, and some may be refused already
            seen = Bucket(now, rng.randrange(2 * amount), rng.randrange(3), rng.randrange(3))
            run(server, wire.Flush(charges(1), now, counts=((seen,),)))
        if rng.random() < 0.2:
            run(server, wire.Refund(charges(amount), now, charged_ms=now))
        for _ in range(4):
            now += rng.choice([0, 1, rng.randrange(limit.bucket_ms // 8)])
            calls = rng.choice([1, 1, 1, amount])
            cost = 1 if calls > 1 else rng.choice([amount, rng.randrange(1, amount + 1)])
            command = wire.Acquire(charges(cost), now, calls=calls)
            fields: Any = server.hmget(command.keys[0], "head", "used", "closed")
            all_in_newest = fields[1] != b"0" and fields[2] == b"0"
            if b" " not in fields[0] and all_in_newest and calls == 1 and amount < 10**12:
                short.append(is_decided_shortly(server, command))
            run_both(server, limit, command, seed)
    assert len(short) > 150
    assert all(short)


@pytest.mark.slow
def test_the_first_refusal_of_one_ring_is_that_of_the_general_path(server: redis.Redis) -> None:
    """And so are the calls after it, which the stored refusal decides."""
    stored = 0
    for seed in range(300):
        rng = random.Random(seed)
        limit, key = random_limit(rng), fresh_key()
        now = random_ring(rng, server, key, limit)
        for _ in range(rng.randrange(1, 6)):
            cost = rng.randrange(1, limit.amount + 1)
            charges = charges_of(key, ring_name_prefix("rotate", key), [limit], cost)
            now += rng.choice([0, 0, rng.randrange(limit.bucket_ms)])
            reply = run_both(server, limit, wire.Acquire(charges, now), seed)
            stored += len(reply) == 8 and reply[1] == -1
    assert stored > 200
