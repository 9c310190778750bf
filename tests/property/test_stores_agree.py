"""MemoryStore is the specification: given the same commands at the same times, every store returns
the same replies, field for field, and holds the same ring. Here hypothesis draws the histories of
`distwindow.testing`, and shrinks them.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack

import fakeredis
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from distwindow import Key
from distwindow.protocol.commands import COMMANDS, Acquire, Read
from distwindow.protocol.replies import split_reply
from distwindow.store.memory import MemoryStore
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
from tests.unit.clock_and_stores import Execute, awaiting, blocking, fresh_key

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
def everywhere(redis_url: str, cluster_url: str, fake_url: str) -> Iterator[dict[str, Execute]]:
    """Every store there is, by name."""
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
@settings(LENIENT, max_examples=200)
@given(history=histories)
def test_every_store_answers_as_the_specification_at_length(
    everywhere: dict[str, Execute], history: list[HistoryStep]
) -> None:
    agree(everywhere, history, Key(fresh_key(), "t"))


@pytest.mark.slow
@pytest.mark.timeout(900)
@settings(LENIENT, max_examples=1500)
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
@settings(LENIENT, max_examples=1500)
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
