"""Who waits in `acquire` is admitted when this limiter resets the key or refunds a call, and raises
when the refusal of the first in the queue outlasts its timeout, or the limiter is closed.

Nothing else happens in time: the limits are of an hour.
"""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import pytest

from distwindow import AsyncLimiter, DistwindowError, RateLimitExceeded
from distwindow.lifecycle.connect import open_async_store, open_store
from distwindow.runtime.options import Options
from tests.harness import Harness, in_background
from tests.servers import until

CASES = [
    ("direct", "2/hour", {}),
    ("leased", "2/hour", {}),
    ("eventual", "2/hour", {}),
    ("direct", "40/hour; 2/day", {}),
    ("direct", "2/hour", {"priority": True}),
    ("direct", "2/hour", {"cost": 2}),
]
STORES = pytest.mark.parametrize("in_process", [False, True], ids=["redis", "memory"])
CALLS = pytest.mark.parametrize(("mode", "limits", "options"), CASES)
HOW = pytest.mark.parametrize("how", ["reset", "refund"])


def is_asleep(limiter: Any) -> bool:
    """True when the head of the only queue has been refused."""
    queues = list(limiter.decider.queues.by_name.values())
    return bool(queues) and queues[0].refusal is not None


@STORES
@CALLS
@HOW
def test_who_waits_is_admitted(
    harness: Harness, redis_url: str, prefix: str, in_process: bool, mode: str, limits: str,
    options: Any, how: str,
) -> None:  # fmt: skip
    url = "memory://" if in_process else redis_url
    limiter = harness.limiter(url, limits, prefix=prefix, consistency=mode)
    decision = limiter.acquire("k", 2)
    admitted: list[Any] = []
    waiter = in_background(lambda: admitted.append(limiter.acquire("k", **options)))
    until(lambda: is_asleep(limiter.limiter), what="the refusal")
    if how == "reset":
        limiter.reset("k")
    else:
        assert limiter.refund(decision) == 2
    waiter.join(20)
    assert [one.allowed for one in admitted] == [True]


@pytest.mark.parametrize("limits", ["5/hour", "100/hour"])
async def test_after_a_reset_all_for_whom_there_is_room_are_admitted(
    redis_url: str, prefix: str, limits: str
) -> None:
    """Also by turns: the turn that the first had before is hours away."""
    async with AsyncLimiter(redis_url, limits, prefix=prefix) as limiter:
        while (await limiter.try_acquire("k")).allowed:
            pass
        tasks = [asyncio.create_task(limiter.acquire("k")) for _ in range(5)]
        while not is_asleep(limiter):  # noqa: ASYNC110 - nothing announces it
            await asyncio.sleep(0.001)
        await limiter.reset("k")
        decisions = await asyncio.wait_for(asyncio.gather(*tasks), 20)
        assert all(decision.allowed for decision in decisions)


@STORES
def test_who_is_behind_the_first_raises_with_its_refusal(
    harness: Harness, redis_url: str, prefix: str, in_process: bool
) -> None:
    limiter = harness.limiter("memory://" if in_process else redis_url, "2/hour", prefix=prefix)
    limiter.acquire("k", 2)
    raised = threading.Event()

    def gives_up() -> None:
        with pytest.raises(RateLimitExceeded):
            limiter.acquire("k", timeout=1000)
        raised.set()

    first = in_background(lambda: limiter.acquire("k"))
    in_background(gives_up)
    assert raised.wait(20)
    until(lambda: is_asleep(limiter.limiter), what="the refusal")
    limiter.reset("k")
    first.join(20)
    assert not first.is_alive()


@pytest.mark.parametrize("consistency", ["direct", "leased", "eventual"])
@pytest.mark.parametrize("keeps_store", [False, True], ids=["url", "store-of-the-caller"])
def test_close_wakes_who_waits(
    harness: Any, consistency: str, keeps_store: bool, redis_url: str, prefix: str
) -> None:
    opens: Any = open_store if harness.kind == "sync" else open_async_store
    store: Any = opens(redis_url, Options()) if keeps_store else redis_url
    limiter = harness.limiter(store, "1/hour", prefix=prefix, consistency=consistency)
    limiter.try_acquire("k")
    errors: list[BaseException] = []

    def wait() -> None:
        try:
            limiter.acquire("k")
        except DistwindowError as exc:  # the first one may just be asking for its turn
            errors.append(exc)

    threads = [in_background(wait) for _ in range(3)]
    until(lambda: is_asleep(limiter.limiter) and waiting_in(limiter.limiter) == 3)
    limiter.close()
    for thread in threads:
        thread.join(20)
    assert ["closed" in str(error) for error in errors] == [True] * 3, errors
    if keeps_store:
        store.close() if harness.kind == "sync" else harness.run(store.aclose())


def waiting_in(limiter: Any) -> int:
    return sum(len(queue.waiting) for queue in limiter.decider.queues.by_name.values())
