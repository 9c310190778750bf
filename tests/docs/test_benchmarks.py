"""The sections of `python -m benchmarks` run code that exists, and the documentation names them."""

from __future__ import annotations

import importlib.util
import re
from importlib import import_module

import pytest

from benchmarks.__main__ import SECTIONS

from .pages import ROOT

PAGES = [
    *(ROOT / name for name in ("README.md", "benchmarks/README.md", "lua/README.md")),
    *(ROOT / "docs").rglob("*.md"),
]


@pytest.mark.parametrize("section", SECTIONS)
def test_a_section_has_a_module_with_run(section: str) -> None:
    assert callable(import_module(f"benchmarks.{SECTIONS[section]}").run)


def test_pages_name_only_sections_that_exist() -> None:
    named = {
        section
        for page in PAGES
        for section in re.findall(r"benchmarks\s--only\s(\w+)", page.read_text(encoding="utf-8"))
    }
    assert named
    assert named <= SECTIONS.keys()


def test_the_readme_table_takes_rows_of_sections_that_exist() -> None:
    spec = importlib.util.spec_from_file_location(
        "make_benchmarks", ROOT / "docs/make/benchmarks.py"
    )
    assert spec is not None
    assert spec.loader is not None
    make = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(make)
    assert {section for section, _, _ in make.ROWS} <= SECTIONS.keys()
