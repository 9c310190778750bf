"""Callers are cancelled, time out or are interrupted while a lease is fetched or a limiter is
closed: permits are refunded and counts are sent.
"""

from __future__ import annotations

import asyncio
import subprocess
import sys
import threading
import time
from typing import Any

import pytest

from distwindow import AsyncLimiter, Limiter, StoreError
from distwindow.ring.decision import Decision
from tests.harness import admin, used
from tests.local.interrupted import (
    PLENTY,
    SCRIPT,
    HighDemand,
    key_state,
    raised_after,
    subclass,
    without_a_lease,
)
from tests.servers import Proxy, until_async
from tests.servers.faults import Delay
from tests.servers.wait import until

pytestmark = pytest.mark.slow

# -- tasks whose exceptions are kept --------------------------------------------------------------


async def test_after_a_cancelled_fetch_no_caller_is_left_waiting(proxy: Proxy, prefix: str) -> None:
    kept: list[BaseException] = []
    async with AsyncLimiter(
        proxy.url, PLENTY, prefix=prefix, consistency="leased", timeout=10, flush_interval=600
    ) as limiter:
        for _ in range(5):
            await limiter.try_acquire("k")
        state = without_a_lease(limiter)
        with proxy.inject(Delay(only=SCRIPT, replies=0.3)):
            task = asyncio.ensure_future(_acquire(limiter))
            await until_async(lambda: state.lease_fetch is not None)
            task.cancel()
            try:
                await task
            except asyncio.CancelledError as exc:
                kept.append(exc)
            assert state.lease_fetch is None
        await asyncio.wait_for(limiter.try_acquire("k"), 1)
    assert kept


async def _acquire(limiter: AsyncLimiter) -> Decision:
    return await limiter.try_acquire("k")


# -- leases whose caller has left -----------------------------------------------------------------


@pytest.mark.parametrize("timeout", [2.0, 0.1])
async def test_a_lease_that_arrives_after_its_caller_has_left_is_kept_or_refunded(
    proxy: Proxy, prefix: str, timeout: float
) -> None:
    """The caller is cancelled or times out; the permits beyond those of the caller are not lost."""
    returned = unknown = 0
    async with AsyncLimiter(
        proxy.url, PLENTY, prefix=prefix, consistency="leased", timeout=timeout, flush_interval=600
    ) as limiter:
        for _ in range(300):
            returned += bool(await limiter.try_acquire("k"))
        state = without_a_lease(limiter)
        await limiter.flush()
        assert not state.permits_left
        before = proxy.affected
        with proxy.inject(Delay(only=SCRIPT, replies=0.15)):
            task = asyncio.ensure_future(_acquire(limiter))
            await until_async(lambda: proxy.affected > before, what="the request is sent")
            assert state.lease_fetch is not None
            if timeout > 1:
                task.cancel()
            try:
                returned += bool(await task)
            except (asyncio.CancelledError, StoreError):
                unknown += 1
            await until_async(lambda: state.permits_left > 0)
    with admin(proxy.url) as server:
        assert returned <= used(server, prefix) <= returned + unknown
    assert unknown == 1


def test_a_lease_that_arrives_while_the_limiter_closes_is_refunded(
    proxy: Proxy, prefix: str
) -> None:
    limiter = Limiter(
        proxy.url, PLENTY, prefix=prefix, consistency="leased", timeout=5, flush_interval=600
    )
    decisions: list[Decision] = [limiter.try_acquire("k") for _ in range(300)]
    strategy: Any = limiter.decider.strategy
    state = key_state(limiter)

    def holds_nothing() -> bool:
        strategy._refunds.queue_unspent(state)
        limiter.flush()
        return not strategy._leases.fetches and not state.permits_left

    until(holds_nothing, what="the prefetches of these calls have ended")
    state.demand = HighDemand(time.monotonic())
    with proxy.inject(Delay(only=SCRIPT, replies=0.5)):
        thread = threading.Thread(target=lambda: decisions.append(limiter.try_acquire("k")))
        thread.start()
        until(lambda: state.lease_fetch is not None)
        limiter.close()
        thread.join()
    assert len(decisions) == 301
    with admin(proxy.url) as server:
        assert used(server, prefix) == sum(decision.allowed for decision in decisions)


# -- closes and flushes whose caller is interrupted -----------------------------------------------


def with_unspent_permits(url: str, prefix: str) -> tuple[Limiter, int]:
    """Return a limiter that holds unspent permits, and how many calls it has admitted."""
    limiter = Limiter(
        url, PLENTY, prefix=prefix, consistency="leased", timeout=5, flush_interval=600
    )
    admitted = int(limiter.try_acquire("k").allowed)
    key_state(limiter).demand = HighDemand(time.monotonic())
    for _ in range(5):
        admitted += limiter.try_acquire("k").allowed
    assert limiter.decider.strategy.unreturned_permits() > 0
    return limiter, admitted


@pytest.mark.parametrize("repeated", [1, 3])
def test_an_interrupted_close_refunds_everything(proxy: Proxy, prefix: str, repeated: int) -> None:
    limiter, admitted = with_unspent_permits(proxy.url, prefix)
    with proxy.inject(Delay(only=SCRIPT, replies=0.3)):
        for _ in range(repeated):
            expected = subclass(KeyboardInterrupt)
            with raised_after(0.08, expected), pytest.raises(KeyboardInterrupt) as caught:
                limiter.close()
            assert caught.value is expected
        limiter.close()
    with admin(proxy.url) as server:
        assert used(server, prefix) == admitted


def test_an_interrupted_flush_refunds_what_was_queued(proxy: Proxy, prefix: str) -> None:
    limiter, admitted = with_unspent_permits(proxy.url, prefix)
    strategy: Any = limiter.decider.strategy
    strategy._refunds.queue_unspent(strategy._key_states.get("k"))
    with proxy.inject(Delay(only=SCRIPT, replies=0.2)):
        expected = subclass(TimeoutError)
        with raised_after(0.1, expected), pytest.raises(TimeoutError) as caught:
            limiter.flush()
        assert caught.value is expected
        limiter.close()
    with admin(proxy.url) as server:
        assert used(server, prefix) == admitted


ENDS_IN_CLOSE = """
import signal, sys
from distwindow import Limiter
limiter = Limiter(sys.argv[1], "1000000/day", prefix=sys.argv[2], consistency="eventual",
                  sync_interval=600, timeout=5)
for _ in range(1000):
    limiter.try_acquire("k")
limiter.flush()
for _ in range(1000):
    limiter.try_acquire("k")
def handle(number, frame):
    raise KeyboardInterrupt
signal.signal(signal.SIGALRM, handle)
print("ready", flush=True)
sys.stdin.readline()
signal.setitimer(signal.ITIMER_REAL, 0.1)
limiter.close()
"""


def test_a_process_that_ends_by_an_interrupted_close_sends_its_counts(
    proxy: Proxy, prefix: str
) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", ENDS_IN_CLOSE, proxy.url, prefix],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    ) as child:  # fmt: skip
        assert child.stdout is not None
        assert child.stdout.readline() == "ready\n"
        with proxy.inject(Delay(requests=0.3)):
            _, complaints = child.communicate("go\n", timeout=30)
    assert "KeyboardInterrupt" in complaints
    assert "lost" not in complaints
    with admin(proxy.url) as server:
        assert used(server, prefix) == 2000
