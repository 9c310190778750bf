"""Nobody pays for an integration that is not used."""

from __future__ import annotations

import subprocess
import sys

import pytest

FRAMEWORKS = {"starlette", "fastapi", "pydantic", "flask", "werkzeug", "django", "rest_framework"}


@pytest.mark.parametrize(
    ("module", "is_integration"), [("distwindow", False), ("distwindow.contrib.asgi", True)]
)
def test_no_framework_is_imported(module: str, is_integration: bool) -> None:
    program = f"import sys, {module}; print(*sys.modules)"
    printed = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    ).stdout
    imported = set(printed.split())
    assert not imported & FRAMEWORKS
    assert ("distwindow.contrib.http" in imported) == is_integration
