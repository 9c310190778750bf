"""A task that is cancelled amid its call is charged nothing, whenever that is."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Any, get_args

import pytest

from distwindow import AsyncLimiter
from distwindow.runtime.options import Consistency
from tests.harness import TIMEOUT_S

CALLS: dict[str, Callable[[AsyncLimiter], Awaitable[Any]]] = {
    "try_acquire": lambda limiter: limiter.try_acquire("k"),
    "acquire": lambda limiter: limiter.acquire("k"),
    "try_acquire_all": lambda limiter: limiter.try_acquire_all([("k", limiter.limits, 1)]),
    "try_reserve": lambda limiter: limiter.try_reserve("k", 1),
    "reserve_all": lambda limiter: limiter.reserve_all([("k", limiter.limits, 1)]),
}


async def cancel_after(passes: int, task: asyncio.Task[Any]) -> None:
    """Cancel a call after some passes of the event loop."""
    for _ in range(passes):
        await asyncio.sleep(0)
    task.cancel()


async def cancel_with_the_reply(task: asyncio.Task[Any]) -> None:
    """Cancel a call in the pass of the event loop in which its reply comes."""
    for _ in range(4):
        await asyncio.sleep(0)  # it is sent
    asyncio.get_running_loop().call_later(0.001, task.cancel)
    time.sleep(0.02)  # noqa: ASYNC251  # a loop reads its sockets before it runs what is due


@pytest.mark.parametrize("consistency", get_args(Consistency))
@pytest.mark.parametrize("call", CALLS)
async def test_what_a_cancelled_call_was_charged_is_given_back(
    redis_url: str, prefix: str, call: str, consistency: Any
) -> None:
    options: dict[str, Any] = {"prefix": prefix, "timeout": TIMEOUT_S}
    admitted = 0
    async with AsyncLimiter(redis_url, "99/day", consistency=consistency, **options) as limiter:
        await limiter.try_acquire("first")  # connects
        for passes in (*range(9), None):
            task = asyncio.ensure_future(CALLS[call](limiter))
            await (cancel_with_the_reply(task) if passes is None else cancel_after(passes, task))
            await asyncio.wait([task])
            admitted += not task.cancelled()
            for _ in range(3):  # a reply, and then that to what it gives back
                await asyncio.sleep(0)
                await limiter._store.drain()
    async with AsyncLimiter(redis_url, "99/day", **options) as other:
        assert (await other.peek("k")).remaining == 99 - admitted


async def test_others_who_share_a_script_call_keep_theirs(redis_url: str, prefix: str) -> None:
    options: dict[str, Any] = {"prefix": prefix, "timeout": TIMEOUT_S}
    async with AsyncLimiter(redis_url, "5/day", **options) as limiter:
        await limiter.try_acquire("first")
        tasks = [asyncio.ensure_future(limiter.try_acquire("k")) for _ in range(6)]
        for _ in range(3):
            await asyncio.sleep(0)
        for task in tasks[:2]:
            task.cancel()
        answers = await asyncio.gather(*tasks, return_exceptions=True)
        assert [bool(answer) for answer in answers[2:]] == [True, True, True, False]
        await limiter._store.drain()
    async with AsyncLimiter(redis_url, "5/day", **options) as other:
        assert (await other.peek("k")).remaining == 2


async def test_a_call_that_is_decided_here_is_not_lost_where_others_have_their_turn() -> None:
    async with AsyncLimiter("memory://", "999/day") as limiter:
        admitted = 0
        for _ in range(300):
            task = asyncio.ensure_future(limiter.try_acquire("k"))
            await asyncio.sleep(0)
            task.cancel()
            await asyncio.wait([task])
            admitted += not task.cancelled()
        assert 290 < admitted < 300  # each 64th lets others run
        assert (await limiter.peek("k")).remaining == 999 - admitted
