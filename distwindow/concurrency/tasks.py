"""`AsyncConcurrency`, for tasks: the methods of `Concurrency`, awaited where there is I/O."""

from __future__ import annotations

import functools
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

from ..base_limiter import check_timeout
from ..connect import ClockChoice
from ..core.async_use import Unawaited, UnawaitedCoroutine
from ..core.clock import SYSTEM, Clock
from ..core.errors import DistwindowError
from ..core.key import AnyKey
from ..core.slot_stats import ConcurrencyStats
from ..lifecycle.tasks import AsyncLifecycle
from ..operations.drivers import run_async
from ..operations.slot_claim import SlotClaim
from ..operations.slots import exceeded
from ..operations.steps import Fetch, Operation, Pipeline, StoreStep
from ..operations.wait_queue import AsyncWaiter
from ..protocol.slot_commands import HoldReply
from ..store.base import AsyncStore
from ..worker.shutdown import SHUTDOWN
from .base import BaseConcurrency, BaseKeeper
from .job import SlotJob
from .slot import AsyncSlot, AsyncSlotBlock

T = TypeVar("T")


class AsyncConcurrency(BaseConcurrency, AsyncLifecycle):
    """`Concurrency` for tasks: the same names and signatures, awaited where there is I/O. Safe to
    share between tasks, and between event loops.

    A task that is cancelled at any `await`, while it waits or while it frees its slot, leaves no
    slot held: the worker frees it.
    """

    def __init__(
        self,
        store: Any,
        limit: int,
        *,
        prefix: str = "distwindow",
        ttl: float = 30.0,
        timeout: float = 0.5,
        clock: ClockChoice = "server",
        name: str | None = None,
        time: Clock = SYSTEM,
    ) -> None:
        super().__init__(store, limit, prefix, ttl, timeout, name, time)
        self._open_store(store, self._timeout / 2, clock, name, time)
        self._use_clock(self._store.clock)
        self._keeper = _Keeper(self._store, self)
        self._add_flush_job(self._held, self._job_name, job_type=SlotJob)
        self._held.ends_all = SHUTDOWN.are_calls_paused

    def hold(self, key: AnyKey, timeout: float | None = None) -> AsyncSlotBlock:
        """See `Concurrency.hold`; `async with`."""
        return AsyncSlotBlock(self._keeper, self._held.new_claim(key), check_timeout(timeout))

    def try_hold(self, key: AnyKey) -> Unawaited[AsyncSlot]:
        """See `Concurrency.try_hold`; `release` is awaited, and the block is `async with`. What it
        returns has no truth value before it is awaited.
        """
        return UnawaitedCoroutine(self._try_hold(key))

    async def _try_hold(self, key: AnyKey) -> AsyncSlot:
        claim = self._held.new_claim(key)
        try:
            reply = await self._keeper.ask(claim)
            return AsyncSlot(self._keeper, claim, None if reply.granted else exceeded(claim, reply))
        except BaseException:
            self._keeper.abandon(claim)
            raise

    async def stats(self, key: AnyKey) -> ConcurrencyStats:
        """See `Concurrency.stats`."""
        claim = self._held.new_claim(key)
        return await self._keeper.run(self._operations.stats(claim))

    async def _end_calls(self) -> None:
        if self._owns_store:
            self._held.close()
        self._held.lose_all("its limit was closed", self._store.clock.monotonic())

    async def _flush_rest(self) -> DistwindowError | None:
        failure = await self._flush_now(True)
        seconds = self._held.settled_at() - self._store.clock.monotonic()
        if failure is None and seconds > 0:
            # A hold whose reply was lost may be executed until then, and is freed after it.
            await self._store.sleep(seconds)
            failure = await self._flush_now(True)
        return failure


class _Keeper(BaseKeeper):
    """Drives the operations of slots in the running task; see the one for threads."""

    def __init__(self, store: AsyncStore, base: BaseConcurrency) -> None:
        super().__init__(base, store.clock)
        self._store = store

    async def ask(self, claim: SlotClaim) -> HoldReply:
        """Ask once for a slot."""
        self._held.add(claim)
        reply = await self.run(self._operations.try_hold(claim), claim)
        if reply.granted:
            self._held.on_granted(claim)
        else:
            self.abandon(claim)
        return reply

    async def wait(self, claim: SlotClaim, timeout: float | None) -> None:
        """Wait until `claim` is granted. If this raises, the caller abandons the claim."""
        waiter = AsyncWaiter(self._wait_queues, claim.name, timeout)
        try:
            self._held.add(claim)
            others_wait = self._wait_queues.count(claim.name) > 0
            refused = None
            if not others_wait:
                refused = await self.run(self._operations.try_hold(claim, waiter), claim)
            if refused is None or not refused.granted:
                if await waiter.wait_async():
                    refused = None  # that was long ago
                waiting = self._operations.wait_for_slot(claim, waiter, refused)
                await self.run(waiting, claim, waiter.sleep_async)
            self._held.on_granted(claim)
        finally:
            waiter.leave()
            self.leave_line(claim, waiter)

    async def free(self, claim: SlotClaim) -> None:
        """Free the slot of a block that has ended. What fails is left to the worker, and so is a
        slot whose task is cancelled here.
        """
        try:
            self.end(claim)
            if not claim.is_gone:
                await self.run(self._operations.free(claim))
        finally:
            self.leave_to_worker(claim)

    def run(
        self,
        operation: Operation[T],
        claim: SlotClaim | None = None,
        sleep: Callable[[float], Awaitable[object]] | None = None,
    ) -> Awaitable[T]:
        """Drive an operation; each of its requests has a deadline of its own. `sleep` can be ended
        by a wake-up.
        """
        if sleep is None or self._store.clock is not SYSTEM:
            sleep = self._store.sleep
        return run_async(operation, functools.partial(self._execute_step, claim), sleep)

    def _execute_step(self, claim: SlotClaim | None, step: StoreStep) -> Awaitable[Any]:
        if isinstance(step, Pipeline):
            return self._store.exchange(step.commands)
        assert not isinstance(step, Fetch)
        if claim is not None:
            return self._store.execute(step, claim.deadline)
        return self._store.execute(step, self.request_deadline())
