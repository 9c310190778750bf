"""Each row of the page has what runs it, and it runs."""

from __future__ import annotations

import re
from collections.abc import Iterator
from importlib import import_module

import pytest

from tests.docs.pages import ROOT

from . import page
from .page import DIFFERENCES, ROWS, SHOWN, Difference, Row, checks_of
from .world import World, needs

for _name in ("limits", "fastapi", "flask", "django", "pybreaker"):
    pytest.register_assert_rewrite(f"{__package__}.{_name}_rows")
    import_module(f".{_name}_rows", __package__)

MODULES = {
    "limits": "limits",
    "slowapi": "slowapi",
    "fastapi-limiter": "fastapi_limiter",
    "fastapi-redis-sdk": "redis_fastapi",
    "Flask-Limiter": "flask_limiter",
    "django-ratelimit": "django_ratelimit",
    "REST framework": "rest_framework",
    "pybreaker": "pybreaker",
}
"""What is imported of each library."""


@pytest.fixture
def world(request: pytest.FixtureRequest) -> Iterator[World]:
    made = World(request)
    yield made
    for each in made.opened:
        each.close()


def test_each_row_has_one_check_and_each_check_a_row() -> None:
    assert {row.library for row in ROWS} == MODULES.keys()
    assert [str(row) for row in ROWS if len(checks_of(row)) != 1] == []
    shown = [check for row in ROWS for check in checks_of(row)]
    assert [text for _, text, check in SHOWN if check not in shown] == []


def test_each_difference_is_on_the_page() -> None:
    assert [str(one) for one in DIFFERENCES if one.text not in page.section(one.section)] == []


def test_the_page_names_the_versions_that_are_run() -> None:
    project = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    peers = re.findall(r'"([\w-]+==[\d.]+)"', project)
    assert peers
    text = page.TEXT.lower()
    assert [one for one in peers if one.replace("==", " ") not in text] == []


@pytest.mark.parametrize("row", ROWS, ids=str)
def test_a_row(row: Row, world: World) -> None:
    needs(MODULES[row.library])
    (check,) = checks_of(row)
    check(row, world)


@pytest.mark.parametrize("difference", DIFFERENCES, ids=str)
def test_a_difference(difference: Difference, world: World) -> None:
    for library, module in MODULES.items():
        if library in difference.section:
            needs(module)
    difference.check(world)
