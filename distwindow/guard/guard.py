"""`Guard`, for threads. `AsyncGuard` has the same methods, for tasks."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from ..breaker import CircuitBreaker
from ..concurrency.blocking import Concurrency
from ..connect import ClockChoice, Consistency, open_store
from ..core.clock import SYSTEM, Clock
from ..core.errors import Blocked
from ..failure_types import ErrorTypes
from ..lifecycle.blocking import BlockingClosable
from ..limiter import Limiter
from ..rules import Rule
from ..worker import THREAD_WORKER
from .base import BaseGuard, GuardOptions, Parts
from .entry import GuardEntry
from .lent_store import lend, own
from .system_sampling import SamplingJob


class Guard(BaseGuard, BlockingClosable):
    """Sentinel's rules around calls, decided for the whole fleet. Safe to share between threads;
    survives `fork`.

        guard = Guard("redis://localhost:6379/0", [FlowRule("GET:/orders", 100)])
        with guard.entry("GET:/orders", origin="app-a"):
            answer()

    `store` is what a `Limiter` takes. `rules` are `FlowRule`, `DegradeRule`, `AuthorityRule` and
    `SystemRule` objects; a resource without rules passes. A call is refused by the first slot that
    refuses it: authority, system, flow, breakers, in this order; what the slots before have taken
    is given back.

    `errors` are the exceptions that count as failures of a block, for breakers and statistics;
    `ignore` are those that say nothing (by default refusals, as in Sentinel's `Tracer`).

    `slots` are slots of your own (`ChainSlot`), which stand where their `order` says.
    Installed packages add theirs by entry points of the group `distwindow.slots`, unless
    `installed_slots` is False.

    `sampler` returns the load and the CPU usage (0 to 1) of the machine for a `SystemRule`; by
    default psutil does (extra `system`). It is called when the guard is made, and then once
    a second by the background worker while calls are made, never in a call.

    `consistency` is that of the flow rules with the grade `"qps"`, with `sync_interval` (seconds)
    and `share` (0 to 1) for `"eventual"`, as in `Limiter`; so are `prefix`, `timeout` (seconds),
    `clock`, `name` and `time`. Raises `ConfigurationError` for rules and arguments that can never
    work; nothing is connected to before the first call.
    """

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
        self._store = open_store(store, timeout=timeout, clock=clock, name=name, time=time)
        self._owns_store = self._store is not store
        self._clock = self._store.clock
        lent = lend(self._store, self._store_name, owned=self._owns_store)
        shared: Any = {"prefix": prefix, "time": time}
        of_limiter: Any = {"timeout": timeout, "clock": clock, **shared}
        counting: Consistency = "direct" if consistency == "direct" else "eventual"
        self._make_chains(
            Parts(
                lambda limit: Limiter(
                    lent, limit, consistency=consistency, sync_interval=sync_interval, share=share,
                    **of_limiter,
                ),
                lambda limit: Limiter(
                    lent, limit, consistency=counting, sync_interval=sync_interval, **of_limiter
                ),
                lambda limit: Limiter(lent, limit, **of_limiter),
                lambda limit: Concurrency(
                    lent, limit, timeout=2 * timeout, ttl=max(30.0, 4 * timeout), name=name,
                    **shared,
                ),
                lambda rule: CircuitBreaker(
                    lent, rule, errors=errors, ignore=ignore, timeout=timeout, clock=clock,
                    **shared,
                ),
                lambda sampling: THREAD_WORKER.add_limiter(
                    sampling, sampling.take, self._clock, name=self._name,
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
    ) -> GuardEntry:
        """Return a context manager for one call of `resource` by `origin` (1 to 128 characters;
        None for a call without one): raises a `Blocked` at
        the beginning of its block if a rule refuses the call, and records how the block ends.
        `fail()` of the object that `as` gives counts it as failed though it raises nothing.

        `context` is the entrance from which the call comes, for flow rules with the strategy
        `"chain"`; by default that of `call_context`, which has an origin, too.

        The entry is left in the thread that has entered it, or in any with `any_thread`; else
        `RuntimeError` is raised. `cost` is the number of permits that flow rules count. A cost that
        no window of a flow rule admits (above its `count`; with a warm-up, above what a cold
        resource admits) is a `ValueError`; a `SystemRule` refuses a cost above its `qps` each time.
        A `StoreError` is raised where the store does not answer a flow rule.
        """
        chain, call = self._begin(resource, origin, cost, context)
        return GuardEntry(self, chain, call, any_thread, self._clock.sleep)

    def flush(self) -> None:
        """Send now what was counted in this process, and sample the machine if a `SystemRule`
        needs that; with a clock of one's own (`time=`) nothing else does. Raises what the first of
        the guard's limiters and breakers raised, when all have tried.
        """
        failure: Exception | None = None
        if self._sampling_job is not None:
            self._sampling_job.record_flush(self._sampling_job.flush(False))
        for part in self._parts.values():
            try:
                part.flush()
            except Exception as exc:
                failure = failure or exc
        if failure is not None:
            raise failure

    def _close(self) -> None:
        self._is_closed = True
        if self._sampling_job is not None:
            THREAD_WORKER.detach(self._sampling_job)
        for part in self._parts.values():
            part.close()
        if self._owns_store:
            self._store.close()
