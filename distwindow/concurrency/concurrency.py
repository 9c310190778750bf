"""`Concurrency`, for threads, and `AsyncConcurrency`, for tasks: at most so many at once in the
fleet.  What they do with the store is in `operations.py`.
"""

from __future__ import annotations

import functools
import os
import socket
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Any

from ..errors import ConfigurationError, DistwindowError, StoreError, short_repr
from ..lifecycle.connect import store_name
from ..lifecycle.lifecycle import AsyncLifecycle, BlockingLifecycle, Flushed
from ..observer import Observer
from ..ring.clock import SYSTEM, Clock
from ..ring.key import AnyKey, slots_name
from ..ring.store import AsyncStore, Store
from ..runtime.options import ClockChoice, Options, check_timeout
from ..runtime.steps import Operation, run_async, run_blocking
from ..support.async_use import Unawaited, UnawaitedCoroutine
from ..support.fork import register_after_fork
from ..support.locks import PATCH_STATE, check_patched_before_import, check_patched_whole
from ..waiting.waiting import AsyncWaiter, Waiter, WaitQueues
from .commands import Free, HoldReply
from .held import HeldSlots, SlotClaim, SlotJob
from .operations import ConcurrencyStats, SlotOperations, exceeded
from .slot import AsyncSlot, AsyncSlotBlock, Slot, SlotBlock, SlotDriver

_MAX_LIMIT = 1_000_000
_MIN_TTL_S, _MAX_TTL_S = 0.05, 86_400.0


class BaseConcurrency(Flushed):
    """Base class of `Concurrency` and `AsyncConcurrency`, which document the arguments."""

    _instead = "`with slots.hold(key):`"
    _shared = "store and prefix share their slots"
    _driver: SlotDriver
    _new_driver: Callable[[], SlotDriver]

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
        observer: Observer | None = None,
        metric_name: str | None = None,
        key_label: Callable[[AnyKey], str] | None = None,
        time: Clock = SYSTEM,
    ) -> None:
        options = Options(
            prefix=prefix, timeout=timeout, clock=clock, name=name, time=time, observer=observer,
            metric_name=metric_name, key_label=key_label,
        )  # fmt: skip
        if isinstance(limit, bool) or not isinstance(limit, int) or not 1 <= limit <= _MAX_LIMIT:
            raise ConfigurationError(
                f"limit={short_repr(limit)} is not a whole number from 1 to {_MAX_LIMIT:,}: "
                "how many may be held at once"
            )
        _check_seconds("timeout", timeout, 0.0, 3600.0)
        _check_seconds("ttl", ttl, _MIN_TTL_S, _MAX_TTL_S)
        if ttl < 2 * timeout:
            raise ConfigurationError(
                f"ttl={ttl!r} is less than twice timeout={timeout!r}: a slot that is renewed each "
                "third of ttl could be lost while the store is slow to answer; raise ttl"
            )
        self._limit, self._ttl = limit, float(ttl)
        self._prefix = options.prefix
        self._store_name = store_name(store)
        self._timeout = float(timeout)
        self._name = options.name
        self._held = register_after_fork(HeldSlots(limit, round(ttl * 1000), self._owner))
        self._open_store(store, replace(options, timeout=self._timeout / 2))
        self._held.tally = tally = self._add_tally(options, "concurrency")
        if tally is not None:
            tally.levels = self._held.levels
        self._wait_queues = register_after_fork(WaitQueues(self._store.clock))
        self._operations = SlotOperations(
            self._held, self._wait_queues, self._store.clock.monotonic, self._timeout
        )
        self._held.wait_queues = self._wait_queues
        self._driver = self._new_driver()
        self._name_store(self._job_name)
        self._flush_job = self._new_flush_job(self._held, self._job_name, tally, job_type=SlotJob)

    def __repr__(self) -> str:
        return (
            f"{type(self).__name__}({self._store_name!r}, {self._limit}, prefix={self._prefix!r}, "
            f"ttl={self._ttl:g})"
        )

    @property
    def limit(self) -> int:
        """The number of slots of a key that may be held at once."""
        return self._limit

    @property
    def prefix(self) -> str:
        """The beginning of the names of all keys."""
        return self._prefix

    @property
    def ttl(self) -> float:
        """Seconds for which a holder that was not heard of keeps its slot."""
        return self._ttl

    @property
    def _job_name(self) -> str:
        """The name for log lines; without passwords."""
        return f"concurrency limit {self._prefix!r} at {self._store_name}"

    def _new_claim(self, key: AnyKey, timeout: float | None = 0.0) -> SlotClaim:
        return self._held.new_claim(key, slots_name(self._prefix, key), timeout)

    def _owner(self) -> str:
        """Return the name of this process, for people."""
        if self._name is not None:
            return self._name
        host = "".join(char for char in socket.gethostname() if "!" <= char <= "~")
        return f"{host[:20] or 'host'}:{os.getpid()}"


def _check_seconds(name: str, value: object, above: float, most: float) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not above < value <= most:
        raise ConfigurationError(
            f"{name}={short_repr(value)} is not a number of seconds above {above:g}, and at most "
            f"{most:g}"
        )


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
    `name` is shown by `stats`; by default it is host and process id. `clock`, `prefix`, `observer`,
    `metric_name`, `key_label` and `time` are those of `Limiter`. Raises `ConfigurationError` for
    arguments that can never work; nothing is connected to before the first call.
    """

    _driver: _ThreadSlots

    def _new_driver(self) -> SlotDriver:
        return _ThreadSlots(self._store, self._operations)

    def _open_store(self, store: Any, options: Options) -> None:
        check_patched_before_import()
        check_patched_whole()
        PATCH_STATE.check()
        super()._open_store(store, options)

    def hold(self, key: AnyKey, timeout: float | None = None) -> SlotBlock:
        """Return a context manager that waits for a slot of `key` at the beginning of its block,
        behind those who came earlier, and frees it at the end.

        Entering raises `ConcurrencyExceeded` when there was no slot for `timeout` seconds (None: no
        timeout), `StoreTimeout` or `StoreUnavailable`; whatever it raises, nothing stays held.
        """
        if timeout is not None:
            timeout = check_timeout(timeout)
        return SlotBlock(self._driver, self._new_claim(key, timeout), timeout)

    def try_hold(self, key: AnyKey) -> Slot:
        """Return a slot of `key` that is held already, or one that is false if all are held.

        It is freed by `release`, or at the end of a `with` block; keep it until then, because one
        that is garbage-collected is freed as well. While others wait in this object, or in another
        process for the slots that are free, there is none. Raises `StoreError`.
        """
        claim = self._new_claim(key)
        try:
            reply = self._driver.ask(claim)
            return Slot(self._driver, claim, None if reply.granted else exceeded(claim, reply))
        except BaseException:
            self._driver.abandon(claim)
            raise

    def stats(self, key: AnyKey) -> ConcurrencyStats:
        """Return who holds the slots of `key`, and how many wait for one in this object."""
        deadline = self._store.clock.monotonic() + self._operations.request_timeout
        return self._run(self._operations.stats(self._new_claim(key)), deadline)

    def _end_calls(self) -> None:
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


class _ThreadSlots(SlotDriver):
    """Drives the operations of slots in the calling thread."""

    _store: Store

    def ask(self, claim: SlotClaim) -> HoldReply:
        """Ask once for a slot. Refused while others wait in this process: nobody overtakes them."""
        if claim.name in self._wait_queues.by_name:
            return self.answered(claim, HoldReply(False, claim.command.limit, 0, 0), "local")
        try:
            reply = self._ask_first(claim, 0.0)
        except StoreError:
            self.count(claim, "error")
            raise
        return self.answered(claim, reply)

    def wait(self, claim: SlotClaim, timeout: float | None) -> None:
        """Wait until `claim` is granted. If this raises, the caller abandons the claim."""
        began_at = self._monotonic()
        reply = queued_at = None
        try:
            if claim.name not in self._wait_queues.by_name:
                reply = self._ask_first(claim, timeout)
            if reply is None or not reply.granted:
                queued_at = began_at
                waiter = Waiter(self._wait_queues, claim.name, timeout, began_at=began_at)
                self._queue_up(claim, waiter, reply)
            self._held.on_granted(claim)
        except BaseException as exc:  # raised by a signal handler, too
            self.give_up(claim, exc, queued_at)
            raise
        self.count(claim, "allowed", queued_at)

    def _ask_first(self, claim: SlotClaim, timeout: float | None) -> HoldReply:
        """Ask while nobody waits. No operation is needed unless that fails."""
        if self._held.hold_call is not None:
            self._held.hold_call()
        sent_at = self._monotonic()
        self._held.add(claim, sent_at + self._operations.request_timeout)
        try:
            reply = self._store.execute(claim.command, claim.deadline)
        except DistwindowError as exc:
            claim.on_failure(exc, sent_at)
            again = self._operations.ask_again(claim, exc, timeout, sent_at)
            if again is None:
                raise
        else:
            claim.on_reply(reply, sent_at)
            return reply
        return self._run(again, claim)

    def _queue_up(self, claim: SlotClaim, waiter: Waiter, refused: HoldReply | None) -> None:
        """Wait in the queue of this process, and then as its head."""
        try:
            if waiter.wait():
                refused = None  # that was long ago
            waiting = self._operations.wait_for_slot(claim, waiter, refused)
            self._run(waiting, claim, waiter.sleep)
        finally:
            try:
                waiter.leave()
            finally:
                waiter.leave()  # a signal handler may have raised in the first

    def free(self, claim: SlotClaim) -> None:
        """Free the slot of a block that has ended. What fails is left to the worker."""
        sent_at = self._monotonic()
        try:
            self._held.end(claim, sent_at + 2 * self._operations.request_timeout)
            free = Free((), slots_name=claim.name, holders=(claim.command.holder,))
            for _ in range(0 if claim.is_gone else 2):
                try:
                    self._store.execute(free, sent_at + self._operations.request_timeout)
                except DistwindowError:
                    sent_at = self._monotonic()
                else:
                    self._held.take_free_reply(claim, sent_at)
                    return
        finally:
            if not claim.is_gone:  # the worker frees it
                self._held.end(claim, claim.free_again_at(self._monotonic(), 0.0))

    def _run(
        self,
        operation: Operation[HoldReply],
        claim: SlotClaim,
        sleep: Callable[[float], object] | None = None,
    ) -> HoldReply:
        """Drive an operation that asks for `claim`. `sleep` can be ended by a wake-up."""
        if sleep is None or self._store.clock is not SYSTEM:
            sleep = self._store.clock.sleep
        return run_blocking(operation, functools.partial(self._execute, claim), sleep)


class AsyncConcurrency(BaseConcurrency, AsyncLifecycle):
    """`Concurrency` for tasks: the same names and signatures, awaited where there is I/O. Safe to
    share between tasks, and between event loops.

    A task that is cancelled at any `await`, while it waits or while it frees its slot, leaves no
    slot held: the worker frees it.
    """

    _driver: _TaskSlots

    def _new_driver(self) -> SlotDriver:
        return _TaskSlots(self._store, self._operations)

    def hold(self, key: AnyKey, timeout: float | None = None) -> AsyncSlotBlock:
        """See `Concurrency.hold`; `async with`."""
        if timeout is not None:
            timeout = check_timeout(timeout)
        return AsyncSlotBlock(self._driver, self._new_claim(key, timeout), timeout)

    def try_hold(self, key: AnyKey) -> Unawaited[AsyncSlot]:
        """See `Concurrency.try_hold`; awaited, as is `release`; no truth value before `await`."""
        return UnawaitedCoroutine(self._try_hold(key))

    async def _try_hold(self, key: AnyKey) -> AsyncSlot:
        claim = self._new_claim(key)
        try:
            reply = await self._driver.ask(claim)
            return AsyncSlot(self._driver, claim, None if reply.granted else exceeded(claim, reply))
        except BaseException:
            self._driver.abandon(claim)
            raise

    async def stats(self, key: AnyKey) -> ConcurrencyStats:
        """See `Concurrency.stats`."""
        deadline = self._store.clock.monotonic() + self._operations.request_timeout
        return await self._run(self._operations.stats(self._new_claim(key)), deadline)

    async def _end_calls(self) -> None:
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


class _TaskSlots(SlotDriver):
    """Drives the operations of slots in the running task; see the one for threads."""

    _store: AsyncStore

    async def ask(self, claim: SlotClaim) -> HoldReply:
        if claim.name in self._wait_queues.by_name:
            return self.answered(claim, HoldReply(False, claim.command.limit, 0, 0), "local")
        try:
            reply = await self._ask_first(claim, 0.0)
        except StoreError:
            self.count(claim, "error")
            raise
        return self.answered(claim, reply)

    async def wait(self, claim: SlotClaim, timeout: float | None) -> None:
        began_at = self._monotonic()
        reply = queued_at = None
        try:
            if claim.name not in self._wait_queues.by_name:
                reply = await self._ask_first(claim, timeout)
            if reply is None or not reply.granted:
                queued_at = began_at
                waiter = AsyncWaiter(self._wait_queues, claim.name, timeout, began_at=began_at)
                await self._queue_up(claim, waiter, reply)
            self._held.on_granted(claim)
        except BaseException as exc:  # raised by a signal handler, too
            self.give_up(claim, exc, queued_at)
            raise
        self.count(claim, "allowed", queued_at)

    async def _ask_first(self, claim: SlotClaim, timeout: float | None) -> HoldReply:
        if self._held.hold_call is not None:
            self._held.hold_call()
        sent_at = self._monotonic()
        self._held.add(claim, sent_at + self._operations.request_timeout)
        try:
            reply = await self._store.execute(claim.command, claim.deadline)
        except DistwindowError as exc:
            claim.on_failure(exc, sent_at)
            again = self._operations.ask_again(claim, exc, timeout, sent_at)
            if again is None:
                raise
        else:
            claim.on_reply(reply, sent_at)
            return reply
        return await self._run(again, claim)

    async def _queue_up(
        self, claim: SlotClaim, waiter: AsyncWaiter, refused: HoldReply | None
    ) -> None:
        try:
            if await waiter.wait_async():
                refused = None  # that was long ago
            waiting = self._operations.wait_for_slot(claim, waiter, refused)
            await self._run(waiting, claim, waiter.sleep_async)
        finally:
            waiter.leave()

    async def free(self, claim: SlotClaim) -> None:
        """See `_ThreadSlots.free`; a slot whose task is cancelled here is the worker's, too."""
        sent_at = self._monotonic()
        try:
            self._held.end(claim, sent_at + 2 * self._operations.request_timeout)
            free = Free((), slots_name=claim.name, holders=(claim.command.holder,))
            for _ in range(0 if claim.is_gone else 2):
                try:
                    await self._store.execute(free, sent_at + self._operations.request_timeout)
                except DistwindowError:
                    sent_at = self._monotonic()
                else:
                    self._held.take_free_reply(claim, sent_at)
                    return
        finally:
            if not claim.is_gone:  # the worker frees it
                self._held.end(claim, claim.free_again_at(self._monotonic(), 0.0))

    def _run(
        self,
        operation: Operation[HoldReply],
        claim: SlotClaim,
        sleep: Callable[[float], Awaitable[object]] | None = None,
    ) -> Awaitable[HoldReply]:
        if sleep is None or self._store.clock is not SYSTEM:
            sleep = self._store.sleep
        return run_async(operation, functools.partial(self._execute, claim), sleep)
