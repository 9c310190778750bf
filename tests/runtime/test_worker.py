"""The worker of blocking limiters, and callers that a signal handler's exception interrupts.

A handler may run wherever a Python function begins, a loop goes back or a call has returned, so an
exception is raised before each line in turn, and before each function's first.
"""

from __future__ import annotations

import asyncio
import sys
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any
from weakref import ref

import pytest

from distwindow import ConfigurationError, DistwindowError, StoreTimeout, StoreUnavailable
from distwindow.ring.clock import NEVER, SYSTEM
from distwindow.ring.commands import Read
from distwindow.runtime import shutdown
from distwindow.runtime.flush import (
    FlushSchedule,
    FlushSource,
    OutgoingCommand,
    flush_due,
    send_all,
)
from distwindow.runtime.flush_job import FlushJob, FlushJobs
from distwindow.runtime.steps import run_blocking
from distwindow.runtime.timers import Timer, Timers
from distwindow.runtime.worker import WorkerTasks, WorkerThread
from tests.servers import until


class Interrupt(BaseException):
    """Raised as if by a signal handler."""


class Raised(BaseException):
    """Raised by code of the application that a flush calls."""


class Work:
    """In the place of a strategy: counts that are sent when they are due."""

    def __init__(self) -> None:
        self.next_due_at = NEVER
        self.dropped = 0
        self.wake: Callable[[], object] = lambda: None
        self.counted = self.sent = 0
        self.senders: set[int] = set()

    def count(self) -> None:
        self.counted += 1
        self.next_due_at = SYSTEM.monotonic()
        self.wake()

    def send(self, everything: bool) -> None:
        self.senders.add(threading.get_ident())
        self.next_due_at = NEVER
        self.sent = self.counted

    def unreturned_permits(self) -> int:
        return 0

    def unacknowledged_counts(self) -> int:
        return self.counted - self.sent

    def reschedule(self, now: float) -> None: ...


class Watched(Work):
    """Counts how often the worker looks at it."""

    looks = 0

    @property
    def next_due_at(self) -> float:
        self.looks += 1
        return self._due_at

    @next_due_at.setter
    def next_due_at(self, at: float) -> None:
        self._due_at = at


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """The workers of a test are no part of the shutdown of this process."""
    monkeypatch.setattr("distwindow.runtime.worker.SHUTDOWN", shutdown.Shutdown())
    monkeypatch.setattr(shutdown.Shutdown, "hook_exit", lambda *_: None)


@pytest.fixture
def worker(alone: None) -> WorkerThread:
    return WorkerThread()


def serve(worker: WorkerThread | WorkerTasks, work: Any, flush: Any = None) -> FlushJob:
    return worker.add_limiter(work, flush or work.send, SYSTEM, name="a test")


def interrupted(step: Callable[[], object], number: int) -> bool:
    """Call `step`, and raise before the `number`th line of distwindow's code that it runs. Return
    True if it came to that line.
    """
    left = number

    def trace(frame: FrameType, event: str, _: Any) -> Any:
        nonlocal left
        # Not in the standard library's callbacks of weak references: Python drops what they raise.
        name = str(frame.f_globals.get("__name__"))
        if event in ("call", "line") and name.startswith("distwindow."):
            left -= 1
            if left == 0:
                raise Interrupt
        return trace

    sys.settrace(trace)
    try:
        step()
    except Interrupt:
        return True
    finally:
        sys.settrace(None)
    return False


def every_moment(step: Callable[[], object], after: Callable[[], object]) -> int:
    """Interrupt `step` before each of its lines in turn, and call `after` each time. Return the
    number of lines.
    """
    for number in range(1, 500):
        was_interrupted = interrupted(step, number)
        after()
        if not was_interrupted:
            return number - 1
    raise AssertionError("it never ends")


def test_a_wake_up_that_is_interrupted(worker: WorkerThread) -> None:
    """After the next wake-up the same thread sends everything: also what the other limiter has
    counted, if its own wake-up came as far as to say for whom it is.
    """
    works = [Work(), Work()]
    jobs = [serve(worker, work) for work in works]
    made_good = 0

    def after() -> None:
        nonlocal made_good
        if jobs[0] in worker._woken:
            made_good += 1
        elif works[0].sent < works[0].counted:
            works[0].count()
        works[1].count()
        until(lambda: works[0].sent == works[0].counted, timeout=5)
        until(lambda: works[1].sent == works[1].counted, timeout=5)

    assert every_moment(works[0].count, after) > 2
    assert works[0].counted > 2
    assert made_good
    assert len(works[0].senders | works[1].senders) == 1


def test_the_first_wake_up_that_is_interrupted(alone: None) -> None:
    """There is never a second thread beside the first."""
    for number in range(1, 30):
        worker, work = WorkerThread(), Work()
        serve(worker, work)
        was_interrupted = interrupted(work.count, number)
        for _ in range(20):
            work.count()
            # mypy cannot infer a lambda whose parameter has a default.
            until(lambda work=work: work.sent == work.counted, timeout=5, every=0.0005)  # type: ignore[misc]
        assert len(work.senders) == 1
        if not was_interrupted:
            break
    assert number > 2


# -- what a pass costs ----------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [WorkerThread, WorkerTasks])
async def test_a_pass_looks_only_at_what_is_due(alone: None, kind: Any) -> None:
    """However many others there are: that have nothing to do, or are queued for a later time."""
    worker, work = kind(), Work()
    idle, later = [[Watched() for _ in range(1000)] for _ in range(2)]
    jobs = [serve(worker, each) for each in (work, *idle, *later)]
    for each in later:
        each.next_due_at = SYSTEM.monotonic() + 3600
        each.wake()
    await sent(work)
    for each in idle + later:
        each.looks = 0
    for _ in range(20):
        await sent(work)
    assert sum(each.looks for each in idle + later) == 0, jobs


async def sent(work: Work) -> None:
    """Count, and wait for the pass of a worker that sends it."""
    work.count()
    await asyncio.to_thread(until, lambda: work.sent == work.counted, every=0.001)


class Alarm(Timer):
    """A timer that is due when it is told to be."""

    due_at = NEVER


def test_a_timer_comes_at_the_time_that_it_has_last() -> None:
    """It is queued for an earlier time, or for a later one by a flush that is not the worker's."""
    timers, (first, second) = Timers(), (Alarm("first"), Alarm("second"))
    first.due_at, second.due_at = 10.0, 20.0
    for timer in (first, second):
        timers.add(timer)
    second.due_at = 5.0
    timers.add(second)
    first.due_at = 15.0
    assert timers.take_due(4.9) == []
    assert timers.take_due(10.0) == [second]
    second.due_at = NEVER
    timers.requeue([second])
    assert (timers.next_due_at, list(timers)) == (15.0, [first])
    assert timers.take_due(25.0) == [first]
    timers.add(first)
    assert timers.take_due(25.0) == [], "it runs already"
    first.due_at = NEVER
    timers.requeue([first])
    assert (timers.next_due_at, len(timers)) == (NEVER, 0)


def test_times_that_are_given_up_take_no_room() -> None:
    """A lease of an hour whose counts are flushed each second is due in an hour after each flush,
    and a limiter may be made and closed for each request.
    """
    timers, kept = Timers(), Alarm("kept")
    for now in range(1000):
        kept.due_at = 5000.0
        timers.requeue(timers.take_due(now))
        kept.due_at = now + 1.0
        timers.add(kept)
        closed = Alarm("closed")
        closed.due_at = 5000.0
        timers.add(closed)
        timers.discard(closed)
    assert len(timers) == 1
    assert len(timers._heap) < 200
    kept.due_at = 5000.0
    assert timers.take_due(1000.0) == []
    assert timers.take_due(5000.0) == [kept], "once"


def test_a_timer_lives_while_it_is_queued() -> None:
    timers, timer = Timers(), Alarm("dropped")
    timer.due_at, alive = 5.0, ref(timer)
    timers.add(timer)
    del timer
    assert [each.name for each in timers] == ["dropped"]
    timers.discard(next(iter(timers)))
    assert alive() is None


def test_a_task_that_is_interrupted_loses_no_timer() -> None:
    """The next one begins with all that the first had taken out of the heap."""
    timers, timer = Timers(), Alarm("taken")
    timer.due_at = 5.0
    timers.add(timer)
    assert timers.take_due(5.0) == Timers(timers).take_due(5.0) == [timer]


# -- who waits for a run --------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["wait_for", "detach"])
def test_waiting_that_is_interrupted(worker: WorkerThread, name: str) -> None:
    work = Work()
    job = serve(worker, work)
    entered, release = threading.Event(), threading.Event()

    def send(everything: bool) -> None:
        entered.set()
        release.wait(5)
        work.send(everything)

    job.flush = send

    def step() -> None:
        getattr(worker, name)(job)

    def after() -> None:
        release.set()
        if job.run_done is not None:
            job.run_done.wait(5)
        entered.clear()
        release.clear()
        work.count()
        entered.wait(5)
        threading.Timer(0.005, release.set).start()  # so that there is something to wait for

    after()
    assert every_moment(step, after) > 1
    release.set()
    until(lambda: work.sent == work.counted, timeout=5)
    assert len(work.senders) == 1


@pytest.mark.parametrize("kind", [SystemExit, KeyboardInterrupt, GeneratorExit, Raised])
def test_nothing_that_a_flush_raises_ends_the_thread(
    worker: WorkerThread, kind: type[BaseException], caplog: pytest.LogCaptureFixture
) -> None:
    works = [Work(), Work()]
    jobs = [serve(worker, work) for work in works]

    def raises(everything: bool) -> None:
        works[0].send(everything)
        raise kind

    jobs[0].flush = raises
    for _ in range(3):
        for work in works:
            work.count()
        until(lambda: works[0].sent == works[0].counted and works[1].sent == works[1].counted)
    assert len(works[0].senders | works[1].senders) == 1
    assert len(caplog.messages) == 1


async def test_nothing_that_a_flush_raises_ends_the_task(
    alone: None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("distwindow.runtime.timers.SETTLED_S", 0.0)
    worker, works = WorkerTasks(), [Work(), Work()]
    failures: list[BaseException] = [asyncio.CancelledError(), Raised(), GeneratorExit()]

    def flush_of(work: Work) -> Callable[[bool], Any]:
        async def flush(everything: bool) -> None:
            work.send(everything)
            if work is works[0] and failures:
                raise failures.pop()

        return flush

    # Kept, as the worker has weak references.
    _jobs = [serve(worker, work, flush_of(work)) for work in works]
    loop_worker = worker._worker(asyncio.get_running_loop())
    for _ in range(4):
        for work in works:
            work.count()
        for _ in range(1000):
            await asyncio.sleep(0)
            if all(work.sent == work.counted for work in works):
                break
        assert [work.sent for work in works] == [work.counted for work in works]
        assert not loop_worker._cancelled
    assert not failures
    failed, again = caplog.messages  # what ends a task is no error of the flush
    assert "unexpected error" in failed
    assert "can be flushed again" in again
    await loop_worker._task  # type: ignore[misc]  # nothing is pending, so it ends


def test_flushing_all_needs_no_wake_up(worker: WorkerThread) -> None:
    """A caller was interrupted between counting and waking, and its process ends."""
    work = Work()
    job = serve(worker, work)
    work.counted = 3
    worker.flush_all(SYSTEM.monotonic() + 5, final=True)
    assert work.sent == 3
    worker.detach(job)
    work.counted = 4
    worker.flush_all(SYSTEM.monotonic() + 5, final=True)
    assert work.sent == 3, "it is closed"


@pytest.mark.parametrize(("final", "sent"), [(True, 2), (False, 1)])
def test_what_is_counted_while_all_is_flushed_is_sent_if_no_call_is_decided_any_more(
    worker: WorkerThread, final: bool, sent: int
) -> None:
    work = Work()

    def send(everything: bool) -> None:
        work.send(everything)
        work.counted = 2  # of a call that was being decided

    work.counted = 1
    job = serve(worker, work, send)
    worker.flush_all(SYSTEM.monotonic() + 5, final=final)
    assert (work.sent, job.failure) == (sent, None)


def test_a_limiter_that_is_dropped_is_forgotten() -> None:
    jobs, work = FlushJobs(), Work()
    # `Work` stands in for a strategy.
    job = FlushJob(work, work.send, "a test")  # type: ignore[arg-type]
    jobs.add(job)
    assert jobs.all() == [job]
    del job
    assert jobs.all() == []
    assert not jobs._refs


def test_what_has_just_failed_is_flushed_last(worker: WorkerThread) -> None:
    """It may take until the deadline, and at exit the others would have no time left."""
    flushed: list[str] = []

    class Named(Work):
        def __init__(self, name: str) -> None:
            super().__init__()
            self.name = name

        def send(self, everything: bool) -> None:
            flushed.append(self.name)

    fails, works = Named("fails"), Named("works")
    failing = serve(worker, fails)
    kept = failing, serve(worker, works)
    failing.failure = StoreUnavailable("away", charged=False)
    worker.flush_all(0.0, final=False)
    assert flushed == ["works", "fails"], kept


def test_a_job_that_has_given_up_at_exit_is_tried_once(worker: WorkerThread) -> None:
    """Each step of a shutdown would else wait for the same store until its deadline."""
    work, attempts = Work(), 0

    def fail(everything: bool) -> StoreUnavailable:
        nonlocal attempts
        attempts += 1
        return StoreUnavailable("away", charged=False)

    job = serve(worker, work, fail)
    job.gave_up_at_exit = True
    worker.flush_all(SYSTEM.monotonic() + 0.2, final=True)
    assert attempts == 1


@pytest.mark.parametrize(
    ("failure", "is_away", "attempts"),
    [
        (StoreUnavailable("away", charged=False), True, 1),
        (ConfigurationError("wrong password"), False, 1),
        (StoreUnavailable("reset", charged=None), False, 3),
    ],
)
def test_a_shutdown_repeats_what_may_succeed(
    worker: WorkerThread, failure: DistwindowError, is_away: bool, attempts: int
) -> None:
    """It waits for no server that is known to be away, and for no mistake to be mended."""
    flushes = 0

    def flush(everything: bool) -> DistwindowError | None:
        nonlocal flushes
        flushes += 1
        job.store_is_away = is_away
        return failure if flushes < 3 else None

    job = serve(worker, Work(), flush)
    worker.flush_all(SYSTEM.monotonic() + 60, final=False)
    assert flushes == attempts


# -- one flush ------------------------------------------------------------------------------------


def test_what_a_cancelled_exchange_has_sent_has_an_unknown_outcome() -> None:
    """A refund would be sent twice if it was taken for one that was not sent."""
    outcomes: list[Any] = []
    outgoing = OutgoingCommand(Read(()), lambda reply, sent_at: outcomes.append(reply))
    exchange = send_all([outgoing], SYSTEM.monotonic)
    next(exchange)
    with pytest.raises(asyncio.CancelledError):
        exchange.throw(asyncio.CancelledError())
    assert [(type(one), one.charged) for one in outcomes] == [(StoreTimeout, None)]


def test_a_flush_fails_where_the_request_for_the_stores_time_did() -> None:
    away = StoreUnavailable("away", charged=False)

    class AsksTheTime(FlushSource):
        def clock_probe(self) -> list[OutgoingCommand]:
            return [OutgoingCommand(Read(()), lambda reply, sent_at: None)]

    flush = flush_due(AsksTheTime(), SYSTEM.monotonic)
    result = run_blocking(flush, lambda step: [away], SYSTEM.sleep)
    assert result == (away, True)


def recompute_beside_a_thread(schedule: FlushSchedule, place: int) -> int:
    """Have `schedule` recompute its next time, and set an earlier one after the `place`th call that
    it makes, where another thread may run. Return how many calls it has made until then.
    """
    calls = 0

    def switch(frame: Any, event: str, argument: Any) -> None:
        nonlocal calls
        caller = frame if event == "c_return" else frame.f_back
        returns = event in ("c_return", "return")
        if returns and caller.f_code is FlushSchedule.recompute.__code__:
            calls += 1
            if calls == place:
                sys.setprofile(None)
                schedule.flush_by(5.0)

    sys.setprofile(switch)
    try:
        schedule.recompute(0.0, [lambda now: 10.0, lambda now: 20.0])
    finally:
        sys.setprofile(None)
    return calls


def test_a_time_that_another_thread_sets_meanwhile_is_kept() -> None:
    for place in (1, 2, 3):  # after each time, and after the wake-up
        schedule = FlushSchedule(0.25)
        schedule.wake = lambda: None
        assert recompute_beside_a_thread(schedule, place) == place
        assert schedule.next_due_at == 5.0, place


def test_a_flush_that_never_came_is_asked_for_again() -> None:
    """The task of an event loop that was to flush may have ended."""
    schedule, woken = FlushSchedule(0.25), list[float]()
    schedule.wake = lambda: woken.append(schedule.next_due_at)
    for at in (10.0, 10.1, 11.2, 11.3, 11.4):
        schedule.flush_by(at)
    assert woken == [10.0, 11.3]
