"""A limit is changed while it is used: what was counted stays, and the larger of the two limits
holds.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from distwindow import Limit, Limiter
from distwindow.lifecycle.connect import open_store
from distwindow.ring.commands import Acquire, Read, charges_of
from distwindow.ring.key import ring_name_prefix
from distwindow.runtime.options import Options
from tests.clock_and_stores import T0, ManualClock, fresh_key

MakeLimiter = Callable[..., Limiter]
LENIENT = settings(deadline=None, suppress_health_check=list(HealthCheck), print_blob=True)


@pytest.mark.parametrize("bound", ["leap", "strict"])
def test_raised_it_admits_the_difference_at_once(make: MakeLimiter, bound: str) -> None:
    key = fresh_key()
    old, new = make(f"10/minute {bound} 10 buckets"), make(f"25/minute {bound} 10 buckets")
    assert [old.try_acquire(key).allowed for _ in range(13)] == [True] * 10 + [False] * 3
    assert [new.try_acquire(key).allowed for _ in range(17)] == [True] * 15 + [False] * 2
    assert not old.try_acquire(key)


@pytest.mark.parametrize("bound", ["leap", "strict"])
def test_lowered_it_admits_nothing_until_the_history_has_left(
    make: MakeLimiter, clock: ManualClock, bound: str
) -> None:
    key = fresh_key()
    old, new = make(f"20/minute {bound} 10 buckets"), make(f"5/minute {bound} 10 buckets")
    for _ in range(8):
        old.try_acquire(key)
        clock.move(6_000)
    refused = new.try_acquire(key)
    assert (refused.allowed, refused.remaining) == (False, 0), "overdrawn, but never below nothing"
    assert old.peek(key).remaining == 12
    clock.move(round(refused.retry_after * 1000) - 1)
    assert not new.peek(key)
    clock.move(1)
    assert new.try_acquire(key).remaining == 0


def test_the_statistics_show_the_new_limit_at_once(make: MakeLimiter) -> None:
    """This holds also for readers that have only the key, as the CLI does: the first call stores
    the new limit.
    """
    key = fresh_key()
    for amount in (10, 25, 3, 7):
        limiter = make(f"{amount}/minute")
        limiter.try_acquire(key)
        stats = limiter.stats(key)
        assert stats.limits == (Limit(f"{amount}/minute"),)
        assert stats.remaining == max(0, amount - stats.passed)
        charges = limiter.decider.commands.acquire_command(key).charges
        (state,) = limiter._store.execute(Read(charges, 0)).states
        assert state is not None
        assert state.limit == f"{amount} leap"


def test_the_history_stays_over_any_number_of_changes(make: MakeLimiter) -> None:
    key, passed = fresh_key(), 0
    for amount in (3, 8, 5, 12, 2, 20):
        limiter = make(f"{amount}/minute")
        while limiter.try_acquire(key):
            passed += 1
        assert passed == max(3, passed)
        assert limiter.stats(key).passed == passed
    assert passed == 20


W = 60_000
changes = st.lists(
    st.tuples(
        st.one_of(st.integers(0, 3), st.sampled_from([W, 2 * W]), st.integers(0, 9 * W)),
        st.integers(1, 4),
        st.integers(1, 4),
        st.sampled_from([4, 6, 11]),
    ),
    min_size=1,
    max_size=40,
)


@pytest.mark.parametrize("where", ["memory", "redis"])
@pytest.mark.parametrize("bound", ["leap", "strict"])
@settings(LENIENT, max_examples=40)
@given(changes_made=changes, buckets=st.integers(1, 6))
def test_never_above_the_larger(
    request: pytest.FixtureRequest, where: str, bound: Any, changes_made: list[Any], buckets: int
) -> None:
    """Limits of 4, 6 and 11 are used in turn: no window holds more than the largest limit that was
    used since it began, and no call is admitted above its own limit.
    """
    url = "memory://" if where == "memory" else request.getfixturevalue("redis_url")
    store = stores.setdefault(url, open_store(url, Options(clock="client", timeout=10)))
    key, now = fresh_key(), T0
    admitted: list[tuple[int, int]] = []
    span = buckets + (bound == "strict")
    for later, cost, times, amount in changes_made:
        now += later
        limit = Limit(amount, buckets * W / 1000, buckets, bound)
        charges = charges_of(key, ring_name_prefix("flight", key), [limit], cost)
        verdict = store.execute(Acquire(charges, now, calls=times))
        admitted += [(now, cost)] * verdict.admitted
        held = sum(c for at, c in admitted if at // W > now // W - span)
        if verdict.admitted:
            assert held <= amount
        assert held <= 11
        assert verdict.left == amount - held


stores: dict[str, Any] = {}


@pytest.fixture(scope="module", autouse=True)
def closed() -> Iterator[None]:
    yield
    for store in stores.values():
        store.close()
    stores.clear()
