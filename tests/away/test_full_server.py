"""A server that is full refuses what writes and answers all else: it is away until it takes
decisions again.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from distwindow import DistwindowError, Limiter
from distwindow.support.async_use import result_of, run_at_once
from tests.observer.told import Told
from tests.rules.test_shadow import KINDS
from tests.servers import Standalone

FULL_S = 1.5
LIMITS = ["5/second", ["5/second", "20/minute"], "1/minute"]


@pytest.fixture(scope="module")
def server() -> Iterator[Standalone]:
    with Standalone() as own:
        yield own


@pytest.mark.slow
@pytest.mark.event_loops
@KINDS
def test_a_full_server_is_away_until_it_decides(
    server: Standalone, kind: Any, prefix: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Of each consistency, whatever it still answers: permits that are given back, windows that
    are over or emptied, limits that refuse, and reads. What was logged and told says so, and is not
    repeated as often as it is probed.
    """
    caplog.set_level(logging.WARNING, "distwindow")
    ups: dict[str, list[bool]] = {}
    made: dict[str, Any] = {}
    told = Told()
    for consistency, (number, limits) in itertools.product(
        ("direct", "leased", "eventual"), enumerate(LIMITS)
    ):
        name = f"{prefix}-{consistency}-{number}"
        made[name] = kind(
            server.url, limits, prefix=name, consistency=consistency, on_store_error="allow",
            timeout=10.0, observer=told, flush_interval=0.05, sync_interval=0.05,
        )  # fmt: skip
        changes = ups[name] = []
        made[name].on_health_change(lambda health, changes=changes: changes.append(health.up))
    sleep: Any = time.sleep if kind is Limiter else asyncio.sleep

    async def call_in_all_ways(is_over: Callable[[], bool]) -> None:
        given: list[Any] = []
        for number in itertools.count():
            for limiter in made.values():
                decision = await result_of(limiter.try_acquire(f"k{number % 5}"))
                if decision.charged:
                    given.append((limiter, decision))
                try:
                    await result_of(limiter.peek("k1"))
                    if given and number % 3 == 0:
                        owner, charged = given.pop(0)
                        await result_of(owner.refund(charged))
                    if number % 7 == 0:
                        await result_of(limiter.reset("k2"))
                except DistwindowError:
                    pass
            await result_of(sleep(0.01))
            if is_over():
                return

    def after(seconds: float) -> Callable[[], bool]:
        ends_at = time.monotonic() + seconds
        return lambda: time.monotonic() > ends_at

    async def run() -> None:
        with server.client() as client:
            await call_in_all_ways(after(0.2))
            client.config_set("maxmemory", 1)
            try:
                await call_in_all_ways(after(FULL_S))
                # It does decide some calls: those whose script frees something first.
                assert all(changes in ([False], [False, True, False]) for changes in ups.values())
                assert not any(limiter.health().up for limiter in made.values())
            finally:
                client.config_set("maxmemory", 0)
            waits = after(20.0)
            decides = [changes for name, changes in ups.items() if not name.endswith("-2")]
            await call_in_all_ways(lambda: all(each[-1] for each in decides) or waits())
            assert all(changes[-1] for changes in decides)
        for limiter in made.values():
            await result_of(limiter.close() if kind is Limiter else limiter.aclose())

    if kind is Limiter:
        run_at_once(run())
    else:
        asyncio.run(run())
    for name in made:
        of = [text for each in caplog.records if f"'{name}'" in (text := each.getMessage())]
        assert sum(" is away: " in text for text in of) in (1, 2)
        assert sum(" is back (" in text for text in of) <= 2
        assert [event.change.up for event in told.events if event.name == name] == ups[name]
