"""Waiting for permits: queues of this process, the fleet's virtual line, and the head's sleep."""

from __future__ import annotations

import asyncio
import math
import threading
from collections import deque
from collections.abc import Callable, Iterable
from contextlib import suppress
from itertools import islice
from typing import Any, NamedTuple

from ..errors import ConfigurationError, RateLimitExceeded, closed_failure
from ..ring.clock import SYSTEM, Clock
from ..ring.commands import Acquire
from ..ring.decision import Charge, Decision, Source, limits_in
from ..ring.key import AnyKey
from ..ring.limit import max_cost
from ..ring.store import AsyncStore
from ..runtime.command_cache import CommandCache
from ..runtime.steps import Operation, Sleep, send
from ..runtime.strategy import Strategy
from ..support.async_use import running_loop
from ..support.locks import WakeUp
from .commands import AcquireTurn, turn_decision


class WaitQueues:
    """The queues of one limiter, by ring and priority, or by slots. Threads may share it.

    Calls of one key that wait in one process are served in the order they came:

      from     event                                                 to
      -        joins an empty queue                                  head
      -        joins                                                 waiting
      waiting  the one before leaves                                 head
      waiting  the head is refused for longer than its own timeout   left, with RateLimitExceeded
      waiting  its timeout ends, and the head was refused            left, with RateLimitExceeded
      waiting  its timeout ends, and nobody was refused              sends out of turn
      head     is refused                                            head, asleep until its permits
      head     permits of the key are given back in this process     head, and asks at once
      head     is admitted, or raises                                left; the next is woken

    Only the head of a queue sends commands, and the others wait for it. So a queue costs the store
    one command for each admission and one for each refusal of its head, however long it is.

               the head sends             the others wait for the one before
      store <- [waiter] <- [waiter] <- [waiter] <- new callers
    """

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self._closed = False
        self.after_fork()

    def close(self) -> None:
        """Wake all waiters, who raise then, as nobody will serve them any more."""
        with self._lock:
            self._closed = True
            for queue in self.by_name.values():
                for waiter in queue.waiting:
                    waiter.wake()

    def check_open(self) -> None:
        if self._closed:
            raise closed_failure()

    def after_fork(self) -> None:
        """Start without waiters: their threads exist in the parent only."""
        # Re-entrant, as a signal handler may wait for the limiter that it has interrupted.
        self._lock = threading.RLock()
        self.by_name: dict[bytes, _Queue] = {}
        """The queues in which somebody waits."""
        self.times_freed = 0
        """How often permits were given back in this process."""

    def join(self, waiter: Waiter) -> None:
        """Put `waiter` at the end of its queue."""
        name = waiter.name
        with self._lock:
            # The waiter has its queue first, so that it can leave if it is interrupted here.
            waiter._queue = queue = self.by_name.get(name) or _Queue()
            self.by_name[name] = queue
            if waiter._deadline is not None:
                queue.earliest_deadline = min(queue.earliest_deadline, waiter._deadline)
            queue.waiting.append(waiter)

    def wake_too_late(self, head: Waiter, queue: _Queue, until: float) -> None:
        """Wake those behind `head` whose timeouts end before `until` (monotonic seconds), when the
        refusal of the head ends. They raise at once; nobody else is woken.
        """
        if until <= queue.earliest_deadline:
            return
        with self._lock:
            earliest = math.inf
            for waiter in list(queue.waiting):
                if waiter is not head and waiter._deadline is not None:
                    earliest = min(earliest, waiter._deadline)
                    if waiter._deadline < until:
                        waiter.wake()
            queue.earliest_deadline = earliest

    def on_freed(self, charges: Iterable[Charge]) -> None:
        """Wake the heads of the queues of these rings to ask at once: permits were given back."""
        self.times_freed += 1
        for charge in charges:
            for name in (charge.ring, charge.ring + PRIORITY):
                if name in self.by_name:
                    self.wake_head(name, freed=True)

    def wake_head(self, name: bytes, *, freed: bool = False) -> None:
        """Wake the head of the queue of this name, if there is one; `freed`: to ask at once."""
        with self._lock:
            queue = self.by_name.get(name)
            if queue is not None and queue.waiting:
                if freed:
                    queue.freed, queue.refusal = True, None
                queue.waiting[0].wake()

    def first(self, name: bytes, count: int) -> list[Waiter]:
        with self._lock:
            queue = self.by_name.get(name)
            return [] if queue is None else list(islice(queue.waiting, count))

    def count(self, name: bytes) -> int:
        queue = self.by_name.get(name)
        return 0 if queue is None else len(queue.waiting)

    def leave(self, waiter: Waiter, queue: _Queue) -> None:
        with self._lock:
            if waiter in queue.waiting:
                queue.waiting.remove(waiter)
            if queue.waiting:
                queue.waiting[0].wake()
            elif self.by_name.get(waiter.name) is queue:
                del self.by_name[waiter.name]


class _Queue:
    __slots__ = ("earliest_deadline", "free_calls", "freed", "refusal", "turn", "waiting")

    def __init__(self) -> None:
        self.waiting: deque[Waiter] = deque()
        """The head comes first."""
        self.refusal: tuple[float, float, Decision] | None = None
        """A head's last refusal: until when, when the head asks again (monotonic), the decision."""
        self.earliest_deadline = math.inf
        """No waiter gives up before this moment (monotonic seconds)."""
        self.freed = False
        """True once permits have been given back in this process, until the head asks again."""
        self.turn: RetryAt | None = None
        """The place of this queue in the line. A head that leaves it to the next one, because it
        was cancelled or its timeout has ended, so leaves no gap.
        """
        self.free_calls = 0
        """How many waiters may ask without waiting for a turn, as there is room for them."""


class RetryAt(NamedTuple):
    """A turn in the virtual line of a ring (`waiting/memory.py`)."""

    turn_ms: int
    """By the clock of the store, ms since the epoch."""
    due_at: float
    """By the monotonic clock of the store, seconds."""


PRIORITY = b":priority"
"""Ends the names of the queues of those who wait with priority."""


class Waiter:
    """One waiter's place in the queue of this name. `wait` until it is the head, and `leave` in any
    case.

    `leave` may be called before it has joined, and again: a waiter that is interrupted by a signal
    handler would otherwise stay in the queue, and nobody behind it would ever be served.
    """

    def __init__(
        self,
        queues: WaitQueues,
        name: bytes,
        timeout: float | None,
        began_at: float | None = None,
    ) -> None:
        """`timeout`: seconds from `began_at` (monotonic; None: now) on; None: without end."""
        self._queues = queues
        self._clock = queues.clock
        self.name = name
        self._began_at = self._clock.monotonic() if began_at is None else began_at
        self._deadline = None if timeout is None else self._began_at + timeout
        self._queue: _Queue | None = None
        self._wake_up = WakeUp()

    @property
    def remaining_s(self) -> float | None:
        """Seconds until the waiter gives up; None: never."""
        return (
            None if self._deadline is None else max(0.0, self._deadline - self._clock.monotonic())
        )

    def wait(self) -> bool:
        """Join the queue, and wait until those before have been served or the timeout is over.
        Return False if there were none. Raises `ConfigurationError` once the queues are closed.
        """
        self._queues.join(self)
        waited = False
        while not self.is_head and (left := self._remaining_s_or_raise()) != 0.0:
            waited = True
            self.sleep(left)
        return waited

    def leave(self) -> None:
        """Leave the queue, and wake the next waiter."""
        queue = self._queue
        if queue is not None:
            self._queues.leave(self, queue)

    def first_waited_ms(self, count: int) -> tuple[int, ...]:
        """Return how long each of the first `count` waiters of the queue has waited, ms."""
        return tuple(waiter.waited_ms for waiter in self._queues.first(self.name, count))

    @property
    def waited_ms(self) -> int:
        return round((self._clock.monotonic() - self._began_at) * 1000)

    def wake(self) -> None:
        """Wake the waiter to look whether it is the head now."""
        self._wake_up.wake()

    def sleep(self, seconds: float | None) -> None:
        """Sleep until woken or `seconds` have passed; None: no end. Raises as `wait` does."""
        self._wake_up.sleep(seconds)
        self._queues.check_open()

    @property
    def is_head(self) -> bool:
        """False for a waiter that sends out of turn."""
        assert self._queue is not None
        return self._queue.waiting[0] is self

    def _remaining_s_or_raise(self) -> float | None:
        return self.remaining_s


class PermitWaiter(Waiter):
    """A waiter for permits. `wait` raises `RateLimitExceeded` when the timeout ends too early for
    them. Its `retry_after` is when the head of the queue has its permits, or its turn: the waiter's
    own are not there before.
    """

    def __init__(
        self,
        queues: WaitQueues,
        command: Acquire,
        timeout: float | None,
        *,
        priority: bool = False,
        began_at: float | None = None,
    ) -> None:
        """`timeout`, `began_at`: see `Waiter`. Those with `priority` have a queue of their own."""
        self._charge = command.charges[0]
        ring = self._charge.ring
        super().__init__(queues, ring + PRIORITY if priority else ring, timeout, began_at)

    def on_refused(self, decision: Decision, asks_in_s: float = 0.0) -> None:
        """Note that this waiter, the head, has to wait for `retry_after`: those behind it have to
        wait for at least as long. `asks_in_s`: seconds to its turn, if that comes later.
        """
        queue = self.queue
        if queue.freed:
            return  # the store may have refused before the permits were given back
        now, retry_after = self._clock.monotonic(), decision.retry_after
        asks_at = now + max(retry_after, asks_in_s)
        queue.refusal = (now + retry_after, asks_at, decision)
        self._queues.wake_too_late(self, queue, now + retry_after)

    def consume_wake(self) -> bool:
        """True, once, if this is the head and permits were given back. False once it has left."""
        queue = self._queue
        if queue is None or not queue.freed or list(queue.waiting)[:1] != [self]:
            return False
        queue.freed = False
        return True

    @property
    def has_followers(self) -> bool:
        """True if others wait behind this waiter, the head."""
        return len(self.queue.waiting) > 1

    @property
    def queue(self) -> _Queue:
        """What the head has from those before it, and leaves to those behind."""
        assert self._queue is not None
        return self._queue

    def sleep_until_freed(self, clock: Clock, seconds: float) -> object:
        """Sleep for `seconds` of `clock`, which is the store's, or until permits may be there
        earlier: a reset or a refund by this process gives permits of the key back.

        Only the head of a queue is woken. Whoever has left its queue has been admitted, and sleeps
        until it may proceed. A clock that is not the system's has a sleep of its own, which nothing
        can end; it is skipped if permits were given back before it began, and what it returns is
        returned.
        """
        if clock is not SYSTEM:
            sleep: Callable[[float], object] = clock.sleep
            return None if self.consume_wake() else sleep(seconds)
        until = clock.monotonic() + seconds
        while not self.consume_wake() and (left := until - clock.monotonic()) > 0:
            self.sleep(left)
        return None

    def _remaining_s_or_raise(self) -> float | None:
        """Return the seconds for which the waiter may wait; None: no end. At 0.0 it may send out of
        turn: nobody before it was refused, so it is the store that is slow, and its own call may
        be admitted. Raises `RateLimitExceeded` as `wait` does.
        """
        if self._deadline is None:
            return None
        now, refusal = self._clock.monotonic(), self.queue.refusal
        if refusal is not None:
            until, asks_at, decision = refusal
            if until > self._deadline or now >= self._deadline:
                left, charge = max(0.0, asks_at - now), self._charge
                raise RateLimitExceeded(
                    decision._replace(key=charge.key, cost=charge.cost, retry_after=left)
                )
        return max(0.0, self._deadline - now)


class AsyncWaiter(Waiter):
    """`Waiter` for tasks."""

    def __init__(
        self, queues: WaitQueues, waits_for: Any, timeout: float | None, **options: Any
    ) -> None:
        super().__init__(queues, waits_for, timeout, **options)
        self._loop = running_loop()
        self._event = asyncio.Event()

    async def wait_async(self) -> bool:
        self._queues.join(self)
        waited = False
        while not self.is_head and (left := self._remaining_s_or_raise()) != 0.0:
            waited = True
            await self.sleep_async(left)
        return waited

    async def sleep_async(self, seconds: float | None) -> None:
        with suppress(asyncio.TimeoutError):
            await asyncio.wait_for(self._event.wait(), seconds)
        self._event.clear()
        self._queues.check_open()

    def wake(self) -> None:
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._event.set)


class AsyncPermitWaiter(AsyncWaiter, PermitWaiter):
    """`PermitWaiter` for tasks."""

    async def sleep_until_freed_async(self, store: AsyncStore, seconds: float) -> None:
        """Do as `sleep_until_freed`, by the clock of `store`."""
        clock = store.clock
        if clock is not SYSTEM:
            if not self.consume_wake():
                await store.sleep(seconds)
            return
        until = clock.monotonic() + seconds
        while not self.consume_wake() and (left := until - clock.monotonic()) > 0:
            await self.sleep_async(left)


class Turns:
    """The calls of one limiter that take places in the virtual line of their ring, and are told a
    turn (`waiting/memory.py`).

    `acquire` waits by turns. Only the head of a process's queue is in the line, so each process
    that waits has one place in it, whatever the number of its waiters. A queue without a turn, or
    with free calls, has its head ask plainly, as `try_acquire`; otherwise the head sleeps until its
    turn. A queue goes

      from         event                                           to
      no turn      asked plainly: admitted                         no turn
      no turn      asked plainly: refused, and so for a place      turn
      no turn      asked plainly: refused; for a place: admitted   turn; free calls if there is room
      turn         at its turn: refused                            turn
      turn         at its turn: admitted, others wait behind       turn; free calls if there is room
      turn         at its turn: admitted, nobody waits behind      no turn
      turn         the head gives up                               turn
      free calls   asked plainly: admitted                         free calls, one less
      free calls   asked plainly: refused                          turn

    The turn of the next waiter comes with an admission, in the same script call: so a crowd costs
    about one call for each admission. Turns are as far apart as the limit admits calls; but where
    many permits become free at once, those who are late in the line would wait for long although
    there is room. Therefore the calls for which there is room are shared among those in it.
    """

    def __init__(
        self,
        commands: CommandCache,
        strategy: Strategy,
        source: Source,
        clock: Clock,
        answered: Callable[[Decision], Decision],
    ) -> None:
        """`source`: what decides a call that is sent to the store; `answered`: what hears of it."""
        self._command_cache = commands
        self._strategy = strategy
        self._source = source
        self._answered = answered
        self._monotonic = clock.monotonic
        self.takes_next = not strategy.uses_leases
        """With leases the next waiter asks plainly, as its call may lease permits for others."""

    def applies_to(self, command: Acquire) -> bool:
        """True if `acquire` waits for this call by turns. Costly calls do not: see `MIN_CALLS`."""
        if not self._strategy.can_borrow or command.has_own_moment:
            return False
        charges = command.charges
        cost = charges[0].cost
        return cost == 1 or cost * MIN_CALLS <= max_cost(limits_in(charges))

    def attempt(
        self, key: AnyKey, cost: int, enqueue: object, priority: object
    ) -> Operation[Decision]:
        """Return the decision of a call with `enqueue`; a refused one has its own turn as
        `retry_after`. Raises `ConfigurationError` where turns make no sense; for `key` and `cost`
        what `try_acquire` raises.
        """
        command = self._checked(key, cost, enqueue, priority)
        answer = yield from self.ask(command)
        decision = answer.decision
        if not decision.allowed:
            turn_s = (answer.turn.turn_ms - decision.now_ms) / 1000
            decision = decision._replace(retry_after=turn_s)
        return decision

    def attempt_all(self, acquire: Acquire, enqueue: object) -> Operation[Decision]:
        """Do as `attempt` over several keys, in the line of the limit that has room last."""
        _check_has_line(acquire, enqueue)
        command = AcquireTurn(acquire.charges)
        reply = yield from send(command)
        decision = self._answered(turn_decision(command, reply, self._source))
        if not decision.allowed:
            decision = decision._replace(retry_after=reply.turn_in_ms / 1000)
        return decision

    def ask(
        self, acquire: Acquire, held_ms: int = 0, *, takes_next: bool = False
    ) -> Operation[TurnAnswer]:
        """Decide the call of `acquire`: by permits that are held here, or by the store, and never
        by a cached refusal. `held_ms`: the turn that the caller has been told before.
        """
        charges = acquire.charges
        sent_at = self._monotonic()
        leased = self._strategy.spend_leased(charges[0].key, charges[0].cost)
        if leased is not None:
            return TurnAnswer(leased, RetryAt(leased.now_ms, sent_at))
        command = AcquireTurn(charges, held_ms=held_ms, takes_next=takes_next)
        reply = yield from send(command)
        decision = self._answered(turn_decision(command, reply, self._source))
        if not decision.allowed:
            self._strategy.cache_refusal(decision.key, decision, sent_at)
        turn = RetryAt(
            decision.now_ms + reply.turn_in_ms, self._monotonic() + reply.turn_in_ms / 1000
        )
        return TurnAnswer(decision, turn, reply.queued)

    def sleep_s(
        self, command: Acquire, turn: RetryAt, room_in_s: float, remaining_s: float | None
    ) -> float:
        """Return for how long the holder of `turn` sleeps before it asks; 0 or less: not at all.
        `room_in_s`: when there is room. `remaining_s`: what is left of its timeout.
        """
        windows = [charge.limit.span * charge.limit.bucket_ms for charge in command.charges]
        latest_s = room_in_s + MAX_EARLY_WINDOWS * min(windows) / 1000
        seconds = min(turn.due_at - self._monotonic(), latest_s)
        return seconds if remaining_s is None else min(seconds, remaining_s)

    def _checked(self, key: AnyKey, cost: int, enqueue: object, priority: object) -> Acquire:
        if priority:
            raise ConfigurationError(
                "enqueue=True and priority=True exclude each other: a priority call borrows coming "
                "permits instead of waiting for its turn"
            )
        if not self._strategy.can_borrow:
            raise ConfigurationError(
                'enqueue=True needs consistency="direct" or "leased": with "eventual" each process '
                "decides by counts that are up to sync_interval old, and the store, which keeps "
                "the line, does not see who is refused"
            )
        command = self._command_cache.acquire_command(key, cost)
        _check_has_line(command, enqueue)
        return command


MAX_EARLY_WINDOWS = 10
"""A waiter asks this many windows after there was room at the latest, even if its turn comes later:
those before it in the line may have vanished.
"""
MIN_CALLS = 20
"""`acquire` waits by turns for calls of cost 1, and for those of which the limit admits at least so
many in a window. Larger ones leave the window at once, and not as the turns of others come: those
would miss their turns, and a crowd of different costs would be done much later.
"""


class TurnAnswer(NamedTuple):
    """The answer to one call."""

    decision: Decision
    """Of a refused call, `retry_after` is when there is room; no call is admitted before."""
    turn: RetryAt
    """The turn of the call, or of the next waiter."""
    queued: int = 0
    """For an admitted call, how many permits the others in the line wait for."""


def _check_has_line(command: Acquire, enqueue: object) -> None:
    """Raise `ConfigurationError` for a call with `enqueue` for which there is no line."""
    if enqueue is not True:
        raise ConfigurationError(f"enqueue={enqueue!r} is neither True nor False")
    if command.has_own_moment:
        raise ConfigurationError(
            "enqueue=True needs limits that are neither paced nor warm up: a paced call is "
            "told its own moment anyway, and how fast a line moves depends on the warm-up"
        )


def wait_for_turn(command: Acquire, turns: Turns, waiter: PermitWaiter) -> Operation[Decision]:
    """Ask until the call of `command` is admitted, and sleep until its turn in between. `command`
    itself stands for the plain call, which whoever drives this sends as `try_acquire` does.

    Raises `RateLimitExceeded` as soon as it is certain that the caller's timeout ends before there
    is room. A later turn is a hint and not certain: then the call is sent again at the end.
    """
    queue = waiter.queue
    deadline = _Deadline(waiter)
    if not waiter.is_head or queue.turn is None or queue.free_calls > 0:
        deadline.begin()
        decision: Decision = yield command
        queue.free_calls = max(0, queue.free_calls - 1) if decision.allowed else 0
        if decision.allowed:
            return decision
        deadline.check(decision)
        waiter.on_refused(decision)
        room_in_s = decision.retry_after if queue.turn is not None else 0.0
    else:
        room_in_s = 0.0
    while True:
        if queue.turn is not None:
            seconds = turns.sleep_s(command, queue.turn, room_in_s, waiter.remaining_s)
            if seconds > 0:
                yield Sleep(seconds)
        takes_next = turns.takes_next and waiter.has_followers
        held_ms = 0 if queue.turn is None else queue.turn.turn_ms
        deadline.begin()
        answer = yield from turns.ask(command, held_ms, takes_next=takes_next)
        decision = answer.decision
        if decision.allowed:
            cost = command.charges[0].cost
            queue.turn = answer.turn if takes_next else None
            queue.free_calls = decision.remaining // (answer.queued + cost) if takes_next else 0
            return decision
        queue.turn, queue.free_calls = answer.turn, 0
        room_in_s = decision.retry_after
        turn_s = (answer.turn.turn_ms - decision.now_ms) / 1000
        waiter.on_refused(decision, turn_s)
        deadline.check(decision, turn_s)


class _Deadline:
    """When a waiter gives up, by the clock of the store, which decisions have."""

    def __init__(self, waiter: PermitWaiter) -> None:
        self._waiter = waiter
        self._remaining_s: float | None = None
        self._began_ms: int | None = None

    def begin(self) -> None:
        """Note that a call is about to be sent: the time left counts from the first decision."""
        if self._began_ms is None:
            self._remaining_s = self._waiter.remaining_s

    def check(self, decision: Decision, turn_s: float | None = None) -> None:
        """Raise `RateLimitExceeded` if there is no room before the timeout ends, or if it has ended
        with this refusal. `turn_s`: seconds to the caller's turn, if it has one.
        """
        if self._remaining_s is None:
            return
        if self._began_ms is None:
            self._began_ms = decision.now_ms
        waited = (decision.now_ms - self._began_ms) / 1000
        too_late = waited + decision.retry_after > self._remaining_s
        if too_late or self._waiter.remaining_s == 0.0:
            retry_after = decision.retry_after if turn_s is None else turn_s
            raise RateLimitExceeded(decision._replace(retry_after=retry_after))
