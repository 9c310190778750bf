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

import pytest

from distwindow import StoreUnavailable
from distwindow.ring.clock import NEVER, SYSTEM
from distwindow.runtime import worker as shutdown
from distwindow.runtime.worker import FlushJob, FlushJobs, WorkerTasks, WorkerThread
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

    def worked(self, now: float) -> None: ...

    def reschedule(self, now: float) -> None: ...


@pytest.fixture
def worker(monkeypatch: pytest.MonkeyPatch) -> WorkerThread:
    """A worker that is no part of the shutdown of this process."""
    monkeypatch.setattr("distwindow.runtime.worker.SHUTDOWN", shutdown.Shutdown())
    monkeypatch.setattr(shutdown.Shutdown, "hook_exit", lambda *_: None)
    return WorkerThread()


def serve(worker: WorkerThread, work: Any) -> FlushJob:
    return worker.add_limiter(work, work.send, SYSTEM, name="a test")


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
    """After the next wake-up the same thread sends everything."""
    works = [Work(), Work()]
    for work in works:
        serve(worker, work)

    def after() -> None:
        works[1].count()
        until(lambda: works[0].sent == works[0].counted, timeout=5)
        until(lambda: works[1].sent == works[1].counted, timeout=5)

    assert every_moment(works[0].count, after) > 2
    assert works[0].counted > 2
    assert len(works[0].senders | works[1].senders) == 1


def test_the_first_wake_up_that_is_interrupted(monkeypatch: pytest.MonkeyPatch) -> None:
    """There is never a second thread beside the first."""
    monkeypatch.setattr("distwindow.runtime.worker.SHUTDOWN", shutdown.Shutdown())
    monkeypatch.setattr(shutdown.Shutdown, "hook_exit", lambda *_: None)
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
        if job.flush_done is not None:
            job.flush_done.wait(5)
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
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("distwindow.runtime.worker.SHUTDOWN", shutdown.Shutdown())
    monkeypatch.setattr(shutdown.Shutdown, "hook_exit", lambda *_: None)
    monkeypatch.setattr("distwindow.runtime.worker.SETTLED_S", 0.0)
    worker, works = WorkerTasks(), [Work(), Work()]
    failures: list[BaseException] = [asyncio.CancelledError(), Raised(), GeneratorExit()]

    def flush_of(work: Work) -> Callable[[bool], Any]:
        async def flush(everything: bool) -> None:
            work.send(everything)
            if work is works[0] and failures:
                raise failures.pop()

        return flush

    # Kept, as the worker has weak references.
    _jobs = [
        worker.add_limiter(
            work,  # type: ignore[arg-type]  # it stands in for a strategy
            flush_of(work),
            SYSTEM,
            name="a test",
        )
        for work in works
    ]
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
