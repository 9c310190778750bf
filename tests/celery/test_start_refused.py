"""A worker that cannot work ends with one sentence; `check` finds the same without a worker."""

from __future__ import annotations

import os
import pathlib
import subprocess
import sys
from typing import Any

import pytest
from celery import Celery

from distwindow import ConfigurationError
from distwindow.contrib.celery import RateLimits

PROJECT = """
from celery import Celery
from distwindow.contrib.celery import RateLimits

app = Celery("refused", broker="memory://")
limits = RateLimits(app, "memory://")


@app.task(name="proj.fetch", limits="5/s", limit_key="{tenent}")
def fetch(tenant): ...
"""


def fetch() -> None: ...


@pytest.mark.parametrize("to_file", [False, True], ids=["terminal", "log file"])
@pytest.mark.slow
def test_the_command_shows_one_sentence(tmp_path: pathlib.Path, to_file: bool) -> None:
    (tmp_path / "refused.py").write_text(PROJECT)
    log = tmp_path / "worker.log"
    found = subprocess.run(
        [
            sys.executable, "-m", "celery", "-A", "refused", "worker", "-P", "solo",
            *(["-f", str(log)] if to_file else []),
        ],
        cwd=tmp_path, capture_output=True, text=True, timeout=60,
        env={**os.environ, "PYTHONPATH": f"{tmp_path}{os.pathsep}{':'.join(sys.path)}"},
    )  # fmt: skip
    sentence = "the worker does not start: task 'proj.fetch': limit_key='{tenent}' names 'tenent'"
    assert found.returncode == 1
    assert "Traceback" not in found.stdout + found.stderr
    assert found.stderr.splitlines()[-1].startswith(sentence)
    logged = log.read_text() if to_file else found.stderr
    assert f"CRITICAL/MainProcess] {sentence}" in logged
    assert "Traceback" not in logged


@pytest.mark.parametrize(
    ("store", "given", "conf", "says"),
    [
        (None, {}, {}, "have no store"),
        ("reddis://localhost", {}, {}, "reddis"),
        (7, {}, {}, "int"),
        ("memory://", {"prefix": ""}, {}, "prefix"),
        ("memory://", {"prefix": "a{b"}, {}, "prefix"),
        ("memory://", {"prefix": 7}, {}, "prefix"),
        ("memory://", {}, {"distwindow_max_park": 5}, "'distwindow_max_park'"),
        ("memory://", {}, {"distwindow_limits": {"no": "5/s"}}, "'no', which is not registered"),
        ("memory://", {}, {"task_annotations": {"fetch": {"limits": "often"}}}, "'often'"),
    ],
)
def test_check_and_a_worker_say_the_same(
    store: Any, given: dict[str, Any], conf: dict[str, Any], says: str
) -> None:
    app = Celery("test", broker="memory://", set_as_current=False)
    app.conf.update(conf)
    app.task(name="fetch", shared=False)(fetch)
    limits = RateLimits(app, store, **given)
    with pytest.raises(ConfigurationError, match=says) as caught:
        limits.check()
    with pytest.raises(ConfigurationError) as refused:
        app.WorkController(concurrency=1, pool="solo")
    assert isinstance(refused.value, SystemExit)
    assert refused.value.code == str(refused.value) == f"the worker does not start: {caught.value}"


def test_check_connects_to_nothing() -> None:
    app = Celery("test", set_as_current=False)
    RateLimits(app, "redis://localhost:1/0").check()
