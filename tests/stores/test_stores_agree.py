"""MemoryStore is the specification: given the same commands at the same times, every store returns
the same replies, field for field, and holds the same. Here hypothesis draws the histories of
`distwindow.testing`, for each feature.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from random import Random
from typing import Any

import fakeredis
import pytest
from hypothesis import HealthCheck, Phase, example, given, settings
from hypothesis import strategies as st

from distwindow import Limit
from distwindow.breaker.commands import (
    BreakerCommand,
    BreakerFlush,
    BreakerProbe,
    ProbeAction,
    breaker_name,
)
from distwindow.breaker.record import STATES, CallCounts
from distwindow.concurrency.commands import PLACE_MS, HoldReply
from distwindow.ring.command import Command, script_names
from distwindow.ring.commands import Acquire, Read, charges_of
from distwindow.ring.key import ring_name_prefix
from distwindow.ring.replies import split_reply
from distwindow.shaping.commands import AcquireShaped, PeekShaped, ReadShaped
from distwindow.shaping.shaping import shaping_of
from distwindow.stores.memory import MemoryStore
from distwindow.testing.conformance import compare_replies
from distwindow.testing.histories import (
    BREAKER_RULES,
    FEATURES,
    LARGEST_LIMIT_INDEX,
    LIMITS,
    MINUTE_MS,
    SLOT_TTLS_MS,
    START_MS,
    Feature,
    HistoryStep,
    SlotStep,
    charges_for,
    limits_together,
)
from tests.clock_and_stores import Execute, awaiting, blocking, fresh_key

W = MINUTE_MS

rings = st.lists(st.integers(0, LARGEST_LIMIT_INDEX), min_size=1, max_size=3, unique=True)
TOGETHER = limits_together()
EVERY_FEATURE = pytest.mark.parametrize(
    "feature", [pytest.param(f, id=name) for name, f in {**FEATURES, "together": TOGETHER}.items()]
)


def drawn_histories(feature: Feature, max_length: int) -> st.SearchStrategy[list[Any]]:
    """Return a strategy for the histories of this feature."""
    randoms = st.randoms(use_true_random=False)
    return st.builds(feature.random_history, randoms, st.integers(1, max_length))


@pytest.fixture(scope="module")
def everywhere(examples_url: str, cluster_url: str) -> Iterator[dict[str, Execute]]:
    """Every store there is, by name. (fakeredis's server is fakeredis behind a port, as any is.)"""
    fake = fakeredis.FakeServer()
    with ExitStack() as stack:
        stores = {
            "redis": blocking(examples_url),
            "redis, awaited": awaiting(examples_url),
            "cluster": blocking(cluster_url),
            "cluster, awaited": awaiting(cluster_url),
            "fakeredis": blocking(fakeredis.FakeRedis(server=fake)),
            "fakeredis, awaited": awaiting(fakeredis.FakeAsyncRedis(server=fake)),
        }
        yield {name: stack.enter_context(store) for name, store in stores.items()}


@pytest.fixture(scope="module")
def redis_alone(examples_url: str) -> Iterator[dict[str, Execute]]:
    with blocking(examples_url) as store:
        yield {"redis": store}


def agree(stores: dict[str, Execute], feature: Feature, history: Sequence[Any]) -> None:
    for name, execute in stores.items():
        compare_replies(execute, feature, history, name)


LENIENT = settings(
    deadline=None,
    suppress_health_check=list(HealthCheck),
    print_blob=True,
    # `compare_replies` shortens a history by itself: both together take minutes for one failure.
    phases=[phase for phase in Phase if phase not in (Phase.shrink, Phase.explain)],
)


@EVERY_FEATURE
@settings(LENIENT, max_examples=15)
@given(data=st.data())
def test_every_store_answers_as_the_specification(
    everywhere: dict[str, Execute], feature: Feature, data: st.DataObject
) -> None:
    agree(everywhere, feature, data.draw(drawn_histories(feature, 25)))


@pytest.mark.slow
@EVERY_FEATURE
@settings(LENIENT, max_examples=30)
@given(data=st.data())
def test_long_histories_agree(
    redis_alone: dict[str, Execute], feature: Feature, data: st.DataObject
) -> None:
    agree(redis_alone, feature, data.draw(drawn_histories(feature, 60)))


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


@settings(LENIENT, max_examples=100)
@given(history=st.lists(one_ring, min_size=5, max_size=40))
def test_refusals_in_a_full_bucket_are_answered_as_the_specification(
    redis_alone: dict[str, Execute], history: list[HistoryStep]
) -> None:
    agree(redis_alone, TOGETHER, history)


# -- shared calls -------------------------------------------------------------------------------


@settings(LENIENT, max_examples=30)
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
    """A script that is added has to be added to the histories."""
    of_features = [name for feature in FEATURES.values() for name in feature.scripts]
    assert sorted(of_features) == sorted(script_names())
    for feature in FEATURES.values():
        random = Random(0)
        drawn = {
            command.script
            for _ in range(20)
            for command in feature.commands_of(feature.random_history(random, 40), fresh_key())
        }
        assert feature.scripts <= drawn


# -- buckets, slots and probes at the edges ------------------------------------------------------


def test_a_call_at_the_end_of_a_bucket_is_counted_in_the_next(
    redis_alone: dict[str, Execute],
) -> None:
    limit = Limit(9, per=300, buckets=5)
    charges = charges_of("k", ring_name_prefix("edges", fresh_key()), [limit], 1)
    for execute in (MemoryStore().execute, redis_alone["redis"]):
        for at in (0, W - 1, W):
            assert execute(Acquire(charges, START_MS + at)).admitted
        (state,) = execute(Read(charges, START_MS + W)).states
        assert [(one.start, one.passed) for one in state.buckets] == [
            (START_MS, 2), (START_MS + W, 1),
        ]  # fmt: skip


@pytest.mark.parametrize("elapsed_ms", [SLOT_TTLS_MS[0], PLACE_MS])
def test_what_ends_now_has_ended(everywhere: dict[str, Execute], elapsed_ms: int) -> None:
    """A holder at its deadline, and the places of a process that has told nothing for so long."""
    first, second = SlotStep("hold", 0, 1, [0], "", ()), SlotStep("hold", 0, 1, [1], "new", ())
    last = SlotStep("hold", elapsed_ms, 1, [2], "", ())
    agree(everywhere, FEATURES["slots"], [first, second, last])


def test_the_head_that_has_waited_longest_passes_the_others(everywhere: dict[str, Execute]) -> None:
    """Otherwise each of two heads would wait for the other, beside a free slot."""
    hold = SlotStep("hold", 1, 1, [0], "head", ())
    waits = [
        hold._replace(holders=[2], waited_ms=(900,)),
        hold._replace(holders=[1], waited_ms=(500,)),
    ]
    history = [hold, *waits, hold._replace(name="free"), waits[1], waits[0]]
    agree(everywhere, FEATURES["slots"], history)
    execute = MemoryStore().execute
    replies = [execute(command) for command in FEATURES["slots"].commands_of(history, "key")]
    assert [one.granted for one in replies if isinstance(one, HoldReply)] == [
        True, False, False, False, True,
    ]  # fmt: skip


def test_counts_of_an_earlier_epoch_open_no_breaker(redis_alone: dict[str, Execute]) -> None:
    rule, now = BREAKER_RULES[0], START_MS
    name, later = breaker_name("conformance", fresh_key(), rule), now + rule.open_ms

    def flush(at: int) -> BreakerCommand:
        counts = (CallCounts(0, at, 5, 5),)
        return BreakerFlush((), at, rule=rule, name=name, counts=counts)

    def probe(action: ProbeAction) -> BreakerCommand:
        return BreakerProbe((), later, rule=rule, name=name, action=action, probe_id="a.1")

    for execute in (MemoryStore().execute, redis_alone["redis"]):
        steps = (flush(now), probe("take"), probe("succeed"), flush(later))
        states = [STATES[execute(command).state] for command in steps]
        assert states == ["open", "half_open", "closed", "closed"]


def test_of_two_probes_one_that_has_succeeded_leaves_one(redis_alone: dict[str, Execute]) -> None:
    """So it is also where other processes ask for the next ones."""
    rule, now = BREAKER_RULES[1], START_MS
    name = breaker_name("conformance", fresh_key(), rule)
    steps_of_probes: list[tuple[ProbeAction, str]] = [
        ("take", "a.1"), ("succeed", "a.1"), ("take", "b.1"), ("take", "c.1"),
    ]  # fmt: skip
    for execute in (MemoryStore().execute, redis_alone["redis"]):
        execute(BreakerFlush((), now, rule=rule, name=name, counts=(CallCounts(0, now, 1, 1),)))

        done = [
            execute(
                BreakerProbe((), now + W, rule=rule, name=name, action=action, probe_id=probe_id)
            ).done
            for action, probe_id in steps_of_probes
        ]
        assert done == [True, True, True, False]


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


@settings(LENIENT, max_examples=100)
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
