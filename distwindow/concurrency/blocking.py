"""`Concurrency`, for threads. `AsyncConcurrency` has the same methods, for tasks. What they do with
the store is in `operations/slots.py`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar

from ..base_limiter import check_timeout
from ..connect import ClockChoice
from ..core.clock import SYSTEM, Clock
from ..core.errors import DistwindowError
from ..core.interrupts import (
    PATCH_STATE,
    check_patched_before_import,
    check_patched_whole,
)
from ..core.key import AnyKey
from ..core.slot_stats import ConcurrencyStats
from ..lifecycle.blocking import BlockingLifecycle
from ..operations.drivers import run_blocking
from ..operations.slot_claim import SlotClaim
from ..operations.slots import exceeded
from ..operations.steps import Fetch, Operation, Pipeline, StoreStep
from ..operations.wait_queue import Waiter
from ..protocol.slot_commands import HoldReply
from ..store.base import Store
from ..worker.shutdown import SHUTDOWN
from .base import BaseConcurrency, BaseKeeper
from .job import SlotJob
from .slot import Slot, SlotBlock

T = TypeVar("T")


class Concurrency(BaseConcurrency, BlockingLifecycle):
    """Lets at most `limit` holders of a key be in their blocks at once, over the whole fleet. Safe
    to share between threads; a forked child does not own the slots of its parent.

        slots = Concurrency("redis://localhost:6379/0", 20)
        with slots.hold("report", timeout=5.0) as slot:
            ...

    `store` is what `Limiter` takes. `limit` is a whole number of at least 1; processes with
    different limits share the slots of a key, and each keeps its own limit.

    A slot is held until its block ends. One worker renews the slots of a process each third of
    `ttl` (seconds), so a process that is killed keeps its slots for no longer than `ttl`. A holder
    that could not be renewed finds `slot.lost` true, from a moment at which the store has not given
    its slot to another one yet.

    `timeout` (seconds) is the time that the store has to answer: a request without a reply is sent
    again after half of it, which is harmless, because a holder has one slot however often it asks.
    `name` is shown by `stats`; by default it is host and process id. `clock`, `prefix`
    and `time` are those of `Limiter`. Raises `ConfigurationError` for arguments that can never
    work; nothing is connected to before the first call.
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
        check_patched_before_import()
        check_patched_whole()
        PATCH_STATE.check()
        super().__init__(store, limit, prefix, ttl, timeout, name, time)
        self._open_store(store, self._timeout / 2, clock, name, time)
        self._use_clock(self._store.clock)
        self._keeper = _Keeper(self._store, self)
        self._add_flush_job(self._held, self._job_name, job_type=SlotJob)
        self._held.ends_all = SHUTDOWN.are_calls_paused

    def hold(self, key: AnyKey, timeout: float | None = None) -> SlotBlock:
        """Return a context manager that waits for a slot of `key` at the beginning of its block,
        behind those who came earlier, and frees it at the end.

        Entering raises `ConcurrencyExceeded` when there was no slot for `timeout` seconds (None: no
        timeout), `StoreTimeout` or `StoreUnavailable`; whatever it raises, nothing stays held.
        """
        return SlotBlock(self._keeper, self._held.new_claim(key), check_timeout(timeout))

    def try_hold(self, key: AnyKey) -> Slot:
        """Return a slot of `key` that is held already, or one that is false if all are held.

        It is freed by `release`, or at the end of a `with` block; keep it until then, because one
        that is garbage-collected is freed as well. While others wait in this object,
        or in another process for the slots that are free, there is none. Raises `StoreTimeout` or
        `StoreUnavailable`.
        """
        claim = self._held.new_claim(key)
        try:
            reply = self._keeper.ask(claim)
            return Slot(self._keeper, claim, None if reply.granted else exceeded(claim, reply))
        except BaseException:
            self._keeper.abandon(claim)
            raise

    def stats(self, key: AnyKey) -> ConcurrencyStats:
        """Return who holds the slots of `key`, and how many wait for one in this object."""
        claim = self._held.new_claim(key)
        return self._keeper.run(self._operations.stats(claim))

    def _end_calls(self) -> None:
        if self._owns_store:
            self._held.close()
        self._held.lose_all("its limit was closed", self._store.clock.monotonic())

    def _flush_rest(self) -> DistwindowError | None:
        failure = self._flush_now(True)
        seconds = self._held.settled_at() - self._store.clock.monotonic()
        if failure is None and seconds > 0:
            # A hold whose reply was lost may be executed until then, and is freed after it.
            self._store.clock.sleep(seconds)
            failure = self._flush_now(True)
        return failure


class _Keeper(BaseKeeper):
    """Drives the operations of slots in the calling thread."""

    def __init__(self, store: Store, base: BaseConcurrency) -> None:
        super().__init__(base, store.clock)
        self._store = store

    def ask(self, claim: SlotClaim) -> HoldReply:
        """Ask once for a slot."""
        self._held.add(claim)
        reply = self.run(self._operations.try_hold(claim), claim)
        if reply.granted:
            self._held.on_granted(claim)
        else:
            self.abandon(claim)
        return reply

    def wait(self, claim: SlotClaim, timeout: float | None) -> None:
        """Wait until `claim` is granted. If this raises, the caller abandons the claim."""
        waiter = Waiter(self._wait_queues, claim.name, timeout)
        try:
            self._held.add(claim)
            others_wait = self._wait_queues.count(claim.name) > 0
            refused = None
            if not others_wait:
                refused = self.run(self._operations.try_hold(claim, waiter), claim)
            if refused is None or not refused.granted:
                if waiter.wait():
                    refused = None  # that was long ago
                waiting = self._operations.wait_for_slot(claim, waiter, refused)
                self.run(waiting, claim, waiter.sleep)
            self._held.on_granted(claim)
        finally:
            try:
                waiter.leave()
            finally:
                waiter.leave()  # a signal handler may have raised in the first
                self.leave_line(claim, waiter)

    def free(self, claim: SlotClaim) -> None:
        """Free the slot of a block that has ended. What fails is left to the worker."""
        try:
            self.end(claim)
            if not claim.is_gone:
                self.run(self._operations.free(claim))
        finally:
            self.leave_to_worker(claim)

    def run(
        self,
        operation: Operation[T],
        claim: SlotClaim | None = None,
        sleep: Callable[[float], object] | None = None,
    ) -> T:
        """Drive an operation; each of its requests has a deadline of its own. `sleep` can be ended
        by a wake-up.
        """
        if sleep is None or self._store.clock is not SYSTEM:
            sleep = self._store.clock.sleep
        return run_blocking(operation, functools.partial(self._execute_step, claim), sleep)

    def _execute_step(self, claim: SlotClaim | None, step: StoreStep) -> Any:
        if isinstance(step, Pipeline):
            return self._store.exchange(step.commands)
        assert not isinstance(step, Fetch)
        if claim is not None:
            return self._store.execute(step, claim.deadline)
        return self._store.execute(step, self.request_deadline())
