"""MemoryStore is the specification: to the same commands at the same times every store gives the
same replies, field for field, and holds the same rings.

All times are in the commands, and no bucket is shorter than a minute, so that nothing expires by
the server's own clock during a test.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import astuple
from typing import Any

import fakeredis
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from distwindow import Key, Limit
from distwindow.core.charge import Charge
from distwindow.core.key import AnyKey
from distwindow.core.stats import Bucket
from distwindow.protocol.commands import (
    COMMANDS,
    CURRENT_BUCKET,
    Acquire,
    Command,
    Flush,
    Lease,
    Peek,
    Read,
    Refund,
    Reset,
    charges_of,
)
from distwindow.protocol.keys import key_prefix
from distwindow.protocol.replies import split_reply
from distwindow.store.memory import MemoryStore
from tests.unit.stage import T0, Execute, awaiting, blocking, fresh

W = 60_000
START = T0 // W * W

SHAPES = (
    Limit(5, per=60, buckets=1),
    Limit(9, per=60, buckets=1, bound="strict"),
    Limit(8, per=120, buckets=2),
    Limit(6, per=180, buckets=3, bound="strict"),
    Limit(7, per=300, buckets=5),
    Limit(12, per=720, buckets=12),
    Limit(13, per=780, buckets=13, bound="strict"),
    Limit(11, per=780, buckets=13),
    # The largest amounts: sums must stay exact, and be written in plain digits.
    Limit(10**12, per=14_400, buckets=4),
)
LARGE = len(SHAPES) - 1

rings = st.lists(st.integers(0, LARGE), min_size=1, max_size=3, unique=True)
elapsed = st.one_of(
    st.integers(0, 3),
    st.sampled_from([0, 1, W - 1, W, W + 1, 2 * W, 3 * W, 5 * W, 12 * W, 13 * W, 14 * W, 15 * W]),
    st.sampled_from([-1, -W, -2 * W, -5 * W, -13 * W, -14 * W, -15 * W, -400 * W, 400 * W]),
    st.integers(-20 * W, 20 * W),
)
steps = st.tuples(
    st.sampled_from(
        ["acquire"] * 5 + ["lease"] * 2 + ["flush"] * 3 + ["peek", "refund", "read", "reset"]
    ),
    elapsed,
    rings,
    st.integers(1, 6),  # cost
    st.integers(1, 4),  # calls, or how many calls have finished
    st.integers(0, 5),  # response time, or how far back a refund reaches
    st.booleans(),  # store_limit, prefetch or pull
    st.sampled_from([0, 0, 0, 0, -2, -1, 1, 4]),  # how much the limit is raised
)
stories = st.lists(steps, min_size=1, max_size=25)
Step = tuple[str, int, list[int], int, int, int, bool, int]


def charged(key: AnyKey, limits: list[Limit], cost: int) -> tuple[Charge, ...]:
    """No ring twice, as `limits_of` requires: one bucket, strict, has the ring of two, leap."""
    charges = charges_of(key, key_prefix("agree", key), limits, cost)
    return tuple({charge.ring: charge for charge in charges}.values())


def commands_of(story: list[Step], key: str | Key) -> Iterator[Command[Any]]:
    """Yield the commands of a story, each followed by a `Read`."""
    now, past = START, [START]
    for verb, later, which, cost, calls, size, flag, raised in story:
        now = max(0, now + later)
        if which == [LARGE]:
            cost *= 10**11
        limits = [
            Limit(min(10**12, amount + raised), ms / 1000, buckets, bound)
            for amount, ms, buckets, bound in (astuple(SHAPES[i]) for i in which)
        ]
        charges = charged(key, limits, cost)
        if verb == "acquire":
            yield Acquire(charges, now, calls=calls, store_limit=flag)
        elif verb == "peek":
            yield Peek(charges, now)
        elif verb == "lease":
            yield Lease(charges, now, extra=size * calls, prefetch=flag)
        elif verb == "flush":
            yield flush(charges, now, past, cost, calls, size, pull=flag, seq=len(past) + raised)
        elif verb == "refund":
            yield Refund(charges, now, past[-1 - size % len(past)])
        elif verb == "read":
            yield Read(charges, now)
        else:
            yield Reset(charges, now)
        past.append(now)
        yield Read(charges, now)


def flush(
    charges: tuple[Charge, ...],
    now: int,
    past: list[int],
    cost: int,
    calls: int,
    size: int,
    *,
    pull: bool,
    seq: int,
) -> Flush:
    """Return counts of now and of earlier times, of one of three senders or of none."""
    moments = [now, past[-1 - size % len(past)], past[-1 - calls % len(past)], CURRENT_BUCKET][
        :calls
    ]
    seen = [Bucket(t, cost - 1, size, calls - 1, size % 2, size * 3, size) for t in moments]
    counts = tuple(tuple(seen[i % 2 :]) for i in range(len(charges)))
    sender = ["", "a", "0b", "c0ffee"][cost % 4]
    return Flush(charges, now, counts=counts, sender=sender, seq=max(0, seq), pull=pull)


@pytest.fixture(scope="module")
def everywhere(redis_url: str, cluster_url: str, fake_url: str) -> Iterator[dict[str, Execute]]:
    """Yield every store, by name."""
    fake = fakeredis.FakeServer()
    with ExitStack() as stack:
        stores = {
            "redis": blocking(redis_url),
            "redis, awaited": awaiting(redis_url),
            "cluster": blocking(cluster_url),
            "cluster, awaited": awaiting(cluster_url),
            "fakeredis": blocking(fakeredis.FakeRedis(server=fake)),
            "fakeredis, awaited": awaiting(fakeredis.FakeAsyncRedis(server=fake)),
            "fakeredis's server": blocking(fake_url),
        }
        yield {name: stack.enter_context(store) for name, store in stores.items()}


def agree(stores: dict[str, Execute], story: list[Step], key: str | Key) -> None:
    specification = MemoryStore().execute
    # One key for each store, because two of them may use the same server.
    keys = {name: Key(fresh(), "t") if isinstance(key, Key) else fresh() for name in stores}
    commands = {name: commands_of(story, keys[name]) for name in stores}
    for command in commands_of(story, key):
        expected = specification(command)
        for name, execute in stores.items():
            same = next(commands[name])
            assert execute(same) == expected, f"{name} differs on {same}"


LENIENT = settings(deadline=None, suppress_health_check=list(HealthCheck), print_blob=True)


@pytest.mark.event_loops
@settings(LENIENT, max_examples=30)
@given(story=stories)
def test_every_store_answers_as_the_specification(
    everywhere: dict[str, Execute], story: list[Step]
) -> None:
    agree(everywhere, story, fresh())


@pytest.mark.event_loops
@settings(LENIENT, max_examples=20)
@given(story=st.lists(steps, min_size=25, max_size=60))
def test_long_stories_agree(everywhere: dict[str, Execute], story: list[Step]) -> None:
    agree({"redis": everywhere["redis"]}, story, Key(fresh(), "t"))


@pytest.mark.event_loops
@pytest.mark.slow
@pytest.mark.timeout(900)
@settings(LENIENT, max_examples=200)
@given(story=stories)
def test_every_store_answers_as_the_specification_at_length(
    everywhere: dict[str, Execute], story: list[Step]
) -> None:
    agree(everywhere, story, Key(fresh(), "t"))


@pytest.mark.event_loops
@pytest.mark.slow
@pytest.mark.timeout(900)
@settings(LENIENT, max_examples=1500)
@given(story=stories)
def test_redis_answers_as_the_specification_at_length(
    everywhere: dict[str, Execute], story: list[Step]
) -> None:
    agree({"redis": everywhere["redis"]}, story, fresh())


# -- one ring under a changing limit, where acquire may repeat a stored refusal ------------------

one_ring = st.tuples(
    st.sampled_from(["acquire"] * 8 + ["peek", "flush", "lease", "refund"]),
    st.sampled_from([0, 0, 0, 0, 0, 1, 7, W - 1, W, 2 * W]),
    st.just([4]),
    st.integers(1, 9),
    st.sampled_from([1, 1, 1, 2, 3]),
    st.integers(0, 5),
    st.sampled_from([False, False, False, True]),
    st.sampled_from([0, 0, 0, 0, 0, -3, -1, 1, 5]),
)


@pytest.mark.event_loops
@settings(LENIENT, max_examples=60)
@given(story=st.lists(one_ring, min_size=5, max_size=40))
def test_refusals_in_a_full_bucket_are_answered_as_the_specification(
    everywhere: dict[str, Execute], story: list[Step]
) -> None:
    agree({"redis": everywhere["redis"]}, story, fresh())


@pytest.mark.event_loops
@pytest.mark.slow
@pytest.mark.timeout(900)
@settings(LENIENT, max_examples=1500)
@given(story=st.lists(one_ring, min_size=5, max_size=40))
def test_refusals_in_a_full_bucket_at_length(
    everywhere: dict[str, Execute], story: list[Step]
) -> None:
    agree({"redis": everywhere["redis"]}, story, fresh())


# -- shared calls -------------------------------------------------------------------------------


@settings(LENIENT, max_examples=60)
@given(
    which=rings,
    used=st.integers(0, 12),
    cost=st.integers(1, 5),
    calls=st.integers(1, 9),
    set_back_ms=st.sampled_from([0, 0, 1, W - 1, W, 3 * W]),
)
@example(which=[4], used=0, cost=1, calls=9, set_back_ms=0)
@example(which=[4], used=3, cost=1, calls=9, set_back_ms=W)
def test_one_call_for_many_has_the_reply_that_each_would_have_got(
    which: list[int], used: int, cost: int, calls: int, set_back_ms: int
) -> None:
    limits = [SHAPES[i] for i in which]
    charges = charged("k", limits, cost)
    before = [Acquire(charged("k", limits, 1), START + set_back_ms)] * used
    alone, shared = MemoryStore().execute, MemoryStore().execute
    for command in before:
        assert alone(command) == shared(command)
    one_by_one = [alone(Acquire(charges, START)) for _ in range(calls)]
    reply = shared(Acquire(charges, START, calls=calls))
    costs = [charge.cost for charge in charges]
    assert split_reply(reply, calls, costs) == one_by_one
    assert alone(Read(charges, START)) == shared(Read(charges, START))


def test_stories_use_every_command() -> None:
    """A new command has to be added to the stories, too."""
    assert set(COMMANDS) == {"acquire", "lease", "peek", "flush", "refund", "read", "reset"}
