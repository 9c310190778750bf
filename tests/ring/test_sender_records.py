"""A ring counts each flush once. The records of that are stored beside the ring, which has the same
bytes for any number of senders, and the number of records is bounded by the senders of a window.

All times are in the commands, and no bucket is shorter than a minute, so that nothing expires by
the server's own clock during a test.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterator
from typing import Any, NamedTuple

import pytest
import redis
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from distwindow import Limit
from distwindow.ring.commands import Flush, Read, Reset, charges_of
from distwindow.ring.decision import Charge
from distwindow.ring.key import (
    SENDERS,
    parse_ring_name,
    ring_beside,
    ring_name_prefix,
    senders_name,
)
from distwindow.ring.stats import Bucket
from distwindow.stores.memory import MemoryStore
from tests.clock_and_stores import T0, Execute, blocking, fresh_key

W = 60_000
START = T0 // W * W
LIMIT = Limit(10**6, per=300, buckets=5)
OTHER = Limit(10**6, per=360, buckets=2, bound="strict")
LENIENT = settings(deadline=None, suppress_health_check=list(HealthCheck), print_blob=True)


@pytest.fixture(scope="module")
def execute(examples_url: str) -> Iterator[Execute]:
    with blocking(examples_url) as store:
        yield store


@pytest.fixture(scope="module")
def server(examples_url: str) -> Iterator[redis.Redis]:
    with redis.Redis.from_url(examples_url) as client:
        yield client


def ring_of(limit: Limit = LIMIT) -> tuple[Charge, ...]:
    return charges_of("k", ring_name_prefix("records", fresh_key()), [limit], 1)


def flush(
    charges: tuple[Charge, ...], now: int, sender: str, seq: int = 1, passed: int = 1
) -> Flush:
    return Flush(
        charges, now, counts=((Bucket(now, passed),),) * len(charges), sender=sender, seq=seq
    )


# -- the ring -------------------------------------------------------------------------------------


def test_a_ring_is_the_same_for_any_number_of_senders(
    execute: Execute, server: redis.Redis
) -> None:
    charges = ring_of()
    ring = charges[0].ring
    for bucket in range(5):
        execute(flush(charges, START + bucket * W, "", passed=100))
    before = server.dump(ring), server.memory_usage(ring, samples=0)
    assert server.object("encoding", ring) in (b"listpack", b"ziplist")
    for sender in range(2000):
        execute(flush(charges, START + 4 * W, f"{sender:x}", passed=0))
    assert server.hlen(senders_name(ring)) == 2000
    assert (server.dump(ring), server.memory_usage(ring, samples=0)) == before
    assert server.object("encoding", ring) in (b"listpack", b"ziplist")


@pytest.mark.slow
def test_the_number_of_records_is_bounded_for_any_number_of_processes(
    execute: Execute, server: redis.Redis
) -> None:
    """A hundred new processes in each bucket; five buckets are a window."""
    charges = ring_of()
    senders, most = senders_name(charges[0].ring), 0
    for bucket in range(40):
        for sender in range(100):
            execute(flush(charges, START + bucket * W, f"{bucket:x}{sender:02x}"))
        most = max(most, server.hlen(senders))
    assert 500 <= most <= 1000
    for sender in range(400):  # a window later all records have expired
        execute(flush(charges, START + 60 * W, f"ffff{sender:x}"))
    assert 400 <= server.hlen(senders) <= 800


def test_few_records_are_compact_and_many_are_a_hash_table(
    execute: Execute, server: redis.Redis
) -> None:
    charges = ring_of()
    senders = senders_name(charges[0].ring)
    for sender in range(63):
        execute(flush(charges, START, f"{sender:x}"))
    assert server.object("encoding", senders) in (b"listpack", b"ziplist")
    execute(flush(charges, START, "ff"))
    assert server.object("encoding", senders) == b"hashtable"
    assert {len(sender) for sender in server.hkeys(senders)} <= {1, 2}


def test_records_expire_later_than_they_are_valid(execute: Execute, server: redis.Redis) -> None:
    """If the clock was set back, they also live until the newest bucket of the ring begins."""
    charges = ring_of()
    senders, lives = senders_name(charges[0].ring), 6 * W
    execute(flush(charges, START + 2 * W, "a"))
    assert lives - W / 2 < server.pttl(senders) <= lives
    server.pexpire(senders, 1000)
    execute(flush(charges, START + 2 * W + 5, "a", 2))
    assert server.pttl(senders) <= 1000, "PEXPIRE is sent once per bucket"
    execute(flush(charges, START + 3 * W, "a", 3))
    assert lives - W / 2 < server.pttl(senders) <= lives
    execute(flush(charges, START + W, "b"))
    assert lives + 2 * W - W / 2 < server.pttl(senders) <= lives + 2 * W


def test_a_reset_keeps_the_records(execute: Execute) -> None:
    """Otherwise a flush that is sent again after it would be counted in the new window."""
    charges, memory = ring_of(), MemoryStore().execute
    for run in (execute, memory):
        run(flush(charges, START, "a"))
        run(Reset(charges, START))
        run(flush(charges, START, "a"))
        assert run(Read(charges, START)).states == (None,)
        run(flush(charges, START, "a", 2))
        assert run(Read(charges, START)).states[0].used == 1


def test_a_flush_touches_no_key_that_it_does_not_name(
    execute: Execute, server: redis.Redis, examples_url: str
) -> None:
    charges = charges_of("k", ring_name_prefix("records", fresh_key()), [LIMIT, OTHER], 1)
    declared = {key.decode() for key in Flush(charges).keys}
    end = fresh_key("end")
    touched: set[str] = set()
    with redis.Redis.from_url(examples_url) as watcher, watcher.monitor() as monitor:

        def watch() -> None:
            for seen in monitor.listen():
                words = seen["command"].split()
                if words[-1] == end:
                    return
                if seen["client_type"] == "lua" and words[0].upper() != "TIME":
                    touched.add(words[1])

        thread = threading.Thread(target=watch, daemon=True)
        thread.start()
        for bucket in range(8):
            for sender in range(20):
                now = START + bucket * W
                counts = ((Bucket(now, 1, 1, 1, 1, 5, 2), Bucket(now - W, 1)),) * 2
                execute(
                    Flush(charges, now, counts=counts, sender=f"{bucket}{sender}", seq=1, pull=True)
                )
        server.echo(end)
        thread.join(20)
        assert not thread.is_alive()
    assert touched == declared


def test_records_are_in_the_slot_of_their_ring_and_are_not_a_ring() -> None:
    for charge in charges_of("k", ring_name_prefix("records", "user:42"), [LIMIT, OTHER], 1):
        name = senders_name(charge.ring)
        assert name[: name.index(b"}")] == charge.ring[: charge.ring.index(b"}")]
        assert parse_ring_name("records", name) is None
        assert ring_beside("records", name, SENDERS) == charge.ring
        assert ring_beside("other", name, SENDERS) is None
        assert ring_beside("records", charge.ring, SENDERS) is None


# -- each flush is counted once --------------------------------------------------------------------


class Sent(NamedTuple):
    """A flush that may be sent again, until its sender sends the next one."""

    at: int
    sender: str
    seq: int
    passed: int


later = st.sampled_from([0, 0, 1, 500, W - 1, W, W, 2 * W, 3 * W, 5 * W, -1, -W, -2 * W, -4 * W])
moves = st.tuples(
    later,
    st.integers(0, 12),  # which sender; those above 7 are new each time
    st.integers(1, 5),  # its passes
    st.lists(st.integers(0, 30), max_size=4),  # which flushes are sent again
    st.sampled_from([0, 0, 0, 20, 70]),  # how many other new processes flush
)


@settings(LENIENT, max_examples=60)
@given(history=st.lists(moves, min_size=1, max_size=25))
def test_a_flush_that_is_sent_again_is_never_counted_twice(
    execute: Execute, server: redis.Redis, history: list[Any]
) -> None:
    """The ring holds, bucket by bucket, what was sent for the first time: however often and late a
    flush is sent again, whichever processes start and end, and whichever records the server has
    picked at random to look for expired ones.
    """
    charges = ring_of()
    memory = MemoryStore().execute
    now = newest = START
    last: dict[str, Sent] = {}
    expected: Counter[int] = Counter()
    for number, (elapsed, which, passed, again, others) in enumerate(history):
        now = max(now + elapsed, newest - 4 * W)  # a clock set back by less than a window
        newest = max(newest, now - now % W)
        sender = f"{which:x}" if which < 8 else f"{number:x}f{which:x}"
        before = last.get(sender)
        sent = Sent(now, sender, before.seq + 1 if before else 1, passed)
        last[sender] = sent  # from here on it does not send `before` again
        expected[now - now % W] += passed
        came = [Sent(now, f"{number:x}a{i:x}", 1, 0) for i in range(others)]
        known = list(last.values())
        for one in [sent, *came, *(known[i % len(known)] for i in again)]:
            command = Flush(
                charges,
                now,
                counts=((Bucket(one.at, one.passed),),),
                sender=one.sender,
                seq=one.seq,
                pull=one.passed % 2 == 0,
            )
            assert execute(command) == memory(command)
    window = {start: n for start, n in expected.items() if start > newest - 5 * W}
    state = execute(Read(charges, now)).states[0]
    assert state == memory(Read(charges, now)).states[0]
    held = {b.start: b.passed for b in state.buckets if b.start > newest - 5 * W}
    assert {start: n for start, n in held.items() if n} == window
    plain = {b"head", b"used", b"closed", b"block", b"finished", b"limit"}
    assert all(field in plain or field.isdigit() for field in server.hkeys(charges[0].ring))
