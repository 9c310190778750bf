"""`unknown_total` is the number of callers whose outcome stays unknown."""

from __future__ import annotations

import asyncio

import pytest

from distwindow import AsyncLimiter, Limiter, StoreError, StoreUnavailable
from tests.servers import Proxy
from tests.servers.faults import DropReply

LIMIT = "1000/hour"


def test_a_lost_reply_counts_and_an_unreachable_server_does_not(proxy: Proxy, prefix: str) -> None:
    limiter = Limiter(proxy.url, LIMIT, prefix=prefix, timeout=10)
    limiter.try_acquire("k")
    assert limiter.unknown_total == 0
    with (
        proxy.inject(DropReply(close=True, only=b"EVALSHA", times=1)),
        pytest.raises(StoreError) as lost,
    ):
        limiter.try_acquire("k")
    assert (lost.value.charged, limiter.unknown_total) == (None, 1)
    with pytest.raises(StoreUnavailable) as refused:
        Limiter("redis://127.0.0.1:1/0", LIMIT).try_acquire("k")
    assert (refused.value.charged, limiter.unknown_total) == (False, 1)


async def _tasks(url: str, prefix: str, proxy: Proxy) -> list[int]:
    seen = []
    async with AsyncLimiter(url, LIMIT, prefix=prefix, timeout=10) as limiter:
        await limiter.try_acquire("k")
        seen.append(limiter.unknown_total)
        with proxy.inject(DropReply(close=True, only=b"EVALSHA", times=1)):
            calls = [limiter.try_acquire("k") for _ in range(5)]  # they share one script call
            await asyncio.gather(*calls, return_exceptions=True)
        seen.append(limiter.unknown_total)
        unsent = asyncio.ensure_future(limiter.try_acquire("k"))
        unsent.cancel()
        await asyncio.gather(unsent, return_exceptions=True)
        seen.append(limiter.unknown_total)
        under_way = asyncio.ensure_future(limiter.try_acquire("k"))
        for _ in range(3):
            await asyncio.sleep(0)  # the call is made in one tick of the loop, and sent in the next
        under_way.cancel()
        await asyncio.gather(under_way, return_exceptions=True)
        await limiter.try_acquire("k")  # replies arrive in order
        await limiter._store.drain()  # what is given back
        seen.append(limiter.unknown_total)
        with proxy.inject(DropReply(close=True, only=b"EVALSHA", times=1)):
            under_way = asyncio.ensure_future(limiter.try_acquire("k"))
            for _ in range(3):
                await asyncio.sleep(0)
            under_way.cancel()
            await limiter._store.drain()  # until the connection ends, without the reply
        seen.append(limiter.unknown_total)
    return seen


@pytest.mark.event_loops
def test_every_caller_of_a_lost_call_counts_also_one_that_was_cancelled(
    proxy: Proxy, prefix: str
) -> None:
    assert asyncio.run(_tasks(proxy.url, prefix, proxy)) == [0, 5, 5, 5, 6]
