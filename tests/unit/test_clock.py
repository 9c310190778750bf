"""The clock that leases and deadlines go by."""

from __future__ import annotations

import sys
import time

import pytest

from distwindow.core.clock import SYSTEM, _monotonic


@pytest.mark.skipif(sys.platform != "linux", reason="other systems have no such clock")
def test_it_goes_on_while_the_machine_is_suspended() -> None:
    before = time.clock_gettime(time.CLOCK_BOOTTIME)
    now = SYSTEM.monotonic()
    assert before <= now <= time.clock_gettime(time.CLOCK_BOOTTIME)


def test_where_there_is_none_it_is_the_usual_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(time, "CLOCK_BOOTTIME", raising=False)
    assert _monotonic() is time.monotonic
