"""The pages have the figures of the sections that are measured alone (docs/make/sections.py)."""

from __future__ import annotations

import re

import pytest

from benchmarks.sections import SECTIONS

from .pages import ROOT, maker

make = maker("sections.py")

NAMES = ["guard", "resource", "fleet", "web", "second", "growth", "agents", "observer", "limits",
         "limits-page"]  # fmt: skip


def test_each_has_rows_and_a_page() -> None:
    assert list(make.PAGES) == list(make.TEXTS) == NAMES
    assert {name.removesuffix("-page") for name in NAMES} <= SECTIONS.keys()


@pytest.mark.parametrize("name", NAMES)
def test_the_page_has_the_figures_of_the_rows(name: str) -> None:
    report = make.load(name)
    assert report["rows"]
    assert [row["what"] for row in report["rows"] if row["error"]] == []
    assert make.between(name) == make.TEXTS[name](report)


def test_the_page_of_agents_has_the_figures_of_its_run() -> None:
    page = (ROOT / "docs/howto/agents.md").read_text(encoding="utf-8")
    found = [
        *re.findall(r"sent (\d+) calls in a second, and with this one (\d+)", page),
        *re.findall(r"served (\d+) calls of a\stool, and with this one (\d+)", page),
    ]
    rows = [row["detail"].split()[0] for row in make.load("agents")["rows"]]
    assert [each for theirs, ours in found for each in (ours, theirs)] == rows
    assert make.load("agents")["command"] == "python -m benchmarks --only agents"
