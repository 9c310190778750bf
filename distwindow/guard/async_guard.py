"""`AsyncGuard`: `Guard` for tasks."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from ..async_limiter import AsyncLimiter
from ..breaker import AsyncCircuitBreaker
from ..concurrency.tasks import AsyncConcurrency
from ..connect import ClockChoice, Consistency, open_async_store
from ..core.clock import SYSTEM, Clock
from ..core.errors import Blocked
from ..failure_types import ErrorTypes
from ..lifecycle.tasks import AsyncClosable
from ..rules import Rule
from ..worker import TASK_WORKER
from .base import BaseGuard, GuardOptions, Parts
from .entry import AsyncGuardEntry
from .lent_store import lend, own
from .system_sampling import SamplingJob


class AsyncGuard(BaseGuard, AsyncClosable):
    """`Guard` for tasks: the same names and arguments, awaited where there is I/O."""

    _awaits_slots = True

    def __init__(
        self,
        store: Any,
        rules: Iterable[Rule] = (),
        *,
        prefix: str = "distwindow",
        consistency: Consistency = "direct",
        sync_interval: float = 0.1,
        share: float | None = None,
        errors: ErrorTypes = Exception,
        ignore: ErrorTypes = Blocked,
        slots: Iterable[Any] = (),
        installed_slots: bool = True,
        sampler: Callable[[], Any] | None = None,
        timeout: float = 0.25,
        clock: ClockChoice = "server",
        name: str | None = None,
        time: Clock = SYSTEM,
    ) -> None:
        options = GuardOptions(
            prefix, consistency, sync_interval, share, errors, ignore, slots, installed_slots,
            sampler, timeout, clock, name, time,
        )  # fmt: skip
        super().__init__(store, rules, options)
        self._store = open_async_store(store, timeout=timeout, clock=clock, name=name, time=time)
        self._owns_store = self._store is not store
        self._clock = self._store.clock
        lent = lend(self._store, self._store_name, owned=self._owns_store)
        shared: Any = {"prefix": prefix, "time": time}
        of_limiter: Any = {"timeout": timeout, "clock": clock, **shared}
        counting: Consistency = "direct" if consistency == "direct" else "eventual"
        self._make_chains(
            Parts(
                lambda limit: AsyncLimiter(
                    lent, limit, consistency=consistency, sync_interval=sync_interval, share=share,
                    **of_limiter,
                ),
                lambda limit: AsyncLimiter(
                    lent, limit, consistency=counting, sync_interval=sync_interval, **of_limiter
                ),
                lambda limit: AsyncLimiter(lent, limit, **of_limiter),
                lambda limit: AsyncConcurrency(
                    lent, limit, timeout=2 * timeout, ttl=max(30.0, 4 * timeout), name=name,
                    **shared,
                ),
                lambda rule: AsyncCircuitBreaker(
                    lent, rule, errors=errors, ignore=ignore, timeout=timeout, clock=clock,
                    **shared,
                ),
                lambda sampling: TASK_WORKER.add_limiter(
                    sampling, sampling.take_async, self._clock, name=self._name,
                    job_type=SamplingJob,
                ),
            )
        )  # fmt: skip
        own(self._parts.values(), lent)

    def entry(
        self,
        resource: str,
        origin: str | None = None,
        cost: int = 1,
        *,
        context: str = "",
        any_thread: bool = False,
    ) -> AsyncGuardEntry:
        """See `Guard.entry`; `async with`."""
        chain, call = self._begin(resource, origin, cost, context)
        return AsyncGuardEntry(self, chain, call, any_thread, self._store.sleep)

    async def flush(self) -> None:
        """See `Guard.flush`."""
        failure: Exception | None = None
        if self._sampling_job is not None:
            self._sampling_job.record_flush(await self._sampling_job.flush(False))
        for part in self._parts.values():
            try:
                await part.flush()
            except Exception as exc:
                failure = failure or exc
        if failure is not None:
            raise failure

    async def _close(self) -> None:
        self._is_closed = True
        if self._sampling_job is not None:
            await TASK_WORKER.detach(self._sampling_job)
        for part in self._parts.values():
            await part.aclose()
        if self._owns_store:
            await self._store.aclose()
