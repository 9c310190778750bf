"""`max_local_keys`: how many keys a limiter keeps, and what becomes of those that it evicts."""

from __future__ import annotations

import gc
from typing import Any

import pytest

from distwindow.local.key_state import KeyState
from tests.harness import PLENTY, Harness, admin, used
from tests.lifecycle.worker_options import MODES, NEVER, SOON
from tests.servers import Proxy, until


@pytest.mark.slow
@pytest.mark.parametrize("mode", MODES)
def test_keys_that_were_called_once_are_dropped(
    harness: Harness, redis_url: str, prefix: str, mode: str
) -> None:
    limiter = harness.limiter(
        redis_url, "1/hour", prefix=prefix, consistency=mode, max_local_keys=50, timeout=5
    )
    keys = [f"k{n}" for n in range(200)]
    limiter.each([key for key in keys for _ in range(2)])
    strategy = limiter.limiter.decider.strategy
    assert len(strategy._key_states) <= 50
    until(lambda: limiter.flush() or strategy._key_states.count_evicted_unacknowledged() == 0)
    with admin(redis_url) as server:
        assert used(server, prefix) == 200
    other = harness.limiter(redis_url, "1/hour", prefix=prefix)
    assert {other.stats(key).blocked for key in keys[::25]} == {1}


def test_the_least_used_goes_first(harness: Harness, proxy: Proxy, prefix: str) -> None:
    limiter = harness.limiter(proxy.url, "1/hour", prefix=prefix, max_local_keys=3, **NEVER)
    for key in "abc":
        limiter.each([key] * 2)
    limiter.try_acquire("a")
    limiter.each(["d"] * 2)  # evicts b
    before = proxy.requests
    assert {d.source for d in limiter.each(["a", "c", "d"])} == {"deny_cache"}
    assert proxy.requests == before
    assert limiter.try_acquire("b").source == "store"
    limiter.flush()
    assert [limiter.stats(key).blocked for key in "abcd"] == [3, 2, 2, 2]


def test_eviction_gives_leases_back(harness: Harness, redis_url: str, prefix: str) -> None:
    options: dict[str, Any] = {"prefix": prefix, "consistency": "leased", "timeout": 5}
    limiter = harness.limiter(redis_url, PLENTY, max_local_keys=2, **options, flush_interval=0.05)
    strategy = limiter.limiter.decider.strategy
    limiter.each(["hot"] * 300)
    assert strategy._get("hot").permits_left > 0
    limiter.each(["x"] * 20 + ["y"] * 20 + ["z"] * 20)  # fewer calls get no key state
    assert strategy._get("hot") is None
    with admin(redis_url) as server:
        until(lambda: used(server, prefix, "hot") == 300)


@pytest.mark.slow
@pytest.mark.parametrize("mode", MODES)
def test_a_flood_of_one_time_keys_leaves_nothing_behind(
    harness: Harness, redis_url: str, prefix: str, mode: str
) -> None:
    limiter = harness.limiter(
        redis_url, "2/hour", prefix=prefix, consistency=mode, max_local_keys=100, timeout=5, **SOON
    )
    strategy = limiter.limiter.decider.strategy
    for first in range(0, 2000, 100):
        limiter.each([f"{n}" for n in range(first, first + 100) for _ in range(3)])
    until(lambda: limiter.flush() or strategy._key_states.count_evicted_unacknowledged() == 0)

    def ours() -> int:
        gc.collect()
        # By `type`: `isinstance` runs code of proxies, and Django's raise before it is set up.
        states = [thing for thing in gc.get_objects() if issubclass(type(thing), KeyState)]
        return sum(state.charges[0].ring.startswith(prefix.encode()) for state in states)

    until(lambda: ours() <= 100, what="leases that were to be reviewed are dropped")
