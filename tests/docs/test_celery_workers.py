"""The table of the Celery workers is that of the recorded results."""

from __future__ import annotations

from benchmarks.celery_workers.__main__ import JSON, PAGE, page_with
from benchmarks.celery_workers.fleet import IDEAL_S, TASKS
from benchmarks.celery_workers.results import from_json, table


def test_the_page_shows_the_results() -> None:
    runs = from_json(JSON)
    assert PAGE.read_text(encoding="utf-8") == page_with(PAGE, table(runs))


def test_the_recorded_run_of_the_gate_kept_what_the_page_says() -> None:
    gate = next(one for one in from_json(JSON) if one.setup == "distwindow")
    assert len(gate.starts_s) == TASKS
    assert gate.most <= 20
    assert gate.requeues == 0
    assert gate.asks / TASKS <= 1.3
    assert IDEAL_S - 0.1 <= gate.span_s <= IDEAL_S + 1.5
