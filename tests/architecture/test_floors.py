"""distwindow keeps the rule of the floors."""

from __future__ import annotations

from pathlib import Path

import distwindow
from tests.architecture.floors import violations


def test_imports_only_go_down_and_have_no_cycles() -> None:
    assert violations(Path(distwindow.__file__).parent) == []
