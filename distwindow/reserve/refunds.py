"""Parts of charges that are to be given back, until the store has taken them out of their bucket.

    from      event                                          to
    -         a commit of less than was reserved             queued
    queued    the next flush                                 sent
    queued    its counts are in flight to the store          queued
    queued    its counts were dropped                        dropped
    queued    its bucket has left the longest window         dropped, as its permits have returned
    queued    its key is reset                               dropped
    sent      a reply                                        given back
    sent      an error, and it was surely not executed       queued
    sent      an error, and its outcome is unknown           dropped

A refund has no number by which the store could know it again, so one whose outcome is unknown is
not sent a second time: it would take out permits of other calls. Its permits stay charged until
their bucket leaves the window.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

from ..errors import StoreError
from ..ring.clock import NEVER
from ..ring.commands import Refund
from ..ring.decision import Charge, Decision, with_bucket_starts, with_cost
from ..ring.key import AnyKey
from ..runtime.flush import KEYS_AT_ONCE, FlushSchedule, OutgoingCommand, ScheduledSource
from ..runtime.strategy import Strategy


class PartRefund:
    """Permits that are to be taken out of the bucket in which they were charged."""

    __slots__ = (
        "charged_ms", "charges", "dropped_before", "expires_at", "is_counted_here", "permits",
        "strategy",
    )  # fmt: skip

    def __init__(
        self,
        decision: Decision,
        charges: tuple[Charge, ...],
        permits: int,
        strategy: Strategy,
        decided_at: float,
    ) -> None:
        """`charges`: those of `decision`, made at `decided_at` (monotonic seconds), that are given
        back. `strategy`: what has counted them.
        """
        at = self.charged_ms = strategy.charged_ms(decision, decided_at)
        starts = Refund(charges, charged_ms=at).bucket_starts_ms()
        self.charges = with_bucket_starts(charges, starts)
        self.permits = permits
        self.strategy = strategy
        self.is_counted_here = decision.source == "local"
        """True if this process has counted the charge, and sends it later than it has decided."""
        self.dropped_before = strategy.dropped
        longest_ms = max(c.limit.span * c.limit.bucket_ms for c in charges)
        self.expires_at = decided_at + longest_ms / 1000
        """When its bucket has left the longest window, monotonic seconds."""

    @property
    def key(self) -> AnyKey:
        return self.charges[0].key

    @property
    def name(self) -> object:
        """The same for refunds of the same buckets."""
        return self.strategy, tuple((c.ring, c.bucket_start_ms) for c in self.charges)

    def is_needless(self, now: float) -> bool:
        """True if the store has nothing to give back, or may have nothing."""
        if now >= self.expires_at:
            return True
        # Had its counts been dropped, it would take out permits of other calls.
        return self.is_counted_here and self.strategy.dropped != self.dropped_before

    def has_to_wait(self) -> bool:
        """True while the counts that it is a part of are on their way to the store."""
        is_in_flight = self.strategy.is_in_flight
        return self.is_counted_here and is_in_flight(self.charges, self.charged_ms)


class PartRefunds(ScheduledSource):
    """The refunds of one limiter that wait for the next flush: one for each bucket."""

    def __init__(
        self,
        interval_s: float,
        monotonic: Callable[[], float],
        on_given_back: Callable[[PartRefund], object],
    ) -> None:
        self._schedule = FlushSchedule(interval_s)
        self._monotonic = monotonic
        self._on_given_back = on_given_back
        self.after_fork()

    def after_fork(self) -> None:
        """Start empty: the parent gives back what it has reserved."""
        # Re-entrant, as a signal handler may commit a reservation.
        self._lock = threading.RLock()
        self._queue: dict[object, PartRefund] = {}
        self._schedule.next_due_at = NEVER

    def queue(self, refund: PartRefund) -> None:
        """Have `refund` sent with the next flush, together with others of the same bucket."""
        with self._lock:
            known = self._queue.setdefault(refund.name, refund)
            if known is not refund:
                known.permits += refund.permits
        self._schedule.flush_by(self._monotonic() + self._schedule.interval_s)

    def command_of(self, refund: PartRefund) -> OutgoingCommand:
        """Return the command that sends `refund`, which is in the queue no more."""
        has_ended = False

        def on_reply(reply: object, sent_at: float) -> None:
            nonlocal has_ended
            again, has_ended = has_ended, True
            if again:
                return
            if not isinstance(reply, Exception):
                self._on_given_back(refund)
            elif not isinstance(reply, StoreError) or reply.charged is False:
                self.queue(refund)

        charges = with_cost(refund.charges, refund.permits)
        return OutgoingCommand(Refund(charges, charged_ms=refund.charged_ms), on_reply)

    def reset(self, key: AnyKey) -> None:
        """Drop the refunds of `key`, as its windows have been emptied."""
        with self._lock:
            self._queue = {name: each for name, each in self._queue.items() if each.key != key}

    def keys_to_flush(self) -> int:
        return len(self._queue)

    def collect_commands(
        self, now: float, outgoing: list[OutgoingCommand], *, everything: bool = False
    ) -> None:
        """Add the next refunds to `outgoing`; see `FlushSource`."""
        with self._lock:
            for name in list(self._queue)[:KEYS_AT_ONCE]:
                refund = self._queue.pop(name)
                if refund.is_needless(now):
                    continue
                if refund.has_to_wait():
                    self._queue[name] = refund
                else:
                    outgoing.append(self.command_of(refund))

    def reschedule(self, now: float) -> None:
        """Set `next_due_at` after a flush."""
        interval_s = self._schedule.interval_s
        self._schedule.recompute(now, [lambda now: now + interval_s if self._queue else NEVER])

    def unreturned_permits(self) -> int:
        return sum(refund.permits for refund in list(self._queue.values()))
