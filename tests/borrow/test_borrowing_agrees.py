"""The scripts agree with `MemoryStore` on rings with reservations: histories of full windows, in
which every command meets permits that are reserved in coming buckets.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from random import Random

import fakeredis
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from distwindow.borrow.commands import BorrowReply
from distwindow.stores.memory import MemoryStore
from distwindow.testing.histories import (
    LIMITS,
    MINUTE_MS,
    HistoryStep,
    commands_of,
    random_history,
)
from tests.clock_and_stores import Execute, blocking, fresh_key

pytestmark = pytest.mark.slow

W = MINUTE_MS
LENIENT = settings(deadline=None, suppress_health_check=list(HealthCheck), print_blob=True)
COMMANDS = [*["acquire"] * 4, *["borrow"] * 6, *["refund"] * 2, "flush", "lease", "peek"]
ELAPSED = [0, 0, 0, 1, W - 1, W, W + 1, 2 * W, 3 * W, 5 * W, -W]


def full_history(seed: int) -> list[HistoryStep]:
    """Return a history of mostly one ring, of which most windows are full."""
    random = Random(seed)
    ring = [random.randrange(len(LIMITS))]
    return [
        step._replace(
            name=random.choice(COMMANDS),
            limits=ring if seed % 3 else step.limits,
            elapsed_ms=random.choice([*ELAPSED, step.elapsed_ms]),
        )
        for step in random_history(seed)
    ]


histories = st.builds(
    lambda seed, dropped: [s for i, s in enumerate(full_history(seed)) if i not in dropped],
    st.integers(0, 2**32),
    st.sets(st.integers(0, 60), max_size=60),
)


@pytest.fixture(scope="module")
def stores(examples_url: str, cluster_url: str) -> Iterator[dict[str, Execute]]:
    fake = fakeredis.FakeServer()
    with ExitStack() as stack:
        opened = {
            "redis": blocking(examples_url),
            "cluster": blocking(cluster_url),
            "fakeredis": blocking(fakeredis.FakeRedis(server=fake)),
        }
        yield {name: stack.enter_context(store) for name, store in opened.items()}


def agree(stores: dict[str, Execute], history: list[HistoryStep]) -> int:
    """Compare all replies. Return how many calls have borrowed."""
    specification, borrowed = MemoryStore().execute, 0
    of_store = {name: commands_of(history, fresh_key()) for name in stores}
    for command in commands_of(history, "key"):
        expected = specification(command)
        borrowed += isinstance(expected, BorrowReply) and expected.wait_ms > 0
        for name, execute in stores.items():
            same = next(of_store[name])
            assert execute(same) == expected, f"{name} differs on {same}"
    return borrowed


def test_calls_borrow_in_these_histories(stores: dict[str, Execute]) -> None:
    redis = {"redis": stores["redis"]}
    assert sum(agree(redis, full_history(seed)) for seed in range(60)) > 100


@settings(LENIENT, max_examples=30)
@given(history=histories)
def test_every_store_agrees(stores: dict[str, Execute], history: list[HistoryStep]) -> None:
    agree(stores, history)


@pytest.mark.slow
@pytest.mark.timeout(900)
@settings(LENIENT, max_examples=500)
@given(history=histories)
def test_redis_agrees_at_length(stores: dict[str, Execute], history: list[HistoryStep]) -> None:
    agree({"redis": stores["redis"]}, history)
