"""`CommandCache.limits_of` is the one place that says which limits a key has: another answer for
one key holds in every way to call, with every consistency, and for that key alone.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from functools import partial
from typing import Any

import pytest

from distwindow import AsyncLimiter, DistwindowError, Limiter
from distwindow.ring.limit import parse_limits
from distwindow.runtime.command_cache import CommandCache
from tests.away.sharing_process import WAYS
from tests.away.stores import NOT_SENT, AsyncRemoteStore, RemoteStore
from tests.clock_and_stores import ManualClock

OF_ONE_KEY = [way for way in WAYS if "all" not in way]
"""The others are told the limits of each key."""


async def answer(call: Any) -> Any:
    """Return what a call answers; False if it is refused, or not possible with this consistency."""
    try:
        found = call()
        return await found if isinstance(found, Awaitable) else found
    except DistwindowError:
        return False


@pytest.mark.parametrize("kind", [Limiter, AsyncLimiter])
@pytest.mark.parametrize("consistency", ["direct", "leased", "eventual"])
@pytest.mark.parametrize("store_is_away", [False, True], ids=["up", "away"])
@pytest.mark.parametrize("way", OF_ONE_KEY)
def test_the_limits_of_a_key_hold_in_every_way(
    kind: Any, consistency: Any, store_is_away: bool, way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    gold = parse_limits("6/minute")
    monkeypatch.setattr(
        CommandCache, "limits_of", lambda cache, key: gold if key == "gold" else cache.limits
    )
    clock = ManualClock()
    store = RemoteStore(clock)
    limiter = kind(
        store if kind is Limiter else AsyncRemoteStore(store), "4/minute", time=clock,
        consistency=consistency, on_store_error="local", share=1.0,
    )  # fmt: skip
    store.failure = NOT_SENT if store_is_away else None
    way_is_impossible = consistency == "eventual" and ("priority" in way or "enqueue" in way)

    async def call() -> None:
        for key, amount in ("plain", 4), ("gold", 6):
            admitted = 0
            for _ in range(8):
                admitted += bool(await answer(partial(WAYS[way], limiter, key)))
            assert admitted == (0 if way_is_impossible else amount)
            for of_cost in limiter.try_acquire, partial(limiter.reserve, timeout=0.0):
                await answer(partial(of_cost, key, amount))
                with pytest.raises(ValueError, match=f"can never be admitted: .* {amount}"):
                    await answer(partial(of_cost, key, amount + 1))

    asyncio.run(call())
