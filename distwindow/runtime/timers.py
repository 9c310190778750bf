"""What a worker runs when it is due, as a flush or a sample, and when each is."""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import Callable, Iterable, Iterator
from heapq import heappop, heappush
from typing import Any
from weakref import ref

from ..errors import DistwindowError
from ..ring.clock import NEVER, SYSTEM
from ..support.locks import OneShotEvent

LOG = logging.getLogger("distwindow")

SETTLED_S = 5.0
"""Seconds without a failed run after which a timer is said to work again. While the slots of a
cluster move, for example, flushes fail and succeed in turn.
"""

monotonic = SYSTEM.monotonic


class Timer:
    """Something that a worker runs whenever it is due, and the log of its failures.

    state             attribute        set by                    until
    being run         `run_done`       the worker's thread/task  the event is set
    closed            `detached`       the worker's `detach`     the worker is woken for it again
    """

    __slots__ = (
        "__weakref__", "detached", "failure", "logged_kinds", "name", "run_done", "settled_at",
        "task",
    )  # fmt: skip

    due_at: float
    """When it has to run (monotonic seconds); `NEVER` if there is nothing to do."""
    wake: Callable[[], object]
    """Wakes the worker, as `due_at` is earlier than it was; see `FlushSource.wake`."""
    had_work = True
    """False if the last run had nothing to do, so that its success says nothing."""

    def __init__(self, name: str) -> None:
        self.name = name
        """What it runs for, for log lines; without passwords."""
        self.failure: BaseException | None = None
        """Why the last run failed; None after one that succeeded."""
        self.logged_kinds: frozenset[type] = frozenset()
        """The kinds of failure that were logged since it has worked; empty while it does."""
        self.settled_at = NEVER
        """When it is said to work again, if no run fails before (monotonic seconds)."""
        self.run_done: OneShotEvent | None = None
        """Set when the run that is under way has ended."""
        self.task: asyncio.Task[None] | None = None
        """The run that is under way in an event loop."""
        self.detached = False
        """True once it is closed: the worker skips it until it is woken for it again."""

    def after_fork(self) -> None:
        """Begin afresh in a forked child: whatever was under way will never end there."""
        self.run_done = self.task = None

    def run(self) -> Any:
        """Do what is due, and return the failure, or None; for tasks an awaitable of that."""
        raise NotImplementedError  # each kind does something else

    def reschedule(self, now: float) -> None:
        """Set `due_at` after a run."""
        raise NotImplementedError  # each kind has times of its own

    @property
    def next_due_at(self) -> float:
        """When the worker has to come (monotonic seconds): to run it, or to log that it works."""
        return min(self.due_at, self.settled_at)

    def wait_for_run(self, seconds: float) -> None:
        run_done = self.run_done
        if run_done is not None:
            run_done.wait(seconds)

    def record(self, failure: BaseException | None) -> None:
        """Record how a run ended. Log each kind of failure once, and when none came since."""
        self.failure = failure
        if failure is not None:
            self._log_failure(failure)
        elif self.logged_kinds:
            now = monotonic()
            if self.had_work and self.settled_at == NEVER:
                self.settled_at = now + SETTLED_S
            if now >= self.settled_at:
                self.settled_at, self.logged_kinds = NEVER, frozenset()
                self.log_recovery()

    def record_unexpected_error(self, exc: BaseException) -> None:
        """Record that a run was ended by an error that it does not return."""
        self.failure = exc
        self.reschedule(monotonic())
        self._log_failure(exc)

    def _log_failure(self, failure: BaseException) -> None:
        self.settled_at = NEVER
        is_expected = isinstance(failure, DistwindowError)
        kind = DistwindowError if is_expected else type(failure)
        if kind not in self.logged_kinds:
            self.logged_kinds |= {kind}
            self.log_failure(failure, is_expected=is_expected)

    def log_failure(self, failure: BaseException, *, is_expected: bool) -> None:
        """Log that runs have begun to fail, with the traceback of an unexpected error."""
        raise NotImplementedError  # each kind has lines of its own

    def log_recovery(self) -> None:
        """Log that runs succeed again."""
        raise NotImplementedError  # each kind has a line of its own


_TAKEN = -NEVER
_GIVEN_UP_MOST = 64
"""The entries that a heap may have besides twice those that count."""


class Timers:
    """The timers that one worker has to run, by the time when they are due. An idle timer is not
    here, so that a pass of the worker costs by what is due. For one thread, or one event loop;
    other threads may call `discard`.

    timer    `_due_at`     the heap              after
    idle     -             -                     a run, if it is not due again; `discard`
    queued   its time      an entry of that      `add`; another `add` for an earlier time
    taken    `_TAKEN`      -                     `take_due`, until `requeue`

    A heap cannot change the time of an entry, or drop it. So an entry counts while `_due_at` has
    its time, and is else passed over when that comes; where most are such, the heap is made anew.
    """

    def __init__(self, timers: Iterable[Timer] = ()) -> None:
        self._due_at: dict[Timer, float] = {}
        """Keeps them alive, as the application may drop their limiters."""
        self._heap: list[tuple[float, int, ref[Timer]]] = []
        self._numbers = itertools.count()
        """The second item of an entry, so that no two are equal."""
        for timer in timers:
            self.add(timer)

    def __len__(self) -> int:
        return len(self._due_at)

    def __iter__(self) -> Iterator[Timer]:
        return iter(list(self._due_at))

    @property
    def next_due_at(self) -> float:
        """When to call `take_due` next (monotonic seconds); `NEVER` if all timers are idle."""
        return self._heap[0][0] if self._due_at else NEVER

    def add(self, timer: Timer) -> None:
        """Queue `timer` for when it is due, unless it is queued for an earlier time."""
        due_at = timer.next_due_at
        if due_at < self._due_at.get(timer, NEVER) and not timer.detached:
            # A signal handler may raise between the two, in a task: the entry does not count yet.
            heappush(self._heap, (due_at, next(self._numbers), ref(timer)))
            self._due_at[timer] = due_at

    def __contains__(self, timer: Timer) -> bool:
        return timer in self._due_at

    def discard(self, timer: Timer) -> None:
        self._due_at.pop(timer, None)

    def take_due(self, now: float) -> list[Timer]:
        """Return the timers that are due, in the order of their times, for a run and `requeue`."""
        due = []
        while self._heap and self._heap[0][0] <= now:
            due_at, _, weak = heappop(self._heap)
            timer = weak()
            if timer is None or self._due_at.get(timer) != due_at:
                continue
            if timer.next_due_at <= now:
                self._due_at[timer] = _TAKEN
                due.append(timer)
            else:  # a flush that the worker has not made has sent it
                self.requeue([timer])
        return due

    def requeue(self, timers: Iterable[Timer]) -> None:
        """Queue these, which were taken, for when they are due next."""
        for timer in timers:
            self._due_at.pop(timer, None)
            self.add(timer)
        if len(self._heap) > 2 * len(self._due_at) + _GIVEN_UP_MOST:
            queued = [(at, timer) for timer, at in list(self._due_at.items()) if at != _TAKEN]
            self._heap = sorted((at, next(self._numbers), ref(timer)) for at, timer in queued)
