"""Connections whose round trip is a large part of the timeout: calls succeed all the same."""

from __future__ import annotations

import asyncio
import signal
import threading
from collections import Counter
from collections.abc import Callable
from types import FrameType
from typing import Any

import pytest

from distwindow import AsyncLimiter, ConfigurationError, Limiter, StoreError
from tests.servers import Delay, Proxy, Standalone

pytestmark = pytest.mark.slow  # the quick tier stays under a minute

PLENTY = "1000000/hour"


def outcomes(calls: int, call: Callable[[], Any]) -> Counter[str]:
    seen: Counter[str] = Counter()
    for _ in range(calls):
        try:
            seen["ok" if call() else "refused"] += 1
        except StoreError as exc:
            seen[f"{type(exc).__name__} {exc.charged}"] += 1
    return seen


@pytest.mark.slow
def test_threads_of_one_key_succeed_over_a_slow_connection(proxy: Proxy, prefix: str) -> None:
    """Waiting for the call in flight must not use up the time that a thread needs for its own
    call.
    """
    limiter = Limiter(proxy.url, PLENTY, prefix=prefix, timeout=0.5)
    limiter.try_acquire("hot")
    seen: list[Counter[str]] = []
    with proxy.inject(Delay(replies=0.3)):
        threads = [
            threading.Thread(
                target=lambda: seen.append(outcomes(8, lambda: limiter.try_acquire("hot")))
            )
            for _ in range(4)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    total = sum(seen, Counter())
    assert total["ok"] >= 8, total  # each thread connects first, which takes two or three calls
    assert total["StoreTimeout None"] <= 4, (
        total
    )  # one for each thread, before the connection was known to be slow
    limiter.close()


@pytest.mark.event_loops
@pytest.mark.parametrize("awaiting", [False, True])
def test_a_connection_that_takes_longer_than_one_call_is_opened_in_the_end(
    proxy: Proxy, prefix: str, awaiting: bool
) -> None:
    """Connecting takes several round trips, which is more than the timeout of one call."""
    options: dict[str, Any] = {"prefix": prefix, "timeout": 0.25}
    with proxy.inject(Delay(replies=0.1)):
        if awaiting:
            assert asyncio.run(_until_admitted(proxy.url, options))
            return
        limiter = Limiter(proxy.url, PLENTY, **options)
        seen = Counter[str]()
        for _ in range(20):
            seen += outcomes(1, lambda: limiter.try_acquire("k"))
            if seen["ok"]:
                break
        assert seen["ok"], seen
        limiter.close()


async def _until_admitted(url: str, options: dict[str, Any]) -> bool:
    async with AsyncLimiter(url, PLENTY, **options) as limiter:
        for _ in range(20):
            try:
                return bool(await limiter.try_acquire("k"))
            except StoreError:
                continue
    return False


def test_a_signal_handler_may_call_the_limiter_it_interrupts(redis_url: str, prefix: str) -> None:
    limiter = Limiter(redis_url, PLENTY, prefix=prefix, timeout=10)
    limiter.try_acquire("k")
    handled: list[bool] = []

    def handler(number: int, frame: FrameType | None) -> None:
        handled.append(bool(limiter.try_acquire("other")))

    before = signal.signal(signal.SIGALRM, handler)
    signal.setitimer(signal.ITIMER_REAL, 0.01, 0.01)
    try:
        calls = 0
        while len(handled) < 20:
            assert limiter.try_acquire("k")
            calls += 1
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert all(handled)
    assert limiter.stats("k").passed == calls + 1
    assert limiter.stats("other").passed == len(handled)


def test_a_frame_too_large_for_a_stalled_server_ends_by_its_deadline(prefix: str) -> None:
    with Standalone() as server:
        limiter = Limiter(server.url, PLENTY, prefix=prefix, timeout=0.5)
        limiter.try_acquire("k")
        items = [(f"key-{n}-{'x' * 150}", PLENTY) for n in range(20_000)]
        server.pause()
        try:
            with pytest.raises(StoreError):  # without a deadline for the rest, this would not end
                limiter.try_acquire_all(items)
        finally:
            server.resume()


@pytest.mark.event_loops
def test_a_call_in_flight_when_the_limiter_closes_leaves_no_connection(prefix: str) -> None:
    async def race(url: str) -> None:
        limiter = AsyncLimiter(url, PLENTY, prefix=prefix, timeout=1)
        await limiter.try_acquire("k")
        call = asyncio.ensure_future(limiter.try_acquire("k"))
        await asyncio.sleep(0)
        await limiter.aclose()
        with pytest.raises((ConfigurationError, StoreError)):
            await call

    with Standalone() as server:
        asyncio.run(race(server.url))
        with server.client() as client:
            assert len(client.client_list()) == 1
