"""What the worker flushes: a job for each limiter, and the set of all jobs."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any
from weakref import ref

from ..consistency.key_state import NEVER
from ..core.clock import SYSTEM
from ..core.errors import DistwindowError, counted
from ..core.interrupts import OneShotEvent
from ..operations.flush_source import FlushSource

LOG = logging.getLogger("distwindow")

EXIT_TIMEOUT_S = 3.0
"""The longest time, in seconds, that the end of a process waits for its counts to be sent."""
RETRY_EVERY_S = 0.05
"""Seconds between two attempts to flush at the end of a process."""
SETTLED_S = 5.0
"""Seconds without a failed flush after which flushing is said to work again. While the slots of a
cluster move, for example, flushes fail and succeed in turn.
"""

RAISED_BY_CALLBACKS = (
    Exception,
    SystemExit,
    KeyboardInterrupt,
    GeneratorExit,
    asyncio.CancelledError,
)
"""What an application's function may raise that distwindow calls, and that is logged instead of
raised: nothing of it may end a worker. (A cancellation of the task that calls it is raised where
that awaits, and never in a plain function.) Not here is what gevent raises in a greenlet from
outside, such as its `Timeout`.
"""

monotonic = SYSTEM.monotonic


class FlushJob:
    """One limiter, as the worker sees it. `flush(False)` sends what is due, `flush(True)` all that
    is pending.

    state             attribute        set by                    until
    active            -                the worker's `add`        the limiter is closed
    being flushed     `flush_done`     the worker's thread/task  the event is set
    being closed      `close_done`     `being_closed`            the event is set
    closed            `detached`       the worker's `detach`     the limiter is called again: its
                                                                 store may be the caller's, and open
    """

    __slots__ = (
        "__weakref__",
        "close_done",
        "closing_lock",
        "detached",
        "dropped_logged",
        "failure",
        "flush",
        "flush_done",
        "flush_task",
        "gave_up_at_exit",
        "has_sent",
        "logged_kinds",
        "loss_reported",
        "name",
        "settled_at",
        "strategy",
    )  # fmt: skip

    def __init__(self, strategy: FlushSource, flush: Callable[[bool], Any], name: str) -> None:
        self.strategy = strategy
        self.flush = flush
        self.name = name
        """The limiter and its store, for log lines; without passwords."""
        self.failure: BaseException | None = None
        """Why the last flush failed; None after one that succeeded."""
        self.has_sent = True
        """False if the last flush had nothing to send, so that its success says nothing."""
        self.logged_kinds: frozenset[type] = frozenset()
        """The kinds of failure that were logged since flushing has worked; empty while it does."""
        self.settled_at = NEVER
        """When flushing is said to work again, if no flush fails before (monotonic seconds)."""
        self.flush_done: OneShotEvent | None = None
        """Set when the flush that is under way has ended."""
        self.flush_task: asyncio.Task[None] | None = None
        """The flush that is under way in an event loop."""
        self.close_done: OneShotEvent | None = None
        """Set when the close that is under way has ended."""
        self.closing_lock = threading.Lock()
        """Held by the thread that closes a blocking limiter; other threads that close it wait."""
        self.detached = False
        """True once the limiter is closed: the worker skips it until it is called again."""
        self.gave_up_at_exit = False
        """True once the loop that flushed it has ended, or its loss was logged, with something
        unsent. Later steps of the same shutdown make one attempt each.
        """
        self.loss_reported = False
        """True once the loss of counts has been logged, so that it is logged only once."""
        self.dropped_logged = 0
        """How many of the counts that the strategy has dropped have been logged."""

    @property
    def next_due_at(self) -> float:
        """When the worker has to come (monotonic seconds): to flush, or to log that it works."""
        return min(self.strategy.next_due_at, self.settled_at)

    @property
    def has_unsent(self) -> bool:
        """True if there is anything that the store has not taken. Looks at all keys."""
        strategy = self.strategy
        if self.failure is not None and strategy.next_due_at < NEVER:
            return True
        return strategy.unacknowledged_counts() > 0 or strategy.unreturned_permits() > 0

    def needs_retry(self, final: bool) -> bool:
        """True if a shutdown that has just flushed this job has to flush it again. With `final`, no
        call is decided any more, so nothing may be pending either.
        """
        if self.gave_up_at_exit:
            return False
        return self.failure is not None or (final and self.has_unsent)

    def record_flush(self, failure: BaseException | None) -> None:
        """Record how a flush ended. Log when flushes begin to fail, once for each kind of failure,
        and when none has failed for `SETTLED_S`.
        """
        self.failure = failure
        if failure is not None:
            self._log_failure(failure)
            return
        self.gave_up_at_exit = self.loss_reported = False
        if self.logged_kinds:
            now = monotonic()
            if self.has_sent and self.settled_at == NEVER:
                self.settled_at = now + SETTLED_S
            if now >= self.settled_at:
                self.settled_at, self.logged_kinds = NEVER, frozenset()
                self.log_recovery()

    def record_unexpected_error(self, exc: BaseException) -> None:
        """Record that a flush ended with an error that is not the store's."""
        self.failure = exc
        self.strategy.reschedule(monotonic())
        self._log_failure(exc)

    def _log_failure(self, failure: BaseException) -> None:
        self.settled_at = NEVER
        is_expected = isinstance(failure, DistwindowError)
        kind = DistwindowError if is_expected else type(failure)
        if kind not in self.logged_kinds:
            self.logged_kinds |= {kind}
            self.log_failure(failure, is_expected=is_expected)

    def log_failure(self, failure: BaseException, *, is_expected: bool) -> None:
        """Log that flushes have begun to fail, with the traceback of an unexpected error."""
        if is_expected:
            LOG.warning(
                "flushing the counts of %s failed: %s; %s%s",
                self.name, failure, self._kept_text(), self._dropped_text(),
            )  # fmt: skip
        else:
            LOG.error(
                "flushing the counts of %s failed with an unexpected error; %s%s",
                self.name, self._kept_text(), self._dropped_text(), exc_info=failure,
            )  # fmt: skip

    def log_recovery(self) -> None:
        """Log that flushes succeed again."""
        LOG.warning("the counts of %s can be flushed again%s", self.name, self._dropped_text())

    def record_close(self, failure: DistwindowError | None) -> None:
        """Record how the last flush of a limiter that is being closed ended. Log what it could not
        send.
        """
        self.failure = failure
        if failure is not None and not self.loss_reported:
            self.loss_reported = True
            self.log_lost("the limiter was closed before", failure)

    def log_lost(self, when: str, why: object) -> None:
        """Log what will never be sent, if there is anything."""
        counts, permits = self.strategy.unacknowledged_counts(), self.strategy.unreturned_permits()
        if counts:
            LOG.warning(
                "%d counts of %s were lost: %s they could be sent (%s)%s",
                counts, self.name, when, why, self._dropped_text(),
            )  # fmt: skip
        if permits:
            LOG.warning(
                "%d unspent permits of %s were not given back: %s they could be sent (%s); "
                "they count as used until their window ends",
                permits, self.name, when, why,
            )  # fmt: skip

    def _kept_text(self) -> str:
        counts, permits = self.strategy.unacknowledged_counts(), self.strategy.unreturned_permits()
        leased = f" and {counted(permits, 'leased permit')}" if permits else ""
        return f"{counted(counts, 'count')}{leased} kept here; the next flush tries again"

    def _dropped_text(self) -> str:
        """Return the end of a log line: the counts that were dropped since the last log line."""
        number = self.strategy.dropped - self.dropped_logged
        self.dropped_logged = self.strategy.dropped
        if number <= 0:  # fewer than before: this is a forked child, which counts anew
            return ""
        return f"; {number} counts were dropped: they left their windows, or too many keys waited"

    @contextmanager
    def being_closed(self) -> Iterator[None]:
        """Mark the limiter as being closed for the length of the block: the end of the process
        waits until that is done.
        """
        done = self.close_done = OneShotEvent()
        try:
            yield
        finally:
            done.set()

    def wait_for_flush(self, seconds: float) -> None:
        """Wait until the flush that is under way has ended, for at most `seconds`."""
        flush_done = self.flush_done
        if flush_done is not None:
            flush_done.wait(seconds)


class FlushJobs:
    """The jobs of all limiters that are alive. The references are weak: a limiter is kept alive by
    its owner, and by a worker for as long as it has something to send.

    Each change of the dictionary is one call of a C function, because a signal handler may raise at
    any line, and the garbage collector may run in any thread.
    """

    def __init__(self) -> None:
        self._refs: dict[ref[FlushJob], None] = {}

    def add(self, job: FlushJob) -> None:
        """Add `job`. It is removed when it is collected."""
        self._refs[ref(job, self._refs.__delitem__)] = None

    def all(self) -> list[FlushJob]:
        """Return the jobs that are alive."""
        return [job for weak in self._refs.copy() if (job := weak()) is not None]

    def active(self) -> list[FlushJob]:
        """Return the jobs whose limiters are not closed. Those whose last flush failed come last,
        because flushing them may take until the deadline.
        """
        jobs = [job for job in self.all() if not job.detached]
        return sorted(jobs, key=lambda job: job.failure is not None)

    def wait_until_closed(self, deadline: float) -> None:
        """Wait until no limiter is being closed, or until `deadline` (monotonic seconds): the close
        of a limiter sends what it has counted.
        """
        for job in self.all():
            if job.close_done is not None:
                job.close_done.wait(deadline - monotonic())


def job_names(jobs: Iterable[FlushJob]) -> str:
    """Return the names of these limiters and their stores, for log lines about several."""
    return ", ".join(job.name for job in jobs)


def report_lost(
    jobs: Iterable[FlushJob],
    when: str = "the process was ended before",
    why: object = "there was not enough time",
) -> None:
    """Log what the jobs have not sent when the process ends, once for each job."""
    for job in jobs:
        if job.has_unsent and not job.loss_reported:
            job.gave_up_at_exit = job.loss_reported = True
            job.log_lost(when, job.failure or why)
