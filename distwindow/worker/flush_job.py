"""What the worker flushes, and for how long a process's end waits for that."""

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
from ..core.errors import DistwindowError
from ..core.interrupts import OneShotEvent
from ..operations.strategy import Strategy

LOG = logging.getLogger("distwindow")

EXIT_TIMEOUT_S = 3.0
"""Seconds that the end of a process waits for its counts to be sent."""
RETRY_EVERY_S = 0.05
"""Seconds between two attempts then."""

monotonic = SYSTEM.monotonic


class FlushJob:
    """One limiter, as the worker sees it: `work(last)` sends what is due, or with `last` all."""

    __slots__ = (
        "__weakref__",
        "closing",
        "closing_lock",
        "detached",
        "dropped",
        "failure",
        "flush",
        "given_up",
        "loss_reported",
        "name",
        "running",
        "strategy",
        "task",
    )  # fmt: skip

    def __init__(self, strategy: Strategy, flush: Callable[[bool], Any], name: str) -> None:
        self.strategy = strategy
        self.flush = flush
        self.name = name
        """Which limiter at which store, for log lines; without passwords."""
        self.failure: Exception | None = None
        """Why the last flush failed; None after one that succeeded."""
        self.running: OneShotEvent | None = None
        """Set when the worker has done with the flush that is under way."""
        self.task: asyncio.Task[None] | None = None
        """The same flush, where it runs in an event loop."""
        self.closing: OneShotEvent | None = None
        """Set when the close that is under way is complete."""
        self.closing_lock = threading.Lock()
        """Held by the thread that closes a blocking limiter; others that close it wait."""
        self.detached = False
        """The limiter is closed: the worker leaves it alone until it is called again."""
        self.given_up = False
        """An end has waited for the store in vain; another end of the same process does not."""
        self.loss_reported = False
        """Lost counts have been reported."""
        self.dropped = 0
        """How many of the counts that `near` has given up have been reported."""

    @property
    def is_left(self) -> bool:
        """Is there anything that the store has not taken? Looks at all keys."""
        strategy = self.strategy
        if self.failure is not None and strategy.next_due_at < NEVER:
            return True
        return strategy.unsent_counts() > 0 or strategy.unreturned_permits() > 0

    def log_transition(self, failure: Exception | None) -> None:
        """Note how a flush ended. Log when flushes begin to fail, and when they succeed again."""
        failed_before, self.failure = self.failure is not None, failure
        if failure is None:
            self.given_up = self.loss_reported = False
            if failed_before:
                LOG.warning(
                    "the counts of %s can be flushed again%s", self.name, self._newly_dropped()
                )
        elif not failed_before:
            LOG.warning(
                "flushing the counts of %s failed: %s; %s%s",
                self.name, failure, self._kept(), self._newly_dropped(),
            )  # fmt: skip

    def failed(self, exc: Exception) -> None:
        """Note that a flush has ended by an error that nobody expects. Log when that begins."""
        before, self.failure = self.failure, exc
        self.strategy.reschedule(monotonic())
        if type(before) is not type(exc):
            LOG.error(
                "flushing the counts of %s failed with an unexpected error; %s%s",
                self.name, self._kept(), self._newly_dropped(), exc_info=exc,
            )  # fmt: skip

    def closed(self, failure: DistwindowError | None) -> None:
        """Note how the last flush of a limiter that is being closed has ended; log what it could
        not send.
        """
        self.failure = failure
        if failure is not None and not self.loss_reported:
            self.loss_reported = True
            self.log_lost("the limiter was closed before", failure)

    def log_lost(self, when: str, why: object) -> None:
        """Log what will not be sent any more, if there is anything."""
        counts, permits = self.strategy.unsent_counts(), self.strategy.unreturned_permits()
        if counts:
            LOG.warning(
                "%d counts of %s were lost: %s they could be sent (%s)%s",
                counts, self.name, when, why, self._newly_dropped(),
            )  # fmt: skip
        if permits:
            LOG.warning(
                "%d unspent permits of %s were not given back: %s they could be sent (%s); "
                "they count as used until their window ends",
                permits, self.name, when, why,
            )  # fmt: skip

    def _kept(self) -> str:
        counts, permits = self.strategy.unsent_counts(), self.strategy.unreturned_permits()
        leased = f" and {permits} leased permits" if permits else ""
        return f"{counts} counts{leased} are kept here, and the next flush tries again"

    def _newly_dropped(self) -> str:
        """What a line says of counts that were given up since the last line."""
        number = self.strategy.dropped - self.dropped
        self.dropped = self.strategy.dropped
        if number <= 0:  # a forked child begins anew
            return ""
        return f"; {number} counts were dropped, as the store took none for so long"

    @contextmanager
    def being_closed(self) -> Iterator[None]:
        """While the limiter is closed: an end of the process waits for that."""
        done = self.closing = OneShotEvent()
        try:
            yield
        finally:
            done.set()

    def wait(self, seconds: float) -> None:
        """Until the flush that is under way is done."""
        at_work = self.running
        if at_work is not None:
            at_work.wait(seconds)


class FlushJobs:
    """All limiters that are served and alive. Only their owners, and what they have not sent, keep
    them alive.

    Every step is one call of C, so that an exception out of a signal handler leaves it whole, and
    the garbage collector may run in any thread.
    """

    def __init__(self) -> None:
        self._refs: dict[ref[FlushJob], None] = {}

    def add(self, job: FlushJob) -> None:
        """Have it among those alive, for as long as it lives."""
        self._refs[ref(job, self._refs.__delitem__)] = None

    def all(self) -> list[FlushJob]:
        """Those that are alive."""
        return [job for weak in self._refs.copy() if (job := weak()) is not None]

    def active(self) -> list[FlushJob]:
        """Those that are alive and not closed. Those whose last flush failed come last: they may
        take all the time there is.
        """
        jobs = [job for job in self.all() if not job.detached]
        return sorted(jobs, key=lambda job: job.failure is not None)

    def wait_until_closed(self, deadline: float) -> None:
        """Until no limiter is being closed any more: its close sends what it has counted."""
        for job in self.all():
            if job.closing is not None:
                job.closing.wait(deadline - monotonic())


def names_of(jobs: Iterable[FlushJob]) -> str:
    """These limiters and their stores, for log lines about several."""
    return ", ".join(job.name for job in jobs)


def report_lost(
    jobs: Iterable[FlushJob],
    when: str = "the process was ended before",
    why: object = "there was not enough time",
) -> None:
    """Log what a process that ends has not sent, once."""
    for job in jobs:
        if job.is_left and not job.loss_reported:
            job.given_up = job.loss_reported = True
            job.log_lost(when, job.failure or why)
