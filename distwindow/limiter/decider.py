"""What answers the calls of a limiter: this process, the store, or `on_store_error`.

    call                     is answered by                 the caller waits
    `try_acquire`            `decide_locally`; else the     -
                             store
    `priority`, `enqueue`,   the store                      -
    several keys
    an entry, or a limited   as `try_acquire`               until a call that a paced limit has
    function                                                admitted may proceed
    `acquire`                as `try_acquire`, then with    in the queue of its key, then for its
                             the turn that it has           turn in the fleet's virtual line
    `acquire`, `eventual`    as `try_acquire`, repeated     in the queue of its key, then for
    or of high cost                                         permits
    `acquire`, paced limit   a command with the time        in the queue, then for its promised
                             that the caller has left       moment, when the next one is served
    `acquire`, whose store   as `try_acquire`, repeated     in the queue of its key, until the store
    is away                                                 is back or `on_store_error` admits it
    `acquire`, priority      a command that may borrow      in a queue of its own, then for its
                                                            bucket, when the next one is served

Where the store gives no answer, `on_store_error` does. Each decision of the store and of
`on_store_error` passes `answered` as it is made, also those by which a call that waits is refused.
Those of `decide_locally` do not, so that a leased call costs nothing more: they are counted where
they are made, in the state of their key.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Generator, Sequence
from functools import partial
from typing import Any, NoReturn, TypeAlias

from ..away.outages import RETRY_AFTER_S
from ..away.policy import StoreErrorPolicy
from ..borrow.operations import Borrowing
from ..errors import DistwindowError, RateLimitExceeded, StoreError, closed_failure
from ..lifecycle.connect import make_strategy
from ..observer import COUNTED_IN_STATES, NO_ROW, Tally, TimedStore
from ..ring.commands import Acquire, Flush
from ..ring.decision import Charge, Decision, limits_in
from ..ring.decisions import decision_of
from ..ring.key import AnyKey
from ..ring.limit import Limit
from ..ring.stats import Stats
from ..rules.shadow import Shadow, admitted
from ..runtime import operations as key_operations
from ..runtime.command_cache import CommandCache
from ..runtime.flush import send_all
from ..runtime.options import Options, check_timeout
from ..runtime.steps import Operation, Sleep, StoreStep, run_async, run_blocking, send
from ..shaping.operations import wait_until_paced
from ..support.async_use import Unawaited, running_loop
from ..support.first_use import FirstUse
from ..support.fork import register_after_fork
from ..waiting.waiting import AsyncPermitWaiter, PermitWaiter, Turns, WaitQueues, wait_for_turn

_Wait: TypeAlias = "Callable[[PermitWaiter], Operation[Decision]]"


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


def raise_closed(key: AnyKey, cost: int) -> NoReturn:
    """Take the place of `decide_locally` in what is closed."""
    raise closed_failure()


class BaseDecider:
    """Base class of `Decider` and `AsyncDecider`: the parts of one limiter that answer."""

    try_acquire: Callable[[AnyKey, int], Any]
    _proceed: Callable[[AnyKey, int], Any]
    """Do as `try_acquire`, and wait until an admitted call may proceed."""
    record: Callable[[Decision, bool, int], Any]
    """Count the end of an admitted call: whether it failed, and its response time in ms."""

    def __init__(
        self,
        options: Options,
        commands: CommandCache,
        store: Any,
        store_id: str,
        run: Callable[..., Any],
        execute: Callable[[float | None, StoreStep], Any],
        tally: Tally | None = None,
    ) -> None:
        """`store_id` is another one for each store. `run` drives an operation, with one deadline;
        `execute` sends one step. `tally` adds up what is decided.
        """
        self.commands = commands
        self.store: Any = store
        is_timed = isinstance(store, TimedStore)
        self._untimed: Any = store.untimed if is_timed else store
        self._took: Callable[[float], object] | None = store.took if is_timed else None
        self.clock = store.clock
        self.strategy = make_strategy(options, commands, store)
        self._tally = tally
        if tally is not None:
            self.strategy.tell(tally)
        self.decide_locally = self.strategy.decide_locally
        """Answer a call by what this process holds; None where the store has to be asked."""
        self.policy = StoreErrorPolicy(options, commands, store, self.strategy, store_id)
        if tally is not None:
            self.policy.flush_source.sources += (tally,)
            self.policy.add_listener(tally.changed)
        self.run = run
        self._execute = execute
        self._options = options
        self._observe = self.policy.observe
        self._monotonic = store.clock.monotonic
        self._has_own_moment = commands.command_type.has_own_moment
        if options.shadow:
            self._put_in_shadow()

    @FirstUse
    def queues(self) -> WaitQueues:
        return register_after_fork(WaitQueues(self._options.time))

    @property
    def admit(self) -> Callable[[AnyKey, int], Any]:
        """`try_acquire` for callers that proceed as soon as it has admitted them."""
        return self._proceed if self._has_own_moment else self.try_acquire

    @property
    def borrowing(self) -> Borrowing:
        """The priority calls."""
        source = self.store.decided_by
        return Borrowing(self.commands, self.strategy, source, self._options, self.answered)

    @property
    def turns(self) -> Turns:
        """The calls that take places in lines."""
        source = self.store.decided_by
        return Turns(self.commands, self.strategy, source, self.clock, self.answered)

    def answered(self, decision: Decision) -> Decision:
        """Tell what listens to decisions of this one, as it is made, and return it. All pass here
        but those of `decide_locally`: see above.
        """
        tally = self._tally
        if tally is not None:
            rows = tally.row_of_key
            row = tally.last_row if rows is None else rows.get(decision[1], NO_ROW)
            if decision[3] is row.limit and decision[8] is row.reason and decision[9] is row.source:
                row.calls += 1  # as `Tally.decided` does, which would be three calls more
                row.permits += decision[2]
                if decision[4] < row.few:
                    row.near += 1
                if tally.is_idle:
                    tally.schedule_flush()
            elif decision.source not in COUNTED_IN_STATES:
                tally.decided(decision)
        if self._observe is not None and decision.source == "store":
            self._observe(decision)
        return decision

    def _put_in_shadow(self) -> None:
        name = self._options.metric_name or self._options.prefix
        shadow = Shadow(name, self._monotonic)
        self.policy.flush_source.sources += (shadow,)
        most = self.strategy.max_cost(self.commands.limits)
        self.commands.clamps_costs = True
        self.decide_locally = shadow.admitting(self.decide_locally, most, self.policy.decide)
        answered = self.answered
        self.answered = lambda decision: shadow.admit(answered(decision))  # type: ignore[method-assign]

    def _by_policy(self, key: AnyKey, cost: int, error: StoreError) -> Decision:
        """Return what `on_store_error` decides."""
        try:
            return self.answered(self.policy.decide(key, cost, error))
        except Exception as exc:
            self._tell_failed(exc, key, cost, self.commands.limits)
            raise

    def _not_decided(
        self, key: AnyKey, cost: int, error: DistwindowError, sent_at: float | None
    ) -> Decision:
        """Answer a call that the store has not decided, or raise `error`. `sent_at` is None where
        the exchange is told already.
        """
        if sent_at is not None:
            self.store.exchange_failed("acquire", sent_at, error)
        if not isinstance(error, StoreError):
            raise error
        return self._by_policy(key, cost, error)

    def _tell_failed(
        self, error: Exception, key: AnyKey, cost: int, limits: Sequence[Limit]
    ) -> None:
        """Tell of a call that raises while the store is away. A function that is `on_store_error`
        may raise anything: a `RateLimitExceeded` is its refusal.
        """
        if self._tally is None:
            return
        if isinstance(error, RateLimitExceeded):
            self._tally.decided(error.decision)
        else:
            self._tally.failed(key, cost, limits)

    def _by_policy_for_all(
        self, calls: Sequence[tuple[Charge, ...]], error: StoreError
    ) -> Decision:
        """Return what `on_store_error` decides of a call over several keys."""
        try:
            return self.answered(self.policy.decide_all(calls, error))
        except Exception as exc:
            _, _, cost, key, _ = calls[0][0]
            self._tell_failed(exc, key, cost, limits_in(itertools.chain(*calls)))
            raise

    def _waited(self, decision: Decision, began_at: float) -> Decision:
        """Note for how long a call has waited for `decision`, and return it."""
        if self._tally is not None:
            self._tally.waited(decision, self.queues.clock.monotonic() - began_at)
        return decision

    def close(self) -> None:
        """Have each call raise from here on, waiting ones too."""
        self.decide_locally = raise_closed
        self.commands.close()
        self.queues.close()

    def stop_counting(self) -> None:
        """Count nothing any more, as no flush would send it."""
        self.strategy.close()
        self.policy.close()

    def stats(self, key: AnyKey) -> Operation[Stats]:
        return key_operations.stats(self.strategy, self.commands, key, self.clock)

    def refund(self, decision: Decision) -> Operation[int]:
        """Give back what `decision` was charged. Return how many permits are given back."""
        if self._options.shadow and getattr(decision, "charged", ()) is None:
            return 0  # it was let through
        strategy = self.policy.strategy_of(decision)
        count = yield from key_operations.refund(strategy, decision, self.clock)
        if count and decision.charged:
            self.queues.on_freed(decision.charged)
        return count

    def reset(self, key: AnyKey, on_reset: Callable[[AnyKey], object]) -> Operation[None]:
        """Empty the windows of a key, and drop what is known of them. `on_reset` is called with the
        key, as it is kept, before who waits for its permits is woken.
        """
        charges = self.commands.acquire_command(key).charges
        yield from send(self.commands.reset_command(charges))
        self.strategy.reset(charges[0].key)
        self.policy.reset(key)
        on_reset(charges[0].key)
        self.queues.on_freed(charges)

    def try_special(self, key: AnyKey, cost: int, priority: object, enqueue: object) -> Any:
        """Answer a call with `priority` or `enqueue`."""
        return self.run(self._special(key, cost, priority, enqueue))

    def _special(
        self, key: AnyKey, cost: int, priority: object, enqueue: object
    ) -> Operation[Decision]:
        try:
            if enqueue:
                return (yield from self.turns.attempt(key, cost, enqueue, priority))
            return (yield from self.borrowing.call(key, cost, priority).attempt())
        except StoreError as exc:
            return self._by_policy(key, cost, exc)

    def _record(self, decision: Decision, failed: bool, rt_ms: int) -> Flush | None:
        """Count the end of an admitted call; return what a store in this process has to count."""
        if decision.charged is None:
            return None  # let through by `on_store_error`: it is not counted
        return self.strategy.record(decision, failed, rt_ms)

    def peek(self, key: AnyKey, cost: int) -> Any:
        """Return the answer that a call would get, and count nothing."""
        return self.run(self._peek(key, cost))

    def _peek(self, key: AnyKey, cost: int) -> Operation[Decision]:
        charges = self.commands.acquire_command(key, cost).charges
        decision = self.strategy.peek(charges[0].key)
        try:
            if decision is None:
                command = self.commands.peek_command(charges)
                reply = yield from send(command)
                decision = decision_of(command, reply, self.store.decided_by)
        except StoreError as exc:
            return self.policy.peek(key, exc)
        return admitted(decision) if self._options.shadow else decision

    def acquire_all(self, calls: Sequence[tuple[Charge, ...]], enqueue: bool = False) -> Any:
        """Answer a call over several keys: `calls` has the charges of each."""
        return self.run(self._acquire_all(calls, enqueue))

    def _acquire_all(
        self, calls: Sequence[tuple[Charge, ...]], enqueue: bool
    ) -> Operation[Decision]:
        command = self.commands.acquire_all_command(calls)
        keys = [charge.key for charge in command.charges]
        try:
            yield from self.strategy.lease_fetch_waits(keys)
            yield from send_all(self.strategy.before_multi_key(keys), self._monotonic)
            if enqueue:
                return (yield from self.turns.attempt_all(command, enqueue))
            decision: Decision = yield command
            return self.answered(decision)
        except StoreError as exc:
            return self._by_policy_for_all(calls, exc)

    def _is_plain(self, priority: bool) -> bool:
        """True if the call is sent by `try_acquire`, and nobody of this limiter waits, whatever the
        key: so it need not queue up. (To look for the queue of its key takes the key's command.)
        """
        return not (priority or self._has_own_moment or self.queues.by_name)

    def _wait_for(self, key: AnyKey, cost: int, priority: bool) -> tuple[Acquire, _Wait]:
        """Return the command of a call, and the operation that waits until it may proceed. Raises
        what `try_acquire` raises for its arguments.
        """
        if priority:
            call = self.borrowing.call(key, cost, priority)
            return call.acquire, call.wait_until_admitted
        command = self.commands.acquire_command(key, cost)
        if command.has_own_moment:
            return command, partial(wait_until_paced, command)
        turns = self.turns
        if turns.applies_to(command):
            return command, partial(wait_for_turn, command, turns)
        return command, partial(wait_until_admitted, command)


class Decider(BaseDecider):
    """Answers the calls of a `Limiter`, which documents them."""

    def try_acquire(self, key: AnyKey, cost: int) -> Decision:
        decision = self.decide_locally(key, cost)
        return self.ask(key, cost) if decision is None else decision

    def ask(self, key: AnyKey, cost: int) -> Decision:
        """Return the answer to a call after `decide_locally` has returned None."""
        sent_at = self._monotonic()
        command = self.strategy.store_command(key, cost)
        took = self._took
        try:
            if command is None:
                decision: Decision = self.run(self.strategy.acquire_remote(key, cost))
            else:  # the same as `acquire_remote`, without a generator and its driver
                decision = self._untimed.decide(command)
                if took is not None:  # `self.store.decide` would be one more call
                    took(self._monotonic() - sent_at)
                    took = None  # it is told
                if not decision[0]:
                    self.strategy.cache_refusal(decision[1], decision, sent_at)
        except DistwindowError as exc:
            is_told = took is None or command is None
            return self._not_decided(key, cost, exc, None if is_told else sent_at)
        return self.answered(decision)

    def acquire(
        self,
        key: AnyKey,
        cost: int,
        timeout: float | None,
        priority: bool,
        first: Decision | None = None,
    ) -> Decision:
        """Answer a call that waits until it is admitted; see the table above. `first` is what
        `try_acquire` has just returned for it, if it was asked.
        """
        if timeout is not None:
            timeout = check_timeout(timeout)
        refused: list[Decision] = []
        is_told = False  # True while `try_acquire` is asked, which tells of what it raises itself
        queues = self.queues
        began_at = queues.clock.monotonic()
        times_freed = queues.times_freed
        if first is None and self._is_plain(priority):
            first = self.try_acquire(key, cost)
        if first is not None:
            if first.allowed:
                return first
            refused.append(first)  # takes the place of asking once
        command, wait = self._wait_for(key, cost, priority)

        def execute(step: StoreStep) -> Any:
            nonlocal is_told
            is_told = step is command
            if is_told:
                return refused.pop() if refused else self.try_acquire(key, cost)
            reply = self._execute(None, step)
            return self.answered(reply) if isinstance(step, Acquire) else reply

        waiter = PermitWaiter(queues, command, timeout, priority=priority, began_at=began_at)
        try:
            if waiter.wait() or queues.times_freed != times_freed:
                refused.clear()  # there may be room by now
            sleep = partial(waiter.sleep_until_freed, self.clock)
            try:
                decision = run_blocking(wait(waiter), execute, sleep)
            except StoreError as exc:
                if self.policy.raises_always:
                    if not is_told:
                        self._tell_failed(exc, key, cost, self.commands.limits)
                    raise
                decision = run_blocking(wait_until_admitted(command, waiter), execute, sleep)
            return self._waited(decision, began_at)
        except RateLimitExceeded as exc:
            self._waited(exc.decision, began_at)
            raise
        finally:
            try:
                waiter.leave()
            finally:
                waiter.leave()  # a signal handler may have raised in the first

    def record(self, decision: Decision, failed: bool, rt_ms: int) -> None:
        command = self._record(decision, failed, rt_ms)
        if command is not None:  # a store in this process counts it
            self.run(send(command))

    def _proceed(self, key: AnyKey, cost: int) -> Decision:
        decision = self.try_acquire(key, cost)
        if decision.wait:
            self.clock.sleep(decision.wait)
        return decision


_YIELD_EVERY = 64
"""Calls in a row that may return without letting other tasks run."""


class Attempt(Unawaited[Decision]):
    """`try_acquire` without `priority` and `enqueue`, which begins when it is awaited."""

    __slots__ = ("_cost", "_decider", "_key")

    def __init__(self, decider: AsyncDecider, key: AnyKey, cost: int) -> None:
        self._decider = decider
        self._key = key
        self._cost = cost

    def __await__(self) -> Generator[Any, Any, Decision]:
        decider = self._decider
        if decider.calls_without_wait >= _YIELD_EVERY:
            # Let other tasks run: a loop of calls that are decided here would stop them all. Before
            # the decision, which would be lost if this were cancelled.
            decider.calls_without_wait = 0
            running_loop()  # only asyncio takes a bare `yield`
            yield
        decision = decider.decide_locally(self._key, self._cost)
        if decision is not None:
            decider.calls_without_wait += 1
            return decision
        return (yield from decider.ask(self._key, self._cost))


class AsyncDecider(BaseDecider):
    """Answers the calls of an `AsyncLimiter`."""

    calls_without_wait = 0
    """How many calls in a row have returned without awaiting anything."""

    def try_acquire(self, key: AnyKey, cost: int) -> Unawaited[Decision]:
        return Attempt(self, key, cost)

    async def try_special(
        self, key: AnyKey, cost: int, priority: object, enqueue: object
    ) -> Decision:
        if self.calls_without_wait >= _YIELD_EVERY:
            self.calls_without_wait = 0
            running_loop()
            await asyncio.sleep(0)
        decision: Decision = await super().try_special(key, cost, priority, enqueue)
        if decision.source != "store":
            self.calls_without_wait += 1
        return decision

    async def acquire(
        self,
        key: AnyKey,
        cost: int,
        timeout: float | None,
        priority: bool,
        first: Decision | None = None,
    ) -> Decision:
        if timeout is not None:
            timeout = check_timeout(timeout)
        refused: list[Decision] = []
        is_told = False  # True while `try_acquire` is asked, which tells of what it raises itself
        queues = self.queues
        began_at = queues.clock.monotonic()
        times_freed = queues.times_freed
        if first is None and self._is_plain(priority):
            first = await self.try_acquire(key, cost)
        if first is not None:
            if first.allowed:
                return first
            refused.append(first)
        command, wait = self._wait_for(key, cost, priority)

        async def execute(step: StoreStep) -> Any:
            nonlocal is_told
            is_told = step is command
            if is_told:
                return refused.pop() if refused else await self.try_acquire(key, cost)
            reply = await self._execute(None, step)
            return self.answered(reply) if isinstance(step, Acquire) else reply

        waiter = AsyncPermitWaiter(queues, command, timeout, priority=priority, began_at=began_at)
        try:
            if await waiter.wait_async() or queues.times_freed != times_freed:
                refused.clear()  # there may be room by now
            sleep = partial(waiter.sleep_until_freed_async, self.store)
            try:
                decision = await run_async(wait(waiter), execute, sleep)
            except StoreError as exc:
                if self.policy.raises_always:
                    if not is_told:
                        self._tell_failed(exc, key, cost, self.commands.limits)
                    raise
                decision = await run_async(wait_until_admitted(command, waiter), execute, sleep)
            return self._waited(decision, began_at)
        except RateLimitExceeded as exc:
            self._waited(exc.decision, began_at)
            raise
        finally:
            waiter.leave()

    async def record(self, decision: Decision, failed: bool, rt_ms: int) -> None:
        command = self._record(decision, failed, rt_ms)
        if command is not None:
            await self.run(send(command))

    async def peek(self, key: AnyKey, cost: int) -> Decision:
        decision: Decision = await super().peek(key, cost)  # its deadline is from here on
        return decision

    def ask(self, key: AnyKey, cost: int) -> Generator[Any, Any, Decision]:
        self.calls_without_wait = 0
        sent_at = self._monotonic()
        command = self.strategy.store_command(key, cost)
        took = self._took
        try:
            if command is None:
                remote = self.run(self.strategy.acquire_remote(key, cost))
                decision: Decision = yield from remote.__await__()
            else:
                decision = yield from self._untimed.decide(command).__await__()
                if took is not None:
                    took(self._monotonic() - sent_at)
                    took = None  # it is told
                if not decision[0]:
                    self.strategy.cache_refusal(decision[1], decision, sent_at)
        except DistwindowError as exc:
            is_told = took is None or command is None
            return self._not_decided(key, cost, exc, None if is_told else sent_at)
        return self.answered(decision)

    async def _proceed(self, key: AnyKey, cost: int) -> Decision:
        decision = await self.try_acquire(key, cost)
        if decision.wait:
            await self.store.sleep(decision.wait)
        return decision
