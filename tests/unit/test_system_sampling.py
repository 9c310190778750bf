"""Samples of the machine: who takes them and when, and what the CPU usage is one of.

state              event                        then
idle               a call                       a sample is due now, and the worker is woken
sampled            a sample is taken            the next is due a second later
                   a call                       nothing
no call for 10 s   a sample is taken            idle
due, and late      a call, each second          the worker is woken again
"""

from __future__ import annotations

import asyncio
import builtins
import logging
import threading
from typing import Any

import psutil
import pytest
from hypothesis import given
from hypothesis import strategies as st

from distwindow import AsyncGuard, ConfigurationError, Guard, SystemRule
from distwindow.consistency.key_state import NEVER
from distwindow.guard.system_sampling import (
    IDLE_S,
    UNKNOWN,
    PsutilSampler,
    SystemSample,
    SystemSampling,
    cpu_usage,
)
from distwindow.testing import ManualClock
from distwindow.worker import THREAD_WORKER

from .guard_worlds import WORLDS, World

RULE = SystemRule(highest_cpu_usage=0.9)
MOST_S = 10.0
"""How long a test waits for the worker at most; it comes at once."""


class Wakes:
    """A sampling with a clock that is moved, and how often it has woken its worker."""

    def __init__(self) -> None:
        self.clock = ManualClock()
        self.taken = 0
        self.count = 0
        self.sampling = SystemSampling(self._sampler, self.clock)
        self.sampling.wake = self._wake

    def _sampler(self) -> tuple[float, float]:
        self.taken += 1
        return 1.0, 0.5

    def _wake(self) -> None:
        self.count += 1

    def call(self) -> None:
        self.sampling.on_call(self.clock.monotonic())


# -- who samples ----------------------------------------------------------------------------------


def test_a_thread_of_the_worker_samples_and_no_call_does() -> None:
    sampled_in: list[int] = []
    sampled = threading.Event()

    def sampler() -> tuple[float, float]:
        sampled_in.append(threading.get_ident())
        if len(sampled_in) == 2:
            sampled.set()
        return 0.0, 0.0

    with Guard("memory://", [RULE], sampler=sampler) as guard:
        assert sampled_in == [threading.get_ident()], "the first sample is that of the constructor"
        for _ in range(50):
            with guard.entry("r"):
                pass
        assert sampled.wait(MOST_S)
    assert threading.get_ident() not in sampled_in[1:]


async def test_a_task_of_the_worker_samples_and_no_call_does() -> None:
    tasks: list[Any] = []
    sampled = asyncio.Event()

    def sampler() -> tuple[float, float]:
        tasks.append(asyncio.current_task())
        if len(tasks) == 2:
            sampled.set()
        return 0.0, 0.0

    async with AsyncGuard("memory://", [RULE], sampler=sampler) as guard:
        for _ in range(50):
            async with guard.entry("r"):
                pass
        await asyncio.wait_for(sampled.wait(), MOST_S)
    assert asyncio.current_task() not in tasks[1:]


@pytest.mark.parametrize("kind", WORLDS)
async def test_a_rule_without_load_and_cpu_samples_nothing(kind: Any) -> None:
    world = World(kind, [SystemRule(qps=5)], sampler=lambda: pytest.fail("sampled"))
    assert await world.outcome() == "passed"
    await world.flush()


def test_a_closed_guard_is_not_sampled_any_more() -> None:
    guard = Guard("memory://", [RULE], sampler=lambda: (0.0, 0.0))
    with guard.entry("r"):
        pass
    assert guard._sampling_job in THREAD_WORKER.jobs.active()
    guard.close()
    assert guard._sampling_job not in THREAD_WORKER.jobs.active()


# -- when -----------------------------------------------------------------------------------------


def test_the_worker_is_woken_by_the_first_call_and_again_after_a_pause() -> None:
    wakes = Wakes()
    assert wakes.sampling.next_due_at == NEVER, "nothing runs before the first call"
    wakes.call()
    assert wakes.count == 1
    assert wakes.sampling.next_due_at == wakes.clock.monotonic()
    while wakes.sampling.next_due_at != NEVER:
        wakes.sampling.take(False)
        wakes.clock.advance(1.0)
    assert wakes.taken == 1 + IDLE_S + 1
    wakes.clock.advance(3600)
    wakes.call()
    assert wakes.count == 2
    assert wakes.sampling.sample == UNKNOWN, "a sample of an hour ago says nothing"


def test_a_guard_in_use_is_sampled_each_second_and_wakes_nobody() -> None:
    wakes = Wakes()
    wakes.call()
    for _ in range(60):
        wakes.sampling.take(False)
        wakes.call()
        wakes.clock.advance(1.0)
    assert (wakes.count, wakes.taken) == (1, 61)


def test_a_worker_that_could_not_start_is_woken_again() -> None:
    wakes = Wakes()
    for _ in range(5):
        wakes.call()
        wakes.clock.advance(1.5)
    assert wakes.count == 5


def test_a_forked_child_wakes_its_own_worker() -> None:
    wakes = Wakes()
    wakes.call()
    wakes.sampling.take(False)
    wakes.sampling.after_fork()
    wakes.call()
    assert wakes.count == 2


def test_the_end_of_the_process_samples_nothing() -> None:
    wakes = Wakes()
    wakes.call()
    wakes.sampling.take(True)
    assert wakes.taken == 1


# -- a sampler that fails -------------------------------------------------------------------------


@pytest.mark.parametrize("kind", WORLDS)
async def test_while_the_sampler_fails_nothing_is_refused_and_that_is_logged_once(
    kind: Any, caplog: pytest.LogCaptureFixture
) -> None:
    answers: list[Any] = [(0.0, 0.95), OSError("no /proc"), OSError("no /proc"), (0.0, 0.95)]

    def sampler() -> Any:
        answer = answers.pop(0)
        if isinstance(answer, OSError):
            raise answer
        return answer

    world = World(kind, [RULE], sampler=sampler)
    outcomes = [await world.outcome()]
    with caplog.at_level(logging.WARNING, logger="distwindow"):
        while answers:
            world.clock.advance(1.0)
            await world.flush()
            outcomes.append(await world.outcome())
    assert outcomes == ["SystemOverloaded", "passed", "passed", "SystemOverloaded"]
    failed, again = caplog.messages
    assert failed.startswith("sampling the machine for guard 'distwindow' at ")
    assert "OSError: no /proc; its highest_system_load and highest_cpu_usage are not" in failed
    assert again.startswith("the machine can be sampled again for guard")


@pytest.mark.parametrize("sample", [None, 0.5, (1.0,), (1.0, 2.0, 3.0), ("a", "b"), (0, 1e400)])
def test_what_is_no_sample_is_an_error_of_the_guard(sample: Any) -> None:
    with pytest.raises(ConfigurationError, match="it returns the load average and the CPU usage"):
        Guard("memory://", [RULE], sampler=lambda: sample)


def test_a_sampler_that_must_be_awaited_is_an_error_of_the_guard() -> None:
    async def sampler() -> tuple[float, float]:
        return 0.0, 0.0

    with pytest.raises(ConfigurationError, match="sampler is a coroutine function"):
        AsyncGuard("memory://", [RULE], sampler=sampler)


def test_without_psutil_an_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    real = builtins.__import__

    def without_psutil(name: str, *args: Any, **kwargs: Any) -> Any:
        if name == "psutil":
            raise ImportError(name)
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", without_psutil)
    with pytest.raises(ConfigurationError, match=r"install distwindow\[system\]"):
        Guard("memory://", [RULE])
    with Guard("memory://", [SystemRule(qps=1)]) as guard, guard.entry("r"):
        pass


# -- psutil ---------------------------------------------------------------------------------------


class Machine:
    """Stands for psutil: CPUs that were busy for so many of the seconds that have passed."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.clock = ManualClock()
        self.busy_s = self.idle_s = 1000.0
        monkeypatch.setattr(psutil, "cpu_times", self._times)
        monkeypatch.setattr(psutil, "getloadavg", lambda: (2.5, 1.0, 1.0))
        self.sampler = PsutilSampler(self.clock)

    def _times(self) -> Any:
        class Times:
            @staticmethod
            def _asdict() -> dict[str, float]:
                return {"user": self.busy_s, "idle": self.idle_s}

        return Times

    def run(self, seconds: float, usage: float) -> None:
        self.clock.advance(seconds)
        self.busy_s += seconds * usage
        self.idle_s += seconds * (1 - usage)


def test_cpu_usage_is_that_of_the_last_second(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine(monkeypatch)
    assert machine.sampler() == SystemSample(2.5, 0.0), "nothing to compare with: not known"
    for usage in (0.9, 0.1, 0.5, 1.0, 0.0):
        machine.run(1.0, usage)
        assert machine.sampler().cpu == pytest.approx(usage)


def test_a_moment_is_no_window_and_spoils_none(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine(monkeypatch)
    machine.run(1.0, 0.4)
    machine.sampler()
    for _ in range(4):
        machine.run(0.1, 1.0)
        assert machine.sampler().cpu == pytest.approx(0.4), "too short: the usage before holds"
    machine.run(0.6, 0.5)
    assert machine.sampler().cpu == pytest.approx(0.7), "of the whole second"


def test_an_hour_is_no_window(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine(monkeypatch)
    machine.run(3600.0, 1.0)
    assert machine.sampler().cpu == 0.0
    machine.run(1.0, 0.8)
    assert machine.sampler().cpu == pytest.approx(0.8)


def test_psutil_reads_this_machine() -> None:
    clock = ManualClock()
    sampler = PsutilSampler(clock)
    clock.advance(1.0)
    sample = sampler()
    assert 0.0 <= sample.cpu <= 1.0
    assert sample.load >= 0.0


SECONDS = st.floats(0, 1e6)
KINDS = ("user", "nice", "system", "idle", "iowait", "irq", "guest", "guest_nice")
TIMES = st.fixed_dictionaries(dict.fromkeys(KINDS, SECONDS))


@given(TIMES, TIMES)
def test_cpu_usage_is_always_from_0_to_1(before: dict[str, float], after: dict[str, float]) -> None:
    assert 0.0 <= cpu_usage(before, after) <= 1.0


def test_guests_are_not_counted_twice_and_waiting_for_io_is_not_busy() -> None:
    before = dict.fromkeys(("user", "idle", "iowait", "guest"), 0.0)
    after = {"user": 40.0, "idle": 50.0, "iowait": 10.0, "guest": 40.0}
    assert cpu_usage(before, after) == 0.4
