"""The table of the Celery workers is that of the recorded results."""

from __future__ import annotations

from benchmarks.celery_workers import shares
from benchmarks.celery_workers.__main__ import JSON, PAGE, SHARES_JSON
from benchmarks.celery_workers.fleet import IDEAL_S, TASKS
from benchmarks.celery_workers.results import from_json, table
from benchmarks.report import page_with


def test_the_page_shows_the_results() -> None:
    runs = from_json(JSON)
    assert PAGE.read_text(encoding="utf-8") == page_with(PAGE, "celery workers", table(runs))


def test_the_recorded_run_of_the_gate_kept_what_the_page_says() -> None:
    gate = next(one for one in from_json(JSON) if one.setup == "distwindow")
    assert len(gate.starts_s) == TASKS
    assert gate.most <= 20
    assert gate.requeues == 0
    assert gate.asks / TASKS <= 1.3
    assert IDEAL_S - 0.1 <= gate.span_s <= IDEAL_S + 1.5


def test_the_page_shows_the_shares_of_each_pool() -> None:
    rows = shares.from_json(SHARES_JSON)
    assert [row.pool for row in rows] == list(shares.POOLS)
    text = page_with(PAGE, "celery shares", shares.table(rows))
    assert PAGE.read_text(encoding="utf-8") == text


def test_the_recorded_shares_are_those_that_the_page_promises() -> None:
    for row in shares.from_json(SHARES_JSON):
        assert row.first_s < 0.5
        assert row.span_s < 2.0 + 1.0
        assert row.others_per_s > 0.5 * row.others_alone_per_s
