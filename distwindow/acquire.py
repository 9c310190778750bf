"""Calls of a limiter that may have to wait: `acquire`, entries and limited functions."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Generator
from functools import partial
from typing import Any, Generic, TypeAlias, TypeVar

from .away.outages import RETRY_AFTER_S
from .away.policy import StoreErrorPolicy
from .borrow.operations import Borrowing
from .errors import RateLimitExceeded, StoreError
from .options import check_timeout
from .ring.clock import Clock
from .ring.commands import Acquire
from .ring.decision import Decision
from .ring.key import AnyKey
from .runtime.command_cache import CommandCache
from .runtime.steps import Operation, Sleep, StoreStep, run_async, run_blocking
from .shaping.operations import wait_until_paced
from .waiting.waiting import (
    AsyncInterruptibleSleep,
    AsyncPermitWaiter,
    InterruptibleSleep,
    PermitWaiter,
    Turns,
    WaitQueues,
    wait_for_turn,
)


def wait_until_admitted(command: Acquire, waiter: PermitWaiter) -> Operation[Decision]:
    """Send `command` again and again until it is admitted, and sleep for `retry_after` in between.

    Time is taken from the decisions, and so from the store's clock. Raises `RateLimitExceeded` as
    soon as it is certain that the caller's timeout ends before the permits are there.
    """
    began_ms: int | None = None
    timeout = waiter.remaining_s
    while True:
        decision: Decision = yield command
        if decision.allowed:
            return decision
        if decision.reason == "store_down":  # the store may be back, and have room, before that
            decision = decision._replace(retry_after=min(decision.retry_after, RETRY_AFTER_S))
        if began_ms is None:
            began_ms = decision.now_ms
        waited = (decision.now_ms - began_ms) / 1000
        if timeout is not None and waited + decision.retry_after > timeout:
            raise RateLimitExceeded(decision)
        waiter.on_refused(decision)
        yield Sleep(decision.retry_after)


# --------------------------------------------------------------------------------------------------
#
# call                     is sent by                    the caller waits
# an entry, or a limited   `try_acquire`                 until a call that a paced limit has
# function                                               admitted may proceed
# `acquire`                `try_acquire`, then with      in the queue of its key, then for its
#                          the turn that it has          turn in the fleet's virtual line
# `acquire`, `eventual`    `try_acquire`, repeated       in the queue of its key, then for permits
# or of high cost
# `acquire`, paced limit   a command with the time       in the queue, then for its promised
#                          that the caller has left      moment, when the next one is served
# `acquire`, whose store   `try_acquire`, repeated       in the queue of its key, until the store
# is away                                                is back or `on_store_error` admits it
# `acquire`, priority      a command that may borrow     in a queue of its own, then for its
#                                                        bucket, when the next one is served

D = TypeVar("D")  # what a call returns: a decision, or an awaitable one
S = TypeVar("S")  # what sleeping returns: nothing, or something awaitable

_Wait: TypeAlias = "Callable[[PermitWaiter], Operation[Decision]]"


class _BaseAdmission(Generic[D, S]):
    """Base class of both admissions."""

    def __init__(
        self,
        commands: CommandCache,
        queues: WaitQueues,
        borrowing: Borrowing,
        turns: Turns,
        try_acquire: Callable[[AnyKey, int], D],
        execute: Callable[[StoreStep], Any],
        sleep: Callable[[float], S],
        clock: Clock,
        policy: StoreErrorPolicy,
    ) -> None:
        """`execute` returns the reply to a step; `sleep` lets time pass on `clock`, the store's."""
        self._raises_always = policy.raises_always
        self._observed = policy.observed
        self._commands = commands
        self._queues = queues
        self._borrowing = borrowing
        self._turns = turns
        self._try_acquire = try_acquire
        self._execute = execute
        self._sleep = sleep
        self._clock = clock
        self._has_own_moment = commands.command_type.has_own_moment
        self.admit = self._proceed if self._has_own_moment else try_acquire
        """`try_acquire` for callers that proceed as soon as it has admitted them."""

    def _proceed(self, key: AnyKey, cost: int) -> D:
        """Do as `try_acquire`, and wait until an admitted call may proceed."""
        raise NotImplementedError  # threads and tasks wait differently

    def _is_plain(self, priority: bool) -> bool:
        """True if the call is sent by `try_acquire`, and nobody of this limiter waits, whatever the
        key: so it need not queue up. (To look for the queue of its key takes the key's command.)
        """
        return not (priority or self._has_own_moment or self._queues.by_name)

    def _wait_for(
        self, key: AnyKey, cost: int, priority: bool, refused: list[D]
    ) -> tuple[Acquire, _Wait, Callable[[StoreStep], Any]]:
        """Return the command of a call, the operation that waits until it may proceed, and what
        executes the steps of this operation. `refused`: an answer to the call, which takes the
        place of asking once. Raises what `try_acquire` raises for its arguments.
        """
        if priority:
            call = self._borrowing.call(key, cost, priority)
            return call.acquire, call.wait_until_admitted, self._execute
        command = self._commands.acquire_command(key, cost)
        if command.has_own_moment:
            return command, partial(wait_until_paced, command), self._execute
        wait = (
            partial(wait_for_turn, command, self._turns)
            if self._turns.applies_to(command)
            else partial(wait_until_admitted, command)
        )

        def execute(step: StoreStep) -> Any:
            if step is not command:
                return self._execute(step)
            return refused.pop() if refused else self._try_acquire(key, cost)

        return command, wait, execute


class _Answered:
    """A decision to be awaited that is there already."""

    def __init__(self, decision: Decision) -> None:
        self._decision = decision

    def __await__(self) -> Generator[Any, Any, Decision]:
        return self._decision
        yield  # so that this is a generator, as `__await__` has to be


class Admission(_BaseAdmission[Decision, object]):
    """Admits the calls of a `Limiter`."""

    def acquire(self, key: AnyKey, cost: int, timeout: float | None, priority: bool) -> Decision:
        """See `Limiter.acquire`."""
        if timeout is not None:
            timeout = check_timeout(timeout)
        refused: list[Decision] = []
        queues = self._queues
        began_at = queues.clock.monotonic()
        times_freed = queues.times_freed
        if self._is_plain(priority):
            decision = self._try_acquire(key, cost)
            if decision.allowed:
                return decision
            refused.append(decision)
        command, wait, execute = self._wait_for(key, cost, priority, refused)
        waiter = PermitWaiter(queues, command, timeout, priority=priority, began_at=began_at)
        try:
            if waiter.wait() or queues.times_freed != times_freed:
                refused.clear()  # there may be room by now
            sleep = InterruptibleSleep(waiter, self._clock, self._sleep)
            try:
                return self._observed(run_blocking(wait(waiter), execute, sleep))
            except StoreError:
                if self._raises_always:
                    raise
            wait_without_line = wait_until_admitted(command, waiter)
            return run_blocking(wait_without_line, lambda _: self._try_acquire(key, cost), sleep)
        finally:
            try:
                waiter.leave()
            finally:
                waiter.leave()  # a signal handler may have raised in the first

    def _proceed(self, key: AnyKey, cost: int) -> Decision:
        decision = self._try_acquire(key, cost)
        if decision.wait:
            self._sleep(decision.wait)
        return decision


class AsyncAdmission(_BaseAdmission[Awaitable[Decision], Awaitable[object]]):
    """Admits the calls of an `AsyncLimiter`."""

    async def acquire(
        self, key: AnyKey, cost: int, timeout: float | None, priority: bool
    ) -> Decision:
        """See `Limiter.acquire`."""
        if timeout is not None:
            timeout = check_timeout(timeout)
        refused: list[Awaitable[Decision]] = []
        queues = self._queues
        began_at = queues.clock.monotonic()
        times_freed = queues.times_freed
        if self._is_plain(priority):
            decision = await self._try_acquire(key, cost)
            if decision.allowed:
                return decision
            refused.append(_Answered(decision))
        command, wait, execute = self._wait_for(key, cost, priority, refused)
        waiter = AsyncPermitWaiter(queues, command, timeout, priority=priority, began_at=began_at)
        try:
            if await waiter.wait_async() or queues.times_freed != times_freed:
                refused.clear()  # there may be room by now
            sleep = AsyncInterruptibleSleep(waiter, self._clock, self._sleep)
            try:
                return self._observed(await run_async(wait(waiter), execute, sleep))
            except StoreError:
                if self._raises_always:
                    raise
            wait_without_line = wait_until_admitted(command, waiter)
            return await run_async(wait_without_line, lambda _: self._try_acquire(key, cost), sleep)
        finally:
            waiter.leave()

    async def _proceed(self, key: AnyKey, cost: int) -> Decision:
        decision = await self._try_acquire(key, cost)
        if decision.wait:
            await self._sleep(decision.wait)
        return decision
