"""What the pages and examples must not depend on: how busy this machine is."""

from __future__ import annotations

import pytest

from distwindow.guard import guard as base
from distwindow.guard.system import SystemSample


@pytest.fixture(autouse=True)
def idle_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have psutil's sampler say that the machine is idle: a page with a `SystemRule` would refuse
    its calls on a busy one, as it has to.
    """
    sample = SystemSample(load=0.1, cpu=0.1)
    monkeypatch.setattr(base, "PsutilSampler", lambda clock: lambda: sample)
