"""MemoryStore is the specification of circuit breakers: given the same commands at the same times,
every store returns the same replies, field for field.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from typing import NamedTuple

import fakeredis
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from distwindow import Key
from distwindow.breaker.commands import (
    PROBE_ACTIONS,
    BreakerCommand,
    BreakerFlush,
    BreakerProbe,
    ProbeAction,
    breaker_name,
)
from distwindow.breaker.record import CallCounts
from distwindow.breaker.rules import BreakerRule, ErrorCount, ErrorRatio, SlowRatio
from distwindow.stores.memory import MemoryStore
from tests.clock_and_stores import T0, Execute, awaiting, blocking, fresh_key

W = 60_000
RULES: tuple[BreakerRule, ...] = (
    ErrorRatio(0.5, window=300, min_calls=3, open_for=120, buckets=5, probe_timeout=60),
    ErrorRatio(0.1, window=60, min_calls=1, open_for=60, buckets=1, probes=2),
    SlowRatio(max_rt=0.2, ratio=1 / 3, window=720, min_calls=2, open_for=180, buckets=12, probes=3),
    ErrorCount(4, window=120, open_for=60, buckets=2, probe_timeout=120),
    ErrorCount(10**12, window=600, open_for=1, buckets=60),
)


class Step(NamedTuple):
    """One command, as numbers that hypothesis can draw."""

    elapsed_ms: int
    is_flush: bool
    calls: int
    bad: int
    back: int
    """How far back in the history the epoch of a flush, and its bucket, are."""
    sender: str
    seq: int
    action: int
    probe: int
    known_back: int


steps = st.builds(
    Step,
    elapsed_ms=st.one_of(
        st.sampled_from([0, 0, 1, 999, W - 1, W, W + 1, 2 * W, 3 * W, 5 * W, 12 * W, 75 * W]),
        st.sampled_from([-1, -W, -3 * W, -13 * W, -400 * W, 400 * W]),
        st.integers(0, 4 * W),
    ),
    is_flush=st.booleans(),
    calls=st.integers(0, 6),
    bad=st.integers(0, 6),
    back=st.sampled_from([0, 0, 0, 0, 1, 1, 2, 3]),
    sender=st.sampled_from(["", "", "a", "0b", "c0ffee"]),
    seq=st.integers(0, 12),
    action=st.sampled_from([0, 0, 0, 1, 1, 2, 3, 4, 4]),
    probe=st.integers(0, 3),
)
histories = st.lists(steps, min_size=1, max_size=40)


def commands(history: list[Step], rule: BreakerRule, key: str | Key) -> Iterator[BreakerCommand]:
    """Yield the commands of a history. They depend on the replies of a MemoryStore of their own."""
    now, store, seen = T0 // W * W, MemoryStore(), [(0, T0 // W * W)]
    name = breaker_name("conformance", key, rule)
    restarts = 0
    for step in history:
        now = max(0, now + step.elapsed_ms)
        # Redis draws at random which expired sender records it deletes, and a clock that is set
        # back makes one valid again: senders send nothing of before again after that.
        restarts += step.elapsed_ms < 0
        epoch, start = seen[-1 - step.back % len(seen)]
        command: BreakerCommand
        if step.is_flush:
            ended = [(epoch, start), (seen[-1][0], now), (seen[-1][0], 10**13)][: step.calls % 4]
            counts = tuple(CallCounts(*at, step.calls, min(step.bad, step.calls)) for at in ended)
            command = BreakerFlush(
                (), now, rule=rule, name=name, counts=counts,
                sender=step.sender and f"{step.sender}{restarts:x}", seq=step.seq,
            )  # fmt: skip
        else:
            command = BreakerProbe(
                (), now, rule=rule, name=name,
                action=PROBE_ACTIONS[step.action], probe_id=f"a.{step.probe}",
            )  # fmt: skip
        seen.append((store.execute(command).epoch, now))
        yield command


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


def agree(stores: dict[str, Execute], history: list[Step], rule: BreakerRule) -> None:
    specification = MemoryStore().execute
    of_store = {name: commands(history, rule, fresh_key()) for name in stores}
    for command in commands(history, rule, fresh_key()):
        expected = specification(command)
        for name, execute in stores.items():
            same = next(of_store[name])
            assert execute(same) == expected, f"{name} differs on {same}"


LENIENT = settings(deadline=None, suppress_health_check=list(HealthCheck), print_blob=True)


@pytest.mark.event_loops
@settings(LENIENT, max_examples=30)
@given(history=histories, rule=st.sampled_from(RULES))
def test_every_store_answers_as_the_specification(
    everywhere: dict[str, Execute], history: list[Step], rule: BreakerRule
) -> None:
    agree(everywhere, history, rule)


@settings(LENIENT, max_examples=100)
@given(history=histories, rule=st.sampled_from(RULES))
def test_redis_answers_as_the_specification(
    redis_alone: dict[str, Execute], history: list[Step], rule: BreakerRule
) -> None:
    agree(redis_alone, history, rule)


@pytest.mark.slow
@pytest.mark.timeout(900)
@settings(LENIENT, max_examples=500)
@given(history=histories, rule=st.sampled_from(RULES))
def test_redis_answers_as_the_specification_at_length(
    redis_alone: dict[str, Execute], history: list[Step], rule: BreakerRule
) -> None:
    agree(redis_alone, history, rule)


def test_of_two_probes_one_that_has_succeeded_leaves_one(redis_alone: dict[str, Execute]) -> None:
    """So it is also where other processes ask for the next ones."""
    rule, now = RULES[1], T0 // W * W
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
