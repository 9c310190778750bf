"""The phases of a shutdown are those of the table at the head of `worker/shutdown.py`."""

from __future__ import annotations

import _thread
import os
import re
import signal
import time

import pytest

from distwindow.worker import shutdown
from distwindow.worker.flush_job import EXIT_TIMEOUT_S, FlushJobs
from distwindow.worker.shutdown import (
    CALL_DELAY_S,
    ENDING,
    FIRST_FLUSH_TIMEOUT_S,
    FLUSHING,
    PAUSED,
    POLL_S,
    RUNNING,
    Shutdown,
)

NAMES = {"RUNNING": RUNNING, "FLUSHING": FLUSHING, "PAUSED": PAUSED, "ENDING": ENDING}
ROW = re.compile(
    rf"^    (?P<phase>{'|'.join(NAMES)})  +(?P<calls>.+?)  +(?P<sigterm>.+?)  +(?P<next>[A-Z]+),",
    re.MULTILINE,
)
TABLE = {row["phase"]: row.groupdict() for row in ROW.finditer(shutdown.__doc__ or "")}


class Job:
    """A job with something to send until it has been flushed."""

    detached = False
    failure = close_done = None
    has_unsent = True
    gave_up_at_exit = loss_reported = False

    class strategy:  # noqa: N801 - an attribute
        pause_calls = staticmethod(lambda hold: None)
        resume_calls = staticmethod(lambda: None)


class Worker:
    """Records in which phase it flushes."""

    def __init__(self, ending: Shutdown) -> None:
        self.jobs = FlushJobs()
        self.job = Job()
        # `Job` stands in for a `FlushJob`.
        self.jobs.add(self.job)  # type: ignore[arg-type]
        self.ending = ending
        self.flushed_in: list[int] = []
        self.deadlines: list[float] = []
        ending.add(self)

    def flush_all(self, deadline: float, *, final: bool) -> None:
        self.flushed_in.append(self.ending.phase)
        self.deadlines.append(deadline)
        self.job.has_unsent = False


def test_the_table_has_every_phase() -> None:
    assert list(TABLE) == list(NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_what_calls_do_in_it(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    ending = Shutdown()
    ending.phase = NAMES[name]
    slept: list[float] = []

    def sleep(seconds: float) -> None:
        slept.append(seconds)
        if len(slept) == 10:
            ending.phase = RUNNING

    monkeypatch.setattr(time, "sleep", sleep)
    ending.hold_call()
    observed = {(): "are decided", (CALL_DELAY_S,): "are decided, slowly"}.get(tuple(slept), "wait")
    assert observed == TABLE[name]["calls"]
    assert observed != "wait" or slept == [CALL_DELAY_S] + [POLL_S] * 9


@pytest.mark.parametrize("name", NAMES)
def test_what_sigterm_does_in_it(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    ending = Shutdown()
    ending.phase = NAMES[name]
    done: list[str] = []
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    monkeypatch.setattr(signal, "raise_signal", lambda _: done.append("ends the process"))
    monkeypatch.setattr(_thread, "start_new_thread", lambda *_: done.append("starts the thread"))
    ending.on_sigterm(signal.SIGTERM, None)
    assert done == [TABLE[name]["sigterm"]] or (done, TABLE[name]["sigterm"]) == ([], "is ignored")
    assert ending.phase == (FLUSHING if name == "RUNNING" else NAMES[name])


def test_one_leads_to_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    ending = Shutdown()
    worker = Worker(ending)
    monkeypatch.setattr(os, "getpid", lambda: 1)  # which survives
    monkeypatch.setattr(time, "sleep", lambda _: None)
    seen: list[int] = [ending.phase]

    def kill(process: int, number: int) -> None:
        seen.extend([*worker.flushed_in, ending.phase])
        ending._sigterm_survived.set()

    monkeypatch.setattr(os, "kill", kill)
    monkeypatch.setattr(_thread, "start_new_thread", lambda function, words: function(*words))
    ending.on_sigterm(signal.SIGTERM, None)
    seen.append(ending.phase)
    assert seen == [RUNNING, FLUSHING, PAUSED, ENDING, RUNNING]
    names = list(NAMES)
    follows = {name: names[seen[at + 1]] for at, name in enumerate(names)}
    assert follows == {name: row["next"] for name, row in TABLE.items()}


def test_an_exit_has_one_deadline_for_all_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    """A store that does not reply used to take 4 s for each worker."""
    now = 1000.0

    def flush_slowly(self: Worker, deadline: float, *, final: bool) -> None:
        nonlocal now
        self.deadlines.append(deadline)
        now = max(now, deadline)  # as if the store had not replied until then

    monkeypatch.setattr(shutdown, "monotonic", lambda: now)
    monkeypatch.setattr(shutdown, "report_lost", lambda jobs: None)
    monkeypatch.setattr(time, "sleep", lambda seconds: None)
    monkeypatch.setattr(Worker, "flush_all", flush_slowly)
    ending = Shutdown()
    workers = [Worker(ending), Worker(ending)]
    ending.flush_at_exit()
    assert [worker.deadlines for worker in workers] == [
        [1000 + FIRST_FLUSH_TIMEOUT_S, 1000 + EXIT_TIMEOUT_S]
    ] * 2
