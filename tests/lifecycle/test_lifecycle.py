"""Closing what is flushed: interrupted, cancelled, and ended by the end of its event loop."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from distwindow import (
    AdaptiveBreaker,
    AsyncAdaptiveBreaker,
    AsyncCircuitBreaker,
    AsyncConcurrency,
    AsyncGuard,
    AsyncLimiter,
    CircuitBreaker,
    Concurrency,
    ConfigurationError,
    ErrorCount,
    Guard,
    Limiter,
)
from distwindow.contrib.http.rate_limits import AsyncRateLimits, BlockingRateLimits
from distwindow.contrib.limiter_pool import AsyncLimiterPool, LimiterPool
from distwindow.contrib.upstream import AsyncUpstreamLimits, UpstreamLimits
from distwindow.lifecycle.lifecycle import BlockingLifecycle
from distwindow.ring.clock import SYSTEM
from distwindow.ring.command import Command
from distwindow.ring.decision import Source
from distwindow.runtime.flush_job import FlushJob
from distwindow.runtime.options import Options
from distwindow.runtime.worker import TASK_WORKER
from distwindow.sentinel.rules import FlowRule
from distwindow.stores.memory import AsyncMemoryStore, MemoryStore
from distwindow.testing.pytest_plugin import classes_with_a_store
from tests.interruptions import interrupt_at
from tests.servers import until


class Remote(AsyncMemoryStore):
    """A store in memory that is used like a remote one. While `answers` is not set, no exchange
    ends.
    """

    decided_by: Source = "store"

    def __init__(self) -> None:
        super().__init__(MemoryStore())
        self.answers = asyncio.Event()
        self.answers.set()

    async def execute_many(
        self, commands: Sequence[Command[Any]], deadline: float | None = None
    ) -> list[Any]:
        await self.answers.wait()
        return await super().execute_many(commands)


async def limiter_with_a_count(store: Remote) -> AsyncLimiter:
    limiter = AsyncLimiter(store, "10/hour", consistency="eventual", sync_interval=600)
    await limiter.try_acquire("k")
    await limiter.flush()
    await limiter.try_acquire("k")
    return limiter


async def concurrency_with_a_slot(store: Remote) -> AsyncConcurrency:
    slots = AsyncConcurrency(store, 3)
    store.held = await slots.try_hold("k")  # type: ignore[attr-defined]  # kept, so that it is held
    return slots


async def breaker_with_a_count(store: Remote) -> AsyncCircuitBreaker:
    breaker = AsyncCircuitBreaker(
        store, ErrorCount(5, open_for=1200), flush_interval=600, sync_interval=600
    )
    async with breaker.call("k"):
        pass
    return breaker


UNSENT: list[Any] = [limiter_with_a_count, concurrency_with_a_slot, breaker_with_a_count]


@pytest.mark.parametrize("make", UNSENT)
def test_what_the_end_of_a_loop_has_not_closed_is_sent_at_exit(
    make: Callable[[Remote], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """When a loop shuts down, it cancels all tasks: the caller of `aclose`, and the one that
    closes. The shutdown of the process then flushes all jobs that are still active.
    """
    # The worker's task tries to flush as the loop ends, in vain: the store does not answer.
    monkeypatch.setattr("distwindow.runtime.worker.EXIT_TIMEOUT_S", 0.06)
    made: list[Any] = []

    async def main() -> None:
        store = Remote()
        it = await make(store)
        made.append((store, it))
        store.answers.clear()
        asyncio.ensure_future(it.aclose())  # noqa: RUF006  # `asyncio.run` cancels it
        for _ in range(20):
            await asyncio.sleep(0)
        assert it._flush_job.close_done is not None, "the close is under way"

    asyncio.run(main())
    ((store, it),) = made
    assert it._flush_job in TASK_WORKER.jobs.active()
    assert it._flush_job.has_unsent
    store.answers = asyncio.Event()
    store.answers.set()
    TASK_WORKER.flush_all(SYSTEM.monotonic() + 5, final=True)
    assert not it._flush_job.has_unsent
    asyncio.run(it.aclose())  # no loop of another test goes on with it


async def test_a_cancelled_aclose_of_a_guard_closes_all_of_its_parts() -> None:
    rules = [FlowRule("r", 10), FlowRule("r", 10, grade="thread"), FlowRule("s", 7)]
    guard = AsyncGuard("memory://", rules)
    parts = list(guard._parts.values())
    began, may_end = asyncio.Event(), asyncio.Event()
    close_first = parts[0]._flush_rest

    async def slowly() -> Any:
        began.set()
        await may_end.wait()
        return await close_first()

    parts[0]._flush_rest = slowly
    closing = asyncio.ensure_future(guard.aclose())
    await began.wait()
    closing.cancel()
    await asyncio.sleep(0)
    assert not closing.done(), "it goes on to its end"
    may_end.set()
    with pytest.raises(asyncio.CancelledError):
        await closing
    assert len(parts) == 3
    assert all(part._flush_job.detached for part in parts)


MAKE: list[Callable[[], Any]] = [
    lambda: Limiter("memory://", "10/s"),
    lambda: Concurrency("memory://", 3),
    lambda: CircuitBreaker("memory://", ErrorCount(5)),
    lambda: Guard("memory://", [FlowRule("r", 10), FlowRule("s", 10)]),
]


@pytest.mark.parametrize("make", MAKE)
def test_a_close_that_was_begun_ends_wherever_a_signal_handler_raises(
    make: Callable[[], Any],
) -> None:
    """The caller gets the handler's exception; what is being closed is closed nevertheless, at the
    latest by the next close.
    """
    places, place = 0, ""
    while place is not None:
        places += 1
        it = make()
        began = threading.Event()
        close = it._close

        def closing(began: threading.Event = began, close: Callable[[], None] = close) -> None:
            began.set()
            close()

        it._close = closing
        place = interrupt_at(places, it.close, "distwindow.")  # type: ignore[assignment]
        if began.is_set():
            until(lambda it=it: all(job.detached for job in jobs_of(it)), timeout=5)  # type: ignore[misc]
        it.close()
        assert all(job.detached for job in jobs_of(it)), place
    assert places > 5


def jobs_of(it: Any) -> list[FlushJob]:
    parts = [it] if isinstance(it, BlockingLifecycle) else list(it._parts.values())
    return [part._flush_job for part in parts]


def test_a_closed_one_answers_no_call_on_a_store_that_stays_open() -> None:
    store = MemoryStore()
    limiter, slots = Limiter(store, "5/minute"), Concurrency(store, 1)
    breaker = CircuitBreaker(store, ErrorCount(3))
    for each in (limiter, slots, breaker):
        each.close()
    for call in (
        lambda: limiter.try_acquire("k"),
        lambda: limiter.try_acquire("k", priority=True),
        lambda: limiter.try_acquire_all([("k", "5/minute")]),
        lambda: limiter.acquire("k", timeout=0),
        lambda: limiter.peek("k"),
        lambda: limiter.entry("k").__enter__(),
        lambda: slots.try_hold("k"),
        lambda: breaker.call("k").__enter__(),
    ):
        with pytest.raises(ConfigurationError, match="is closed; make a new one"):
            call()
    assert Limiter(store, "5/minute").try_acquire("k")


ARGUMENTS: dict[tuple[type, ...], tuple[Any, ...]] = {
    (Limiter, AsyncLimiter): ("5/minute",),
    (Concurrency, AsyncConcurrency): (1,),
    (CircuitBreaker, AsyncCircuitBreaker): (ErrorCount(3),),
    (AdaptiveBreaker, AsyncAdaptiveBreaker): (),
    (Guard, AsyncGuard): ([FlowRule("r", 1)],),
    (UpstreamLimits, AsyncUpstreamLimits): (),
    (LimiterPool, AsyncLimiterPool): (Options(),),
}
OPEN_A_STORE = {cls: arguments for classes, arguments in ARGUMENTS.items() for cls in classes}


@pytest.mark.parametrize("cls", OPEN_A_STORE)
def test_a_store_object_of_the_caller_stays_open(cls: type) -> None:
    async def closed(made: Any) -> None:
        await made.aclose()

    store = MemoryStore()
    made = cls(store, *OPEN_A_STORE[cls])
    if hasattr(made, "aclose"):
        asyncio.run(closed(made))
    else:
        made.close()
    assert Limiter(store, "5/minute").try_acquire("k")


def test_each_class_that_opens_a_store_is_in_the_test_above() -> None:
    assert not {*classes_with_a_store()} - {*OPEN_A_STORE, AsyncRateLimits, BlockingRateLimits}


@pytest.mark.parametrize(
    ("store", "flushes"), [("memory://", 2), (MemoryStore(), 1)], ids=["own", "given"]
)
def test_what_calls_count_while_all_is_sent_is_sent_before_an_own_store_is_closed(
    monkeypatch: pytest.MonkeyPatch, store: Any, flushes: int
) -> None:
    """A call that was being decided when `close` began counts once it is. With a store of the
    caller, the worker sends that.
    """
    limiter, flushed = Limiter(store, "5/hour"), list[bool]()
    monkeypatch.setattr(limiter, "_flush_now", flushed.append)
    limiter.close()
    assert flushed == [True] * flushes
