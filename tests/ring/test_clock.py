"""The monotonic clock of leases and deadlines."""

from __future__ import annotations

import sys
import time

import pytest

from distwindow.ring.clock import SYSTEM, _monotonic


@pytest.mark.skipif(sys.platform != "linux", reason="other systems have no such clock")
def test_it_includes_the_time_of_a_suspension() -> None:
    before = time.clock_gettime(time.CLOCK_BOOTTIME)
    now = SYSTEM.monotonic()
    assert before <= now <= time.clock_gettime(time.CLOCK_BOOTTIME)


def test_without_such_a_clock_it_is_time_monotonic(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(time, "CLOCK_BOOTTIME", raising=False)
    assert _monotonic() is time.monotonic
