"""Keys of another type, and hashes that are not rings: they admit nothing and are left alone."""

from __future__ import annotations

from typing import Any

import pytest
import redis

from tests.lua.target import LIMIT, NOW, OTHER, STATES, Target, W, admitted


def test_records_of_another_type_prevent_all_writes(server: redis.Redis) -> None:
    target = Target(server, (LIMIT, OTHER), NOW + W, 1)
    server.set(target.keys("flush")[-1], "x")
    before = target.content()
    reply = target.send(target.flush())
    assert isinstance(reply, redis.ResponseError)
    assert "WRONGTYPE" in str(reply)
    assert target.content() == before


@pytest.mark.parametrize("kind", ["string", "list", "set", "zset", "stream"])
@pytest.mark.parametrize("name", ["acquire", "peek", "lease", "flush", "refund", "read"])
def test_a_key_of_another_type_is_left_alone(server: redis.Redis, name: str, kind: str) -> None:
    target = Target(server, (LIMIT,), NOW, 0)
    ring = target.charges[0].ring
    make = {
        "string": lambda: server.set(ring, "x"),
        "list": lambda: server.rpush(ring, "x"),
        "set": lambda: server.sadd(ring, "x"),
        "zset": lambda: server.zadd(ring, {"x": 1}),
        "stream": lambda: server.xadd(ring, {"x": 1}),
    }
    make[kind]()
    before = server.dump(ring)
    for full in (False, True):
        reply = target.send(target.command(name, full=full))
        assert isinstance(reply, redis.ResponseError)
        assert "WRONGTYPE" in str(reply)
    assert server.dump(ring) == before


@pytest.mark.parametrize("name", ["acquire", "peek", "lease", "flush", "refund"])
def test_a_key_of_another_type_prevents_all_writes(server: redis.Redis, name: str) -> None:
    target = Target(server, (LIMIT, OTHER), NOW + W, 0)
    for charge in target.charges:
        server.set(charge.ring, "x")
    server.delete(target.charges[0].ring)
    before = target.content()
    reply = target.send(target.command(name, full=True))
    assert isinstance(reply, redis.ResponseError)
    assert "WRONGTYPE" in str(reply)
    assert target.content() == before


READ = {
    "open": ("head", "used"),  # within a bucket only the total decides
    "with a stored refusal": ("head", "used"),
    "due for the next bucket": ("head", "used", "closed"),
    "at its limit": ("head", "used", "closed"),
}


def admitted_with_strange_fields(
    server: redis.Redis, name: str, state: str, fields: tuple[str, ...]
) -> list[Any]:
    """Return the calls that are admitted although one of these fields has a malformed value."""
    now, used = STATES[state]
    wrong = []
    for field in fields:
        for word in ("", "x", "1 x", "-", "{}"):
            target = Target(server, (LIMIT,), now, used)
            server.hset(target.charges[0].ring, field, word)
            reply = target.send(target.command(name, full=False))
            if admitted(reply):
                wrong.append((field, word, reply))
    return wrong


@pytest.mark.parametrize("state", READ)
def test_a_hash_that_is_not_a_ring_admits_nothing(server: redis.Redis, state: str) -> None:
    assert admitted_with_strange_fields(server, "acquire", state, READ[state]) == []


@pytest.mark.parametrize("cost", [1, LIMIT.amount])
@pytest.mark.parametrize("block", [None, "x", "1 x"])
def test_a_refusal_that_cannot_be_counted_charges_nothing(
    server: redis.Redis, block: str | None, cost: int
) -> None:
    target = Target(server, (LIMIT,), *STATES["at its limit"])
    ring = target.charges[0].ring
    server.hdel(ring, "block")
    if block is not None:
        server.hset(ring, "block", block)
    words = target.words(target.command("acquire", full=False))
    reply = target.run("acquire", [words[0], cost, *words[2:]])
    assert not admitted(reply)
    assert server.hget(ring, "used") == b"5"


@pytest.mark.parametrize("state", READ)
def test_a_hash_that_is_not_a_ring_gives_no_lease(server: redis.Redis, state: str) -> None:
    assert admitted_with_strange_fields(server, "lease", state, ("used", "closed")) == []


@pytest.mark.parametrize("name", ["lease", "flush", "peek"])
def test_a_hash_with_a_strange_head_is_not_a_ring(server: redis.Redis, name: str) -> None:
    assert admitted_with_strange_fields(server, name, "open", ("head",)) == []
