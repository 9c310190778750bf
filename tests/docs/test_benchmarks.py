"""The sections of `python -m benchmarks` run code that exists, and the documentation names them."""

from __future__ import annotations

import json
import re
from importlib import import_module

import pytest

from benchmarks import outages
from benchmarks.__main__ import MAX_LOAD
from benchmarks.report import number
from benchmarks.sections import SECTIONS

from .pages import PAGES, ROOT, maker

make = maker("benchmarks.py")
report = make.Report(json.loads(make.ROWS_FILE.read_text(encoding="utf-8")))


@pytest.mark.parametrize("section", SECTIONS)
def test_a_section_has_a_module_with_run(section: str) -> None:
    assert callable(import_module(f"benchmarks.{SECTIONS[section]}").run)


def test_pages_name_only_sections_that_exist() -> None:
    named = {
        section
        for page in [*PAGES, ROOT / "benchmarks/README.md", ROOT / "lua/README.md"]
        for section in re.findall(r"benchmarks\s--only\s(\w+)", page.read_text(encoding="utf-8"))
    }
    assert named
    assert named <= SECTIONS.keys()


def test_the_readme_table_takes_rows_of_sections_that_exist() -> None:
    assert {section for section, _, _ in make.README_ROWS} <= SECTIONS.keys()


def test_every_page_has_the_figures_of_the_report() -> None:
    """So no page quotes a figure that was not measured, or one of an earlier run."""
    parts = make.parts(report)
    assert len(parts) == 6
    for page, name, text in parts:
        assert make.between(page, name) == text, page


IN_SENTENCES = {
    # A page, a figure in a sentence of it, and the row and the part of it that it is.
    ("README.md", r"others: ([\d.]+) times"): ("latency", None, None),
    ("docs/index.md", r"others: ([\d.]+) times"): ("latency", None, None),
    ("docs/benchmarks.md", r"fastest peer takes ([\d.]+) times"): ("latency", None, None),
    ("docs/benchmarks.md", r"socket's round trip takes ([\d.]+) µs"): (
        "latency", "p50: raw socket, return 1", r"p50 ([\d.]+)",
    ),
    ("docs/benchmarks.md", r"opens a ring\*\* takes ([\d.]+) times"): (
        "server", "new ring, 10 buckets, limit 100,000", None,
    ),
    ("docs/benchmarks.md", r"([\d.]+) times `limits` in this run"): (
        "threads", "admitted: over limits", None,
    ),
    ("docs/howto/fastapi.md", r"route falls from (\d+) to \d+ ms"): (
        "web", "contrib.fastapi, direct", r"p99 ([\d.]+)",
    ),
    ("docs/howto/fastapi.md", r"route falls from \d+ to (\d+) ms"): (
        "web", "contrib.fastapi, direct, after gc.freeze()", r"p99 ([\d.]+)",
    ),
}  # fmt: skip


@pytest.mark.parametrize(("page", "sentence"), IN_SENTENCES)
def test_a_figure_in_a_sentence_is_that_of_the_table(page: str, sentence: str) -> None:
    section, what, part = IN_SENTENCES[page, sentence]
    row = report.best_peer(section) if what is None else report.row(section, what)
    if part is None:
        measured = row["measured"]["median"]
    else:
        (measured, *_) = re.findall(part, row["detail"])
    (written,) = re.findall(sentence, (ROOT / page).read_text(encoding="utf-8"))
    decimals = len(written.partition(".")[2])
    assert written == f"{float(measured):.{decimals}f}"


def test_the_tables_of_the_benchmarks_page_are_those_of_the_report() -> None:
    page = make.between("docs/benchmarks.md", "benchmarks")
    assert report.environment["load"] in page
    assert float(re.findall(r"[\d.]+", report.environment["load"])[0]) <= MAX_LOAD
    missing = [
        row["what"]
        for row in report.rows
        if isinstance(row["measured"], dict)
        and row["section"] not in make.PAGES
        and not re.search(
            rf"^\| {re.escape(row['what'])} \|.*"
            rf"\b{re.escape(number(row['measured']['median']))}(?:x| µs) \(",
            page,
            re.MULTILINE,
        )
    ]
    assert missing == []


def test_the_tables_of_outages_are_those_of_the_report() -> None:
    found = json.loads(outages.JSON.read_text(encoding="utf-8"))
    assert list(found["rows"]) == list(outages.OUTAGES)
    assert {tuple(rows) for rows in found["rows"].values()} == {tuple(outages.CONTENDERS)}
    assert outages.PAGE.read_text(encoding="utf-8") == outages.page_of(found)
