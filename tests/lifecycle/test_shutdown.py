"""The last flush of a process, and `exit_on_sigterm`."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Iterator

import pytest

from distwindow import exit_on_sigterm
from distwindow.runtime import shutdown
from distwindow.runtime.flush_job import FlushJobs
from distwindow.runtime.shutdown import EXIT_TIMEOUT_S, FIRST_FLUSH_TIMEOUT_S, Shutdown
from tests.clock_and_stores import ManualClock


class Worker:
    """Flushes until its deadline, as if the store did not reply, and records that."""

    def __init__(self, clock: ManualClock) -> None:
        self.jobs = FlushJobs()
        self.clock = clock
        self.deadlines: list[float] = []

    def flush_all(self, deadline: float, *, final: bool) -> None:
        self.deadlines.append(deadline)
        self.clock.advance(max(0.0, deadline - self.clock.monotonic()))


def test_an_exit_has_one_deadline_for_all_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    """A store that does not reply used to take 4 s for each worker."""
    clock, ending = ManualClock(), Shutdown()
    monkeypatch.setattr(shutdown, "monotonic", clock.monotonic)
    monkeypatch.setattr(shutdown, "report_lost", lambda jobs: None)
    monkeypatch.setattr(time, "sleep", lambda seconds: None)
    began, workers = clock.monotonic(), [Worker(clock), Worker(clock)]
    for worker in workers:
        ending.add(worker)
    ending.flush_at_exit()
    assert [worker.deadlines for worker in workers] == [
        [began + FIRST_FLUSH_TIMEOUT_S, began + EXIT_TIMEOUT_S]
    ] * 2


@pytest.fixture
def sigterm(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """SIGTERM has its default action, and the tests' own handler afterwards."""
    monkeypatch.setattr(shutdown, "_last_sigterm_at", float("-inf"))
    handler = signal.signal(signal.SIGTERM, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGTERM, handler)


def test_exit_on_sigterm_ends_the_process_once(
    sigterm: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A second signal interrupts no clean-up, and one that comes much later ends the process where
    the first exception was dropped.
    """
    clock = ManualClock()
    monkeypatch.setattr(shutdown, "SYSTEM", clock)
    exit_on_sigterm()
    exit_on_sigterm()
    with pytest.raises(SystemExit) as ended:
        signal.raise_signal(signal.SIGTERM)
    assert ended.value.code == 143
    exit_on_sigterm()
    signal.raise_signal(signal.SIGTERM)
    clock.advance(shutdown.REPEATS_IGNORED_S)
    with pytest.raises(SystemExit):
        signal.raise_signal(signal.SIGTERM)


@pytest.mark.parametrize("handler", [signal.SIG_IGN, lambda number, frame: None])
def test_exit_on_sigterm_replaces_no_other_handler(sigterm: None, handler: signal.Handlers) -> None:
    signal.signal(signal.SIGTERM, handler)
    with pytest.raises(RuntimeError, match=r"SIGTERM is handled already \(by "):
        exit_on_sigterm()
    assert signal.getsignal(signal.SIGTERM) is handler


def test_exit_on_sigterm_is_for_the_main_thread(sigterm: None) -> None:
    raised: list[Exception] = []

    def call() -> None:
        try:
            exit_on_sigterm()
        except RuntimeError as exc:
            raised.append(exc)

    thread = threading.Thread(target=call)
    thread.start()
    thread.join()
    assert str(raised[0]).startswith("exit_on_sigterm() was called outside the main thread")
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
