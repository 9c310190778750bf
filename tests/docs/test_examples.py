"""The programs in `examples/` run, with `memory://` and on a server."""

from __future__ import annotations

import asyncio
import inspect
import runpy
from pathlib import Path
from typing import Any

import pytest

from .pages import ROOT, preset

pytestmark = pytest.mark.slow

PROGRAMS = sorted((ROOT / "examples").glob("*.py"))


@pytest.fixture(params=["memory", "redis"])
def url(request: pytest.FixtureRequest, prefix: str, monkeypatch: pytest.MonkeyPatch) -> Any:
    preset(monkeypatch, prefix=prefix, timeout=5.0)
    return "memory://" if request.param == "memory" else request.getfixturevalue("redis_url")


def result_of(name: str, url: str) -> Any:
    main = runpy.run_path(str(ROOT / "examples" / name))["main"]
    answer = main(url)
    return asyncio.run(answer) if inspect.iscoroutine(answer) else answer


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("threads", {"admitted": 100, "refused": 220}),
        ("tasks", list(range(12))),
        ("concurrency", {"done": 12, "most": 3, "left": 0}),
        ("breaker", {"failed": 5, "refused": 10, "paid": 5}),
        ("guard", {"listed": 1, "refused": 2, "asked": 2, "from the cache": 5}),
        ("entries", {"checkout": (10, 5, 8, 2), "search": (10, 5, 7, 3)}),
    ],
)
def test_outcomes(url: str, name: str, expected: Any) -> None:
    assert result_of(f"{name}.py", url) == expected


def test_worker(url: str) -> None:
    done = result_of("worker.py", url)
    assert len(done) == len(set(done)) == 9
    assert done[:3] == [("acme", 0), ("acme", 1), ("acme", 2)]


def test_priority(url: str) -> None:
    outcomes = result_of("priority.py", url)
    assert outcomes["reports admitted"] >= 10
    assert outcomes["payments borrowed"] == 5
    assert outcomes["payments over_limit"] == 1


def test_pacing(url: str) -> None:
    gaps = result_of("pacing.py", url)
    assert len(gaps) == 11
    assert min(gaps) > 19.99


def test_sqlite_store(tmp_path: Path) -> None:
    assert result_of("sqlite_store.py", str(tmp_path / "limits.db")) == {
        "admitted": 100,
        "refused": 220,
    }


def test_simulate_rules() -> None:
    outcomes = result_of("simulate_rules.py", "1")
    assert outcomes == result_of("simulate_rules.py", "1")
    assert sum(outcomes.values()) == 30 * 60
    # The breaker keeps nearly all calls from the service in the 5 s in which it fails.
    assert 0 < outcomes["failed"] < 50
    assert outcomes["breaker open"] > outcomes["failed"]
    assert outcomes["limited"] > 0


def test_celery_limits(url: str) -> None:
    outcome = result_of("celery_limits.py", url)
    assert (outcome["done"], outcome["pings"]) == (12, 3)
    assert outcome["before the last of acme"] >= 9  # all tasks that are not of acme, at least
