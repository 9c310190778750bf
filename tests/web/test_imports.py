"""Nobody pays for an integration that is not used."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from distwindow import contrib

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


@pytest.mark.parametrize(
    "module",
    [
        "asgi",
        "fastapi/__init__",
        "fastapi/routes",
        "flask/__init__",
        "django/__init__",
        "django/settings",
        "drf",
    ],
)
def test_an_integration_is_thin(module: str) -> None:
    """What frameworks share belongs into `contrib/http`."""
    text = Path(contrib.__path__[0], f"{module}.py").read_text(encoding="utf-8")
    assert sum(bool(line.strip()) for line in text.splitlines()) < 260
