"""The CPU usage from psutil: of which time it is, and what counts as busy."""

from __future__ import annotations

from typing import Any

import psutil
import pytest
from hypothesis import given
from hypothesis import strategies as st

from distwindow.guard.system import PsutilSampler, SystemSample, cpu_usage
from distwindow.testing import ManualClock


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
