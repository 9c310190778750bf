"""MemoryStore is the specification of minute views: given the same commands at the same times,
every store returns the same replies.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any, NamedTuple

import fakeredis
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from distwindow import Key
from distwindow.minute.commands import ViewFlush, ViewRead, views_name
from distwindow.minute.view import ALL_ORIGINS
from distwindow.options import OTHER_ORIGINS
from distwindow.ring.command import Command
from distwindow.ring.stats import Bucket
from distwindow.stores.memory import MemoryStore
from tests.clock_and_stores import T0, Execute, awaiting, blocking, fresh_key

ORIGINS = (ALL_ORIGINS, ALL_ORIGINS, "a", "b", "c", "{d}", "ü\x00", OTHER_ORIGINS)


class Counted(NamedTuple):
    """What one origin did in one second."""

    origin: str
    back_s: int
    """How many seconds before the flush; negative: after it."""
    passed: int
    blocked: int
    ended: int
    """How many calls ended, half of them with an error."""
    rt_ms: int


class Step(NamedTuple):
    """One flush, as numbers that hypothesis can draw, and the read after it."""

    elapsed_ms: int
    counted: list[Counted]
    sender: str
    seq: int
    max_origins: int


counts = st.builds(
    Counted,
    origin=st.sampled_from(ORIGINS),
    back_s=st.one_of(st.integers(-2, 4), st.sampled_from([58, 59, 60, 61])),
    passed=st.integers(0, 5),
    blocked=st.integers(0, 3),
    ended=st.integers(0, 4),
    rt_ms=st.integers(0, 90),
)
steps = st.builds(
    Step,
    elapsed_ms=st.one_of(
        st.sampled_from([0, 1, 999, 1000, 1001, 30_000, 59_000, 60_000, 61_000, 150_000]),
        st.sampled_from([-1, -1000, -59_000, -60_000, -61_000, -200_000]),
        st.integers(0, 5000),
    ),
    counted=st.lists(counts, max_size=6),
    sender=st.sampled_from(["", "", "a", "0b", "c0ffee"]),
    seq=st.integers(0, 12),
    max_origins=st.sampled_from([1, 2, 2, 3, 1000]),
)
histories = st.lists(steps, min_size=1, max_size=30)


def commands(history: list[Step], key: str | Key) -> Iterator[Command[Any]]:
    now, name, restarts = T0, views_name("conformance", key), 0
    for step in history:
        now = max(100_000, now + step.elapsed_ms)
        # Where the clock was set back by a minute, senders send nothing of before again: when an
        # expired record is deleted, and whether it then becomes valid again, is up to a store.
        restarts += step.elapsed_ms <= -60_000
        by_origin: dict[str, list[Bucket]] = {}
        for each in step.counted:
            bucket = Bucket(
                now // 1000 * 1000 - each.back_s * 1000, each.passed, each.blocked,
                each.ended - each.ended // 2, each.ended // 2, each.ended * each.rt_ms,
                each.rt_ms if each.ended else None,
            )  # fmt: skip
            by_origin.setdefault(each.origin, []).append(bucket)
        counted = tuple((origin, tuple(buckets)) for origin, buckets in by_origin.items())
        yield ViewFlush(
            (), now, name=name, counts=counted or ((ALL_ORIGINS, ()),),
            sender=step.sender and f"{step.sender}{restarts:x}", seq=step.seq,
            max_origins=step.max_origins,
        )  # fmt: skip
        yield ViewRead((), now, name=name)


@pytest.fixture(scope="module")
def everywhere(examples_url: str, cluster_url: str, fake_url: str) -> Iterator[dict[str, Execute]]:
    """Every store there is, by name."""
    fake = fakeredis.FakeServer()
    with ExitStack() as stack:
        stores = {
            "redis": blocking(examples_url),
            "cluster": blocking(cluster_url),
            "cluster, awaited": awaiting(cluster_url),
            "fakeredis": blocking(fakeredis.FakeRedis(server=fake)),
            "fakeredis's server": blocking(fake_url),
        }
        yield {name: stack.enter_context(store) for name, store in stores.items()}


@pytest.fixture(scope="module")
def redis_alone(examples_url: str) -> Iterator[dict[str, Execute]]:
    with blocking(examples_url) as store:
        yield {"redis": store}


def agree(stores: dict[str, Execute], history: list[Step]) -> None:
    specification: Execute = MemoryStore().execute
    of_store = {store: commands(history, fresh_key()) for store in stores}
    for command in commands(history, fresh_key()):
        expected = specification(command)
        for name, execute in stores.items():
            same = next(of_store[name])
            assert execute(same) == expected, f"{name} differs on {same}"


LENIENT = settings(deadline=None, suppress_health_check=list(HealthCheck), print_blob=True)


@pytest.mark.event_loops
@settings(LENIENT, max_examples=30)
@given(history=histories)
def test_every_store_answers_as_the_specification(
    everywhere: dict[str, Execute], history: list[Step]
) -> None:
    agree(everywhere, history)


@settings(LENIENT, max_examples=100)
@given(history=histories)
def test_redis_answers_as_the_specification(
    redis_alone: dict[str, Execute], history: list[Step]
) -> None:
    agree(redis_alone, history)


@pytest.mark.slow
@pytest.mark.timeout(900)
@settings(LENIENT, max_examples=400)
@given(history=histories)
def test_redis_answers_as_the_specification_at_length(
    redis_alone: dict[str, Execute], history: list[Step]
) -> None:
    agree(redis_alone, history)


@settings(LENIENT, max_examples=100)
@given(history=histories)
def test_the_view_of_all_entries_is_the_sum_of_all_views(history: list[Step]) -> None:
    """Of what has an origin; entries without one are in the view of all alone. Time goes on here: a
    view drops its oldest second when it begins another, so right after the clock was set back, one
    view may show a second more than another.
    """
    history = [step._replace(elapsed_ms=abs(step.elapsed_ms)) for step in history]
    store: Execute = MemoryStore().execute
    without_origin = 0
    for command in commands(history, "k"):
        reply = store(command)
        if isinstance(command, ViewFlush):
            without_origin += any(bs for origin, bs in command.counts if origin == ALL_ORIGINS)
            continue
        views = dict(reply.views)
        total = {b.start: b for b in views.pop(ALL_ORIGINS, ())}
        for start in {b.start for buckets in views.values() for b in buckets}:
            summed = sum(b.passed for bs in views.values() for b in bs if b.start == start)
            assert summed <= total[start].passed
            if not without_origin:
                assert summed == total[start].passed
