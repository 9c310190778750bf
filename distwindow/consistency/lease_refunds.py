"""Leased permits that nobody spends are given back to the bucket they were charged in.

    from     event                                                        to
    leased   its bucket has ended, its key is idle or evicted, the        queued
             limiter is closed, or a call over several keys needs them
    queued   the worker comes, or a call needs them                       sent
    sent     a reply                                                      refunded
    sent     an error, and it was surely not executed                     queued
    sent     an error, and it was surely not executed, after the window   expired
    sent     an error, and its outcome is unknown                         expired
    sent     any other error, which another attempt would meet again      expired

A refund whose outcome is unknown is not sent again: a second one would create permits that nobody
has paid for. Permits that expire count as used until their bucket leaves the window.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from ..core.charge import Charge, with_cost
from ..core.errors import StoreError
from ..operations.strategy import OutgoingCommand
from ..protocol.commands import Refund
from ..protocol.replies import CountReply
from .flush_schedule import FlushSchedule
from .key_state import NEVER
from .key_state_cache import KeyStateCache
from .leased_key_state import LeasedKeyState


class LeaseRefund:
    """Permits of one lease to give back."""

    __slots__ = ("charged_ms", "charges", "permits", "state")

    def __init__(
        self, state: LeasedKeyState, charges: tuple[Charge, ...], permits: int, charged_ms: int
    ) -> None:
        self.state = state
        self.charges = charges
        self.permits = permits
        self.charged_ms = charged_ms
        """A moment in the bucket that they were charged in, ms of the store's clock."""


class LeaseRefunds:
    """The queue of refunds."""

    def __init__(
        self,
        states: KeyStateCache[LeasedKeyState],
        schedule: FlushSchedule,
        monotonic: Callable[[], float],
    ) -> None:
        self._states = states
        self._schedule = schedule
        self._monotonic = monotonic
        self.after_fork()

    def after_fork(self) -> None:
        """Start empty: the parent gives back what it has leased."""
        self._queue: deque[LeaseRefund] = deque()

    def queue_unspent(self, state: LeasedKeyState) -> int:
        """Move the permits that `state` has left into the queue, so that no call spends them.
        Return how many.
        """
        with self._states.counter_lock:
            charges, charged_ms, permits = state.charges, state.charged_ms, state.permits_left
            state.left_at_observation -= permits
            state.permits_left = 0
            state.prefetch_threshold = -1
        if permits:
            self._queue.append(LeaseRefund(state, charges, permits, charged_ms))
        return permits

    def queue_unspent_and_wake(self, state: LeasedKeyState) -> None:
        """Do `queue_unspent`, and have the worker send the refund."""
        if self.queue_unspent(state):
            self._schedule.flush_by(self._monotonic())

    def queue_refund(
        self, state: LeasedKeyState, charges: tuple[Charge, ...], permits: int, charged_ms: int
    ) -> None:
        """Give back permits of a lease that are not in `state`."""
        if permits:
            self._queue.append(LeaseRefund(state, charges, permits, charged_ms))
            self._schedule.flush_by(self._monotonic())

    def collect(self, outgoing: list[OutgoingCommand]) -> None:
        """Add the refunds in the queue to `outgoing`."""
        with self._states.state_lock:
            while self._queue:
                outgoing.append(self._command_of(self._queue.popleft()))

    def next_due_at(self, now: float) -> float:
        """Return when `collect` has something to add, monotonic seconds."""
        return now + self._schedule.interval_s if self._queue else NEVER

    def unreturned(self) -> int:
        """Return how many permits are held here or queued."""
        held = sum([state.permits_left for state in self._states.all()])
        return held + sum([refund.permits for refund in list(self._queue)])

    def _command_of(self, refund: LeaseRefund) -> OutgoingCommand:
        replied = False

        def on_reply(reply: CountReply | Exception, sent_at: float) -> None:
            nonlocal replied
            again, replied = replied, True
            if not again and isinstance(reply, StoreError) and reply.charged is False:
                now = self._monotonic()
                if now * 1000 + refund.state.offset_ms - refund.charged_ms < (
                    refund.state.longest_window_ms
                ):
                    self._queue.append(refund)

        charges = with_cost(refund.charges, refund.permits)
        return OutgoingCommand(Refund(charges, charged_ms=refund.charged_ms), on_reply)
