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

import pytest

from distwindow import AsyncGuard, ConfigurationError, Guard, SystemOverloaded, SystemRule
from distwindow.guard.system import IDLE_S, UNKNOWN, SystemSampling
from distwindow.ring.clock import NEVER, SYSTEM
from distwindow.runtime import timers
from distwindow.runtime.worker import THREAD_WORKER
from distwindow.support.locks import run_to_completion
from distwindow.testing import ManualClock
from tests.guard.guard_worlds import WORLDS, World

RULE = SystemRule(highest_cpu_usage=0.9)
MOST_S = 10.0
"""How long a test waits for the worker at most; it comes at once."""


class Wakes:
    """A sampling with a clock that is moved, and how often it has woken its worker."""

    def __init__(self) -> None:
        self.clock = ManualClock()
        self.taken = 0
        self.count = 0
        self.sampling = SystemSampling(self._sampler, self.clock, "guard 'g'")
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
    assert guard._sampling is not None
    assert not guard._sampling.detached
    guard.close()
    assert guard._sampling.detached


# -- when -----------------------------------------------------------------------------------------


def test_the_worker_is_woken_by_the_first_call_and_again_after_a_pause() -> None:
    wakes = Wakes()
    assert wakes.sampling.next_due_at == NEVER, "nothing runs before the first call"
    wakes.call()
    assert wakes.count == 1
    assert wakes.sampling.next_due_at == wakes.clock.monotonic()
    while wakes.sampling.next_due_at != NEVER:
        wakes.sampling.run()
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
        wakes.sampling.run()
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
    wakes.sampling.run()
    wakes.sampling.after_fork()
    wakes.call()
    assert wakes.count == 2


def test_the_end_of_the_process_samples_nothing() -> None:
    """It runs the timers that flush, and no others."""
    sampled: list[None] = []

    def sampler() -> tuple[float, float]:
        sampled.append(None)
        return 0.0, 0.0

    with Guard("memory://", [RULE], sampler=sampler):
        THREAD_WORKER.flush_all(SYSTEM.monotonic() + 5, final=True)
    assert sampled == [None], "the first sample is that of the constructor"


def test_the_end_of_a_loop_samples_nothing() -> None:
    sampled: list[None] = []

    async def main() -> int:
        by_the_worker = asyncio.Event()

        def sampler() -> tuple[float, float]:
            sampled.append(None)
            if len(sampled) == 2:
                by_the_worker.set()
            return 0.0, 0.0

        async with AsyncGuard("memory://", [RULE], sampler=sampler).entry("r"):
            await by_the_worker.wait()
        return len(sampled)

    assert asyncio.run(main()) == len(sampled)


# -- a sampler that fails -------------------------------------------------------------------------


@pytest.mark.parametrize("kind", WORLDS)
async def test_while_the_sampler_fails_nothing_is_refused_and_that_is_logged_once(
    kind: Any, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(timers, "SETTLED_S", 0.0)
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


@pytest.mark.parametrize(
    "sample", [None, 0.5, (1.0,), (1.0, 2.0, 3.0), ("a", "b"), (0, 1e400), (0.3, 95), (0, -0.1)]
)
def test_what_is_no_sample_is_an_error_of_the_guard(sample: Any) -> None:
    with pytest.raises(ConfigurationError, match="it returns the load average and the CPU usage"):
        Guard("memory://", [RULE], sampler=lambda: sample)


@pytest.mark.parametrize("kind", WORLDS)
async def test_a_little_above_1_is_a_cpu_usage_of_1(kind: Any) -> None:
    world = World(kind, [RULE], sampler=lambda: (0.0, 1.000001))
    with pytest.raises(SystemOverloaded) as raised:
        await world.call()
    assert raised.value.value == 1.0
    assert repr(raised.value.rule) == "SystemRule(highest_cpu_usage=0.9)"


def test_a_sampler_that_is_no_function_or_fails_is_an_error_of_the_guard() -> None:
    def sampler() -> Any:
        raise OSError("no /proc")

    with pytest.raises(ConfigurationError, match="sampler=5 is not a function"):
        Guard("memory://", [RULE], sampler=5)  # type: ignore[arg-type]  # the mistake
    with pytest.raises(ConfigurationError, match=r"sampler=.* failed: OSError: no /proc"):
        Guard("memory://", [RULE], sampler=sampler)


@pytest.mark.parametrize("kind", [SystemExit, KeyboardInterrupt, GeneratorExit])
def test_what_a_sampler_raises_is_a_failure_of_the_sample(kind: type[BaseException]) -> None:
    wakes = Wakes()
    failing = SystemSampling(wakes._sampler, wakes.clock, "guard 'g'")

    def quits() -> None:
        raise kind

    failing._sampler = quits
    # In a thread, as in the main thread a KeyboardInterrupt may be that of Ctrl-C.
    assert isinstance(run_to_completion(lambda: failing.run()), kind)
    assert failing.sample == UNKNOWN


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
    with pytest.raises(ConfigurationError, match="pip install psutil"):
        Guard("memory://", [RULE])
    with Guard("memory://", [SystemRule(qps=1)]) as guard, guard.entry("r"):
        pass
