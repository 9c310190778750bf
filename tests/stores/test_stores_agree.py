"""MemoryStore is the specification: given the same commands at the same times, every store returns
the same replies, field for field, and holds the same ring. Here hypothesis draws the histories of
`distwindow.testing`, and shrinks them.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import fakeredis
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from distwindow import Key, Limit
from distwindow.ring.command import Command
from distwindow.ring.commands import Acquire, Read
from distwindow.ring.replies import split_reply
from distwindow.shaping.commands import AcquireShaped, PeekShaped, ReadShaped
from distwindow.shaping.shaping import shaping_of
from distwindow.stores.memory import MemoryStore
from distwindow.testing.histories import (
    COMMAND_NAMES,
    LARGEST_LIMIT_INDEX,
    LIMITS,
    MINUTE_MS,
    START_MS,
    HistoryStep,
    charges_for,
    commands_of,
)
from tests.clock_and_stores import Execute, awaiting, blocking, fresh_key
from tests.lua.target import COMMANDS

W = MINUTE_MS

rings = st.lists(st.integers(0, LARGEST_LIMIT_INDEX), min_size=1, max_size=3, unique=True)
elapsed = st.one_of(
    st.integers(0, 3),
    st.sampled_from([0, 1, W - 1, W, W + 1, 2 * W, 3 * W, 5 * W, 12 * W, 13 * W, 14 * W, 15 * W]),
    st.sampled_from([-1, -W, -2 * W, -5 * W, -13 * W, -14 * W, -15 * W, -400 * W, 400 * W]),
    st.integers(-20 * W, 20 * W),
)
steps = st.builds(
    HistoryStep,
    name=st.sampled_from(COMMAND_NAMES),
    elapsed_ms=elapsed,
    limits=rings,
    cost=st.integers(1, 6),
    calls=st.integers(1, 4),
    size=st.integers(0, 5),
    flag=st.booleans(),
    amount_change=st.sampled_from([0, 0, 0, 0, -2, -1, 1, 4]),
)
histories = st.lists(steps, min_size=1, max_size=25)


@pytest.fixture(scope="module")
def everywhere(examples_url: str, cluster_url: str, fake_url: str) -> Iterator[dict[str, Execute]]:
    """Every store there is, by name."""
    fake = fakeredis.FakeServer()
    with ExitStack() as stack:
        stores = {
            "redis": blocking(examples_url),
            "redis, awaited": awaiting(examples_url),
            "cluster": blocking(cluster_url),
            "cluster, awaited": awaiting(cluster_url),
            "fakeredis": blocking(fakeredis.FakeRedis(server=fake)),
            "fakeredis, awaited": awaiting(fakeredis.FakeAsyncRedis(server=fake)),
            "fakeredis's server": blocking(fake_url),
        }
        yield {name: stack.enter_context(store) for name, store in stores.items()}


def agree(stores: dict[str, Execute], history: list[HistoryStep], key: str | Key) -> None:
    specification = MemoryStore().execute
    # One name for each store, as two of them may be clients of one server.
    keys = {name: Key(fresh_key(), "t") if isinstance(key, Key) else fresh_key() for name in stores}
    of_store = {name: commands_of(history, keys[name]) for name in stores}
    for command in commands_of(history, key):
        expected = specification(command)
        for name, execute in stores.items():
            same = next(of_store[name])
            assert execute(same) == expected, f"{name} differs on {same}"


LENIENT = settings(deadline=None, suppress_health_check=list(HealthCheck), print_blob=True)


@pytest.mark.event_loops
@settings(LENIENT, max_examples=30)
@given(history=histories)
def test_every_store_answers_as_the_specification(
    everywhere: dict[str, Execute], history: list[HistoryStep]
) -> None:
    agree(everywhere, history, fresh_key())


@settings(LENIENT, max_examples=20)
@given(history=st.lists(steps, min_size=25, max_size=60))
def test_long_histories_agree(everywhere: dict[str, Execute], history: list[HistoryStep]) -> None:
    agree({"redis": everywhere["redis"]}, history, Key(fresh_key(), "t"))


@pytest.mark.event_loops
@pytest.mark.slow
@pytest.mark.timeout(900)
@settings(LENIENT, max_examples=100)
@given(history=histories)
def test_every_store_answers_as_the_specification_at_length(
    everywhere: dict[str, Execute], history: list[HistoryStep]
) -> None:
    agree(everywhere, history, Key(fresh_key(), "t"))


@pytest.mark.slow
@pytest.mark.timeout(900)
@settings(LENIENT, max_examples=500)
@given(history=histories)
def test_redis_answers_as_the_specification_at_length(
    everywhere: dict[str, Execute], history: list[HistoryStep]
) -> None:
    agree({"redis": everywhere["redis"]}, history, fresh_key())


# -- one ring under a changing limit, where acquire may repeat a stored refusal ------------------

one_ring = st.builds(
    HistoryStep,
    name=st.sampled_from(["acquire"] * 8 + ["peek", "flush", "lease", "refund"]),
    elapsed_ms=st.sampled_from([0, 0, 0, 0, 0, 1, 7, W - 1, W, 2 * W]),
    limits=st.just([4]),
    cost=st.integers(1, 9),
    calls=st.sampled_from([1, 1, 1, 2, 3]),
    size=st.integers(0, 5),
    flag=st.sampled_from([False, False, False, True]),
    amount_change=st.sampled_from([0, 0, 0, 0, 0, -3, -1, 1, 5]),
)


@settings(LENIENT, max_examples=60)
@given(history=st.lists(one_ring, min_size=5, max_size=40))
def test_refusals_in_a_full_bucket_are_answered_as_the_specification(
    everywhere: dict[str, Execute], history: list[HistoryStep]
) -> None:
    agree({"redis": everywhere["redis"]}, history, fresh_key())


@pytest.mark.slow
@pytest.mark.timeout(900)
@settings(LENIENT, max_examples=500)
@given(history=st.lists(one_ring, min_size=5, max_size=40))
def test_refusals_in_a_full_bucket_at_length(
    everywhere: dict[str, Execute], history: list[HistoryStep]
) -> None:
    agree({"redis": everywhere["redis"]}, history, fresh_key())


# -- shared calls -------------------------------------------------------------------------------


@settings(LENIENT, max_examples=60)
@given(
    which=rings,
    used=st.integers(0, 12),
    cost=st.integers(1, 5),
    times=st.integers(1, 9),
    set_back_ms=st.sampled_from([0, 0, 1, W - 1, W, 3 * W]),
)
@example(which=[4], used=0, cost=1, times=9, set_back_ms=0)
@example(which=[4], used=3, cost=1, times=9, set_back_ms=W)
def test_one_call_for_many_has_the_reply_that_each_would_have_got(
    which: list[int], used: int, cost: int, times: int, set_back_ms: int
) -> None:
    limits = [LIMITS[i] for i in which]
    charges = charges_for("k", limits, cost)
    before = [Acquire(charges_for("k", limits, 1), START_MS + set_back_ms)] * used
    alone, shared = MemoryStore().execute, MemoryStore().execute
    for command in before:
        assert alone(command) == shared(command)
    one_by_one = [alone(Acquire(charges, START_MS)) for _ in range(times)]
    reply = shared(Acquire(charges, START_MS, calls=times))
    costs = [charge.cost for charge in charges]
    assert split_reply(reply, times, costs) == one_by_one
    assert alone(Read(charges, START_MS)) == shared(Read(charges, START_MS))


def test_histories_use_every_command() -> None:
    """A command that is added has to be added to the histories."""
    assert set(COMMANDS) == set(COMMAND_NAMES)


# -- limits that are paced or warm up, at high rates and in short times -------------------------

SHAPED = [
    Limit("420000/minute warmup 10m paced 3s"),
    Limit("10000000/day warmup 24h paced 1m"),
    Limit("9999991/2 minutes paced 10ms"),
    Limit("7/minute strict cold factor 7 warmup 5m paced 2m"),
    Limit("100/minute warmup 3m"),
    Limit("30011/minute strict cold factor 2 warmup 61s"),
    Limit("90/minute 1 buckets cold factor 9 warmup 10m"),
    Limit("50/minute 2 buckets"),
]
shaped_call = st.tuples(
    st.sampled_from(["acquire", "acquire", "acquire", "acquire", "peek", "read"]),
    st.one_of(st.integers(0, 40), st.integers(0, 2 * W), st.sampled_from([W, 5 * W, -1, -W])),
    st.lists(st.integers(0, len(SHAPED) - 1), min_size=1, max_size=3, unique=True),
    st.sampled_from([1, 1, 2, 7, 1000, 10**7]),
)


def shaped_commands(
    calls: list[tuple[str, int, list[int], int]], key: str
) -> Iterator[Command[Any]]:
    """Yield the commands of these calls. A cost is cut to what the limits can admit."""
    now = START_MS
    for name, elapsed_ms, which, asked in calls:
        now += elapsed_ms
        limits = [SHAPED[i] for i in which]
        cost = min([asked, *[math.floor(shaping_of(x, None).coldest_rate()) for x in limits]])
        charges = charges_for(key, limits, cost)
        if name == "acquire":
            yield AcquireShaped(charges, now)
        elif name == "peek":
            yield PeekShaped(charges, now)
        else:
            yield ReadShaped(charges, now)


@settings(LENIENT, max_examples=60)
@given(calls=st.lists(shaped_call, min_size=5, max_size=60))
def test_shaped_calls_are_answered_as_the_specification(
    everywhere: dict[str, Execute], calls: list[tuple[str, int, list[int], int]]
) -> None:
    specification, keys = MemoryStore().execute, [fresh_key(), fresh_key()]
    executes = [everywhere["redis"], everywhere["fakeredis"]]
    of_stores = [shaped_commands(calls, key) for key in keys]
    for command in shaped_commands(calls, fresh_key()):
        expected = specification(command)
        for execute, commands in zip(executes, of_stores, strict=True):
            same = next(commands)
            assert execute(same) == expected, same


@pytest.mark.slow
@pytest.mark.timeout(900)
@settings(LENIENT, max_examples=500)
@given(calls=st.lists(shaped_call, min_size=5, max_size=60))
def test_shaped_calls_at_length(
    everywhere: dict[str, Execute], calls: list[tuple[str, int, list[int], int]]
) -> None:
    specification, key = MemoryStore().execute, fresh_key()
    same = shaped_commands(calls, key)
    for command in shaped_commands(calls, fresh_key()):
        assert everywhere["redis"](next(same)) == specification(command), command
