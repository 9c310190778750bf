"""What is flushed: the job of a limiter, and its log lines."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any
from weakref import ref

from ..errors import ConfigurationError, DistwindowError, counted
from ..ring.clock import NEVER
from ..support.locks import OneShotEvent
from .flush import FlushSource
from .timers import LOG, Timer, monotonic


class FlushJob(Timer):
    """The timer of one limiter. `flush(False)` sends what is due, `flush(True)` all that is
    pending.

    state             attribute        set by                    until
    active            -                the worker's `add`        the limiter is closed
    being flushed     `run_done`       the worker's thread/task  the event is set
    being closed      `close_done`     `being_closed`            the event is set
    closed            `detached`       the worker's `detach`     the limiter is called again: its
                                                                 store may be the caller's, and open
    """

    __slots__ = (
        "close_done", "closing_lock", "dropped_logged", "flush", "gave_up_at_exit", "had_work",
        "interrupted_flush", "loss_reported", "store_is_away", "strategy",
    )  # fmt: skip

    def __init__(self, strategy: FlushSource, flush: Callable[[bool], Any], name: str) -> None:
        super().__init__(name)
        self.strategy = strategy
        self.flush = flush
        self.had_work = True
        """False if the last flush had nothing to send."""
        self.store_is_away = False
        """True if a server of the store was known to be away when the last flush ended."""
        self.close_done: OneShotEvent | None = None
        """Set when the close that is under way has ended."""
        self.closing_lock = threading.Lock()
        """Held by the thread that closes a blocking limiter; other threads that close it wait."""
        self.interrupted_flush: OneShotEvent | None = None
        """Set when the last flush of a caller has ended that a signal handler had interrupted."""
        self.gave_up_at_exit = False
        """True once the loop that flushed it has ended, or its loss was logged, with something
        unsent. Later steps of the same shutdown make one attempt each.
        """
        self.loss_reported = False
        """True once the loss of counts has been logged, so that it is logged only once."""
        self.dropped_logged = 0
        """How many of the counts that the strategy has dropped have been logged."""

    def after_fork(self) -> None:
        super().after_fork()
        self.close_done = self.interrupted_flush = None
        self.closing_lock = threading.Lock()

    @property
    def due_at(self) -> float:  # type: ignore[override]  # the strategy sets it
        return self.strategy.next_due_at

    @property
    def wake(self) -> Callable[[], object]:
        return self.strategy.wake

    @wake.setter
    def wake(self, wake: Callable[[], object]) -> None:
        self.strategy.wake = wake

    def run(self) -> Any:
        return self.flush(False)

    def reschedule(self, now: float) -> None:
        self.strategy.reschedule(now)

    @property
    def has_unsent(self) -> bool:
        """True if there is anything that the store has not taken. Looks at all keys."""
        strategy = self.strategy
        if self.failure is not None and strategy.next_due_at < NEVER:
            return True
        return strategy.unacknowledged_counts() > 0 or strategy.unreturned_permits() > 0

    def needs_retry(self, final: bool) -> bool:
        """True if a shutdown that has just flushed this job has to flush it again. With `final`, no
        call is decided any more, so nothing may be pending either. The end of a process waits for
        no server that is known to be away, and for no mistake to be mended.
        """
        if self.gave_up_at_exit:
            return False
        if self.failure is None:
            return final and self.has_unsent
        return not self.store_is_away and not isinstance(self.failure, ConfigurationError)

    def record(self, failure: BaseException | None) -> None:
        if failure is None:
            self.gave_up_at_exit = self.loss_reported = False
        super().record(failure)

    def log_failure(self, failure: BaseException, *, is_expected: bool) -> None:
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
        LOG.warning("the counts of %s can be flushed again%s", self.name, self._dropped_text())

    def record_close(self, failure: DistwindowError | None) -> None:
        """Record how the last flush of a closing limiter ended, and log what it could not send."""
        self.failure = failure
        if failure is not None and not self.loss_reported:
            self.loss_reported = True
            self.log_lost("the limiter was closed before", failure)

    def log_lost(self, when: str, why: object) -> None:
        """Log what will never be sent, if there is anything."""
        counts, permits = self.strategy.unacknowledged_counts(), self.strategy.unreturned_permits()
        if counts:
            were, they = ("was", "it") if counts == 1 else ("were", "they")
            LOG.warning(
                "%s of %s %s lost: %s %s could be sent (%s)%s",
                counted(counts, "count"), self.name, were, when, they, why, self._dropped_text(),
            )  # fmt: skip
        if permits:
            were, they = ("was", "it") if permits == 1 else ("were", "they")
            LOG.warning(
                "%s of %s %s not given back: %s %s could be sent (%s); %s until %s window ends",
                counted(permits, "unspent permit"), self.name, were, when, they, why,
                "it counts as used" if permits == 1 else "they count as used",
                "its" if permits == 1 else "their",
            )  # fmt: skip

    def _kept_text(self) -> str:
        counts, permits = self.strategy.unacknowledged_counts(), self.strategy.unreturned_permits()
        held = f" and {counted(permits, 'permit')} to give back" if permits else ""
        return f"{counted(counts, 'count')}{held} kept here; the next flush tries again"

    def _dropped_text(self) -> str:
        """Return the end of a log line: the counts that were dropped since the last one."""
        number = self.strategy.dropped - self.dropped_logged
        self.dropped_logged = self.strategy.dropped
        if number <= 0:  # fewer than before: this is a forked child, which counts anew
            return ""
        return f"; {counted(number, 'count')} dropped, as windows ended or too many keys waited"

    @contextmanager
    def being_closed(self) -> Iterator[None]:
        """Mark the limiter as closing during the block: the end of the process waits for it."""
        done = self.close_done = OneShotEvent()
        try:
            yield
        finally:
            done.set()


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
        return [job for weak in self._refs.copy() if (job := weak()) is not None]

    def active(self) -> list[FlushJob]:
        """Return the jobs not closed, failing ones last: these may take until the deadline."""
        jobs = [job for job in self.all() if not job.detached]
        return sorted(jobs, key=lambda job: job.failure is not None)

    def wait_until_closed(self, deadline: float) -> None:
        """Wait until no close, which sends counts, goes on, or until `deadline` (monotonic)."""
        for job in self.all():
            if job.close_done is not None:
                job.close_done.wait(deadline - monotonic())


def report_lost(jobs: Iterable[FlushJob]) -> None:
    """Log what the jobs have not sent when the process ends, once for each job."""
    for job in jobs:
        if job.has_unsent and not job.loss_reported:
            job.gave_up_at_exit = job.loss_reported = True
            why = job.failure or "there was not enough time"
            job.log_lost("the process was ended before", why)
