"""Calls that take places in the virtual line of their ring, and are told a turn (`core/line.py`).

`acquire` waits by turns. Only the head of a process's queue is in the line, so each process that
waits has one place in it, whatever the number of its waiters. A queue without a turn, or with free
calls, has its head ask plainly, as `try_acquire`; otherwise the head sleeps until its turn. A queue
goes

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

The turn of the next waiter comes with an admission, in the same script call: so a crowd costs about
one call for each admission. Turns are as far apart as the limit admits calls; but where many
permits become free at once, those who are late in the line would wait for long although there is
room. Therefore the calls for which there is room are shared equally among those in the line.
"""

from __future__ import annotations

from typing import NamedTuple

from ..core.clock import Clock
from ..core.decision import Decision, Source
from ..core.errors import ConfigurationError, RateLimitExceeded
from ..core.key import AnyKey
from ..protocol.commands import Acquire
from ..protocol.shaped_commands import AcquireShaped
from ..protocol.turn_commands import AcquireTurn, turn_decision
from .command_cache import CommandCache
from .steps import Operation, Sleep, send
from .strategy import Strategy
from .wait_queue import HeldTurn, QueueSlot

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
    """Of a refused call, `retry_after` is the time at which there is room, before which no call can
    be admitted.
    """
    turn: HeldTurn
    """The turn of the call, or of the next waiter."""
    queued: int = 0
    """For an admitted call, how many permits the others in the line wait for."""


class Turns:
    """The calls of one limiter that take places in lines."""

    def __init__(
        self, commands: CommandCache, strategy: Strategy, source: Source, clock: Clock
    ) -> None:
        """`source`: what decides a call that is sent to the store."""
        self._command_cache = commands
        self._strategy = strategy
        self._source = source
        self._monotonic = clock.monotonic
        self.takes_next = not strategy.uses_leases
        """With leases the next waiter asks plainly, as its call may lease permits for others."""

    def serve(self, command: Acquire) -> bool:
        """True if `acquire` waits for this call by turns. Calls that cost much do not: see
        `MIN_CALLS`.
        """
        if not self._strategy.can_borrow or isinstance(command, AcquireShaped):
            return False
        charges = command.charges
        cost, smallest = charges[0].cost, min([charge.limit.amount for charge in charges])
        return cost == 1 or cost * MIN_CALLS <= smallest

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

    def ask(
        self, acquire: Acquire, held_ms: int = 0, *, takes_next: bool = False
    ) -> Operation[TurnAnswer]:
        """Have the call of `acquire` decided: by permits that are held here, or by the store, and
        never by a cached refusal. `held_ms`: the turn that the caller has been told before.
        """
        charges = acquire.charges
        sent_at = self._monotonic()
        leased = self._strategy.spend_leased(charges[0].key, charges[0].cost)
        if leased is not None:
            return TurnAnswer(leased, HeldTurn(leased.now_ms, sent_at))
        command = AcquireTurn(charges, held_ms=held_ms, takes_next=takes_next)
        reply = yield from send(command)
        decision = turn_decision(command, reply, self._source)
        if not decision.allowed:
            self._strategy.cache_refusal(decision.key, decision, sent_at)
        turn = HeldTurn(
            decision.now_ms + reply.turn_in_ms, self._monotonic() + reply.turn_in_ms / 1000
        )
        return TurnAnswer(decision, turn, reply.queued)

    def sleep_s(
        self, command: Acquire, turn: HeldTurn, room_in_s: float, remaining_s: float | None
    ) -> float:
        """Return for how long the holder of `turn` sleeps before it asks; 0 or less: not at all.
        `room_in_s`: when there is room. `remaining_s`: what is left of its timeout.
        """
        windows = [charge.limit.span * charge.limit.bucket_ms for charge in command.charges]
        latest_s = room_in_s + MAX_EARLY_WINDOWS * min(windows) / 1000
        seconds = min(turn.due_at - self._monotonic(), latest_s)
        return seconds if remaining_s is None else min(seconds, remaining_s)

    def _checked(self, key: AnyKey, cost: int, enqueue: object, priority: object) -> Acquire:
        if enqueue is not True:
            raise ConfigurationError(f"enqueue={enqueue!r} is neither True nor False")
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
        if isinstance(command, AcquireShaped):
            raise ConfigurationError(
                "enqueue=True needs limits that are neither paced nor warm up: a paced call is "
                "told its own moment anyway, and how fast a line moves depends on the warm-up"
            )
        return command


def wait_for_turn(command: Acquire, turns: Turns, slot: QueueSlot) -> Operation[Decision]:
    """Ask until the call of `command` is admitted, and sleep until its turn in between. `command`
    itself stands for the plain call, which whoever drives this sends as `try_acquire` does.

    Raises `RateLimitExceeded` as soon as it is certain that the caller's timeout ends before there
    is room. A turn after the timeout is no such certainty, as it is a hint: then the call is sent
    once more when the timeout ends.
    """
    queue = slot.turns
    deadline = _Deadline(slot)
    if not slot.is_head or queue.turn is None or queue.free_calls > 0:
        deadline.begin()
        decision: Decision = yield command
        queue.free_calls = max(0, queue.free_calls - 1) if decision.allowed else 0
        if decision.allowed:
            return decision
        deadline.check(decision)
        slot.on_refused(decision)
        room_in_s = decision.retry_after if queue.turn is not None else 0.0
    else:
        room_in_s = 0.0
    while True:
        if queue.turn is not None:
            seconds = turns.sleep_s(command, queue.turn, room_in_s, slot.remaining_s)
            if seconds > 0:
                yield Sleep(seconds)
        takes_next = turns.takes_next and slot.has_followers
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
        slot.on_refused(decision, turn_s)
        deadline.check(decision, turn_s)


class _Deadline:
    """When the waiter of a slot gives up, by the clock of the store, which decisions have."""

    def __init__(self, slot: QueueSlot) -> None:
        self._slot = slot
        self._remaining_s: float | None = None
        self._began_ms: int | None = None

    def begin(self) -> None:
        """The first call is about to be sent: the time that is left counts from its decision."""
        if self._began_ms is None:
            self._remaining_s = self._slot.remaining_s

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
        if too_late or self._slot.remaining_s == 0.0:
            retry_after = decision.retry_after if turn_s is None else turn_s
            raise RateLimitExceeded(decision._replace(retry_after=retry_after))
