"""Nobody pays for an integration that is not used."""

from __future__ import annotations

import pytest

from tests.programs import printed

FRAMEWORKS = {"starlette", "fastapi", "pydantic", "flask", "werkzeug", "django", "rest_framework"}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("module", "is_integration"), [("distwindow", False), ("distwindow.contrib.asgi", True)]
)
def test_no_framework_is_imported(module: str, is_integration: bool) -> None:
    program = f"import sys, {module}; print(*sys.modules)"
    imported = set(printed("-c", program).split())
    assert not imported & FRAMEWORKS
    assert ("distwindow.contrib.http" in imported) == is_integration
