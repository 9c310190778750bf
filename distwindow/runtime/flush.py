"""When the worker has to flush what is counted in this process, and the operation that does it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

from ..errors import DistwindowError, StoreTimeout, StoreUnavailable
from ..ring.clock import NEVER
from ..ring.command import Command
from .steps import Operation, Pipeline


class FlushSchedule:
    """The next time, and the function that wakes the worker for it.

    next_due_at      NEVER ------ flush_by(t) ------> t ------ recompute() ------> NEVER or later
    the worker       sleeps        wake()             flushes                      sleeps
    """

    __slots__ = ("interval_s", "next_due_at", "wake")  # each limiter has one

    def __init__(self, interval_s: float) -> None:
        self.interval_s = interval_s
        """Seconds from the first count to the flush that sends it."""
        self.next_due_at = NEVER
        """Monotonic seconds."""
        self.wake: Callable[[], object] = lambda: None
        """Wakes the worker, as `next_due_at` is earlier than it was."""

    def flush_by(self, at: float) -> None:
        """Ask the worker to flush at `at` (monotonic seconds) or earlier."""
        # A time that is more than an interval and a second before `at` is replaced, too: what was
        # to flush then (the task of an event loop, for example) has ended, or was not woken.
        if at < self.next_due_at or self.next_due_at < at - self.interval_s - 1:
            self.next_due_at = at
            try:
                self.wake()
            except BaseException:  # a signal handler may raise anything in it
                self.next_due_at = NEVER  # so that the next caller wakes the worker
                raise

    def recompute(self, now: float, due_times: Iterable[Callable[[float], float]]) -> None:
        """Set the next time after a flush: the earliest that one of `due_times` returns."""
        try:
            self.next_due_at = NEVER  # first, as `flush_by` may be called meanwhile
            for due in due_times:
                at = due(now)
                if at < self.next_due_at:  # no call here, in which another thread may set it
                    self.next_due_at = at
        except BaseException:  # a signal handler may raise anything in it
            self.next_due_at = now  # so that the worker computes it again
            raise
        finally:
            if self.next_due_at < NEVER:
                self.wake()  # the worker may have read NEVER in between


class OutgoingCommand(NamedTuple):
    """A command that is to be sent, and the function that takes its outcome."""

    command: Command[Any]
    on_reply: Callable[[Any, float], None]
    """Called with the reply or the error, and when the command was sent (monotonic seconds). A
    second call is harmless."""


KEYS_AT_ONCE = 64
"""The keys whose counts one exchange of a flush has. To make the commands of very many and to take
their outcomes would hold up an event loop, each time while the store is away.
"""


class FlushSource:
    """Something that counts here, and has to send it. What a source does not define is empty."""

    next_due_at: float
    """When the worker has to flush, monotonic seconds; infinite if there is nothing to send."""
    wake: Callable[[], object]
    """Wakes the worker, as `next_due_at` is earlier than it was. Set by the worker. Where a signal
    handler raises in it, the worker may not have been woken: the next call here has to do so, as
    where it returns False, because no event loop is left.
    """

    dropped = 0
    """The number of counts that the store never received, and never will."""
    has_untold = False
    """True if an observer is still to be told of something, which needs no store."""

    def clock_probe(self) -> list[OutgoingCommand]:
        """Return what has to be sent before any counts can be: its reply has the store's time."""
        return []

    def keys_to_flush(self) -> int:
        """Return how many keys wait, of which `collect_commands` takes a part."""
        return 0

    def collect_commands(
        self, now: float, outgoing: list[OutgoingCommand], *, everything: bool = False
    ) -> None:
        """Add what is to be sent now to `outgoing`; with `everything`, all that is pending, and
        nothing that fetches. If this raises, the caller calls each `on_reply` of `outgoing` with
        "not sent".
        """

    def reschedule(self, now: float) -> None:
        """Set `next_due_at` after a flush."""

    def pause_calls(self, hold: Callable[[], object]) -> None:
        """Run `hold` in every call before it is decided."""

    def unreturned_permits(self) -> int:
        """Return how many permits, leased or reserved, are still to be given back."""
        return 0

    def unacknowledged_counts(self) -> int:
        """Return how many counts the store has not acknowledged."""
        return 0


class ScheduledSource(FlushSource):
    """A source with a `FlushSchedule`."""

    _schedule: FlushSchedule

    @property
    def next_due_at(self) -> float:  # type: ignore[override]  # the schedule sets it
        return self._schedule.next_due_at

    @property
    def wake(self) -> Callable[[], object]:
        return self._schedule.wake

    @wake.setter
    def wake(self, wake: Callable[[], object]) -> None:
        self._schedule.wake = wake


class JoinedSources(FlushSource):
    """Several sources as one. What is sent goes in their order."""

    def __init__(self, *sources: FlushSource) -> None:
        self.sources = sources

    def add_first(self, source: ScheduledSource) -> None:
        """Send what `source` has before what the others have."""
        source.wake = self.wake
        self.sources = (source, *self.sources)

    @property
    def next_due_at(self) -> float:  # type: ignore[override]  # that of each is set
        return min((source.next_due_at for source in self.sources), default=NEVER)

    @property
    def wake(self) -> Callable[[], object]:
        return self.sources[0].wake

    @wake.setter
    def wake(self, wake: Callable[[], object]) -> None:
        for source in self.sources:
            source.wake = wake

    @property
    def dropped(self) -> int:  # type: ignore[override]  # each counts its own
        return sum(source.dropped for source in self.sources)

    @property
    def has_untold(self) -> bool:  # type: ignore[override]  # each has its own
        return any(source.has_untold for source in self.sources)

    def clock_probe(self) -> list[OutgoingCommand]:
        return [probe for source in self.sources for probe in source.clock_probe()]

    def keys_to_flush(self) -> int:
        return sum(source.keys_to_flush() for source in self.sources)

    def collect_commands(
        self, now: float, outgoing: list[OutgoingCommand], *, everything: bool = False
    ) -> None:
        for source in self.sources:
            source.collect_commands(now, outgoing, everything=everything)

    def reschedule(self, now: float) -> None:
        for source in self.sources:
            source.reschedule(now)

    def pause_calls(self, hold: Callable[[], object]) -> None:
        for source in self.sources:
            source.pause_calls(hold)

    def unreturned_permits(self) -> int:
        return sum(source.unreturned_permits() for source in self.sources)

    def unacknowledged_counts(self) -> int:
        return sum(source.unacknowledged_counts() for source in self.sources)


_NOT_SENT = StoreUnavailable("the exchange was interrupted before it was sent", charged=False)
_OUTCOME_UNKNOWN = StoreTimeout(
    "the exchange was interrupted, and its outcome is unknown", charged=None
)


def was_interrupted(reply: object) -> bool:
    """True for a command whose exchange was cancelled or interrupted, not refused by a store."""
    return reply is _NOT_SENT or reply is _OUTCOME_UNKNOWN


class FlushResult(NamedTuple):
    """The end of a flush."""

    failure: DistwindowError | None
    """The first error; None if there is none."""
    has_sent: bool
    """False if there was nothing to send, which says nothing about the store."""


def flush_due(
    strategy: FlushSource, monotonic: Callable[[], float], *, everything: bool = False
) -> Operation[FlushResult]:
    """Send what is due; with `everything`, all. An exchange without any answer is the last."""
    probe = strategy.clock_probe()
    failure = yield from send_all(probe, monotonic)
    has_sent = bool(probe)
    outgoing: list[OutgoingCommand] = []
    try:
        left = waiting = strategy.keys_to_flush()
        while True:
            outgoing = []
            strategy.collect_commands(monotonic(), outgoing, everything=everything)
            left -= max(KEYS_AT_ONCE, waiting - strategy.keys_to_flush())
            replies = yield from _exchange(outgoing, monotonic)
            failures = [reply for reply in replies if isinstance(reply, DistwindowError)]
            failure, has_sent = failure or next(iter(failures), None), has_sent or bool(replies)
            if left <= 0 or (failures and len(failures) == len(replies)):
                break
            waiting = strategy.keys_to_flush()
    except BaseException:  # raised by a signal handler, anywhere
        # Where `send_all` has called `on_reply` already, a second call does nothing.
        for each in outgoing:
            each.on_reply(_NOT_SENT, 0.0)
        raise
    finally:
        strategy.reschedule(monotonic())
    return FlushResult(failure, has_sent)


def send_all(
    outgoing: Sequence[OutgoingCommand], monotonic: Callable[[], float]
) -> Operation[DistwindowError | None]:
    """Send these in one exchange, and call each `on_reply` in any case. Return the first error."""
    replies = yield from _exchange(outgoing, monotonic)
    return next((reply for reply in replies if isinstance(reply, DistwindowError)), None)


def _exchange(
    outgoing: Sequence[OutgoingCommand], monotonic: Callable[[], float]
) -> Operation[Sequence[object]]:
    """Do as `send_all`, and return all replies and errors."""
    if not outgoing:
        return ()
    sent_at = monotonic()
    replies: Sequence[object] = [_NOT_SENT] * len(outgoing)
    try:
        pipeline = Pipeline(tuple([each.command for each in outgoing]))
        replies = [_OUTCOME_UNKNOWN] * len(outgoing)
        replies = yield pipeline
        for each, reply in zip(outgoing, replies, strict=True):
            each.on_reply(reply, sent_at)
    except BaseException:  # a cancellation, or raised by a signal handler
        for each, reply in zip(outgoing, replies, strict=True):
            each.on_reply(reply, sent_at)  # a second call does nothing
        raise
    return replies
