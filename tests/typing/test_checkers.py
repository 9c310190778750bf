"""mypy and pyright infer what the docs promise: they accept `promises.py`, and report each line of
it in which a promise is changed.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PROMISES = Path(__file__).with_name("promises.py")
CONFIG = Path(__file__).with_name("pyrightconfig.json")

WRONG = {
    'assert_type(report(3, title="x"), "list[str]")': "assert_type(report(3), str)",
    'assert_type(handle("acme"), bytes)': 'assert_type(handle("acme"), str)',
    "assert_type(await page(3), str)": "assert_type(await page(3), bytes)",
    "assert_type(Service().call(3), float)": "assert_type(Service().call(3), int)",
    "assert_type(mine, MyLimiter)": "assert_type(mine, Limiter)",
    "assert_type(decision, Decision)": "assert_type(decision, bool)",
    'report("3")  # type: ignore[arg-type]': 'report("3")',
    'Service().call("3")  # type: ignore[arg-type]': 'Service().call("3")',
    'rows("3")  # type: ignore[arg-type]': 'rows("3")',
    "assert_type(refused.retry_after, float)": (
        "assert_type(refused.retry_after, float)  # type: ignore[arg-type]"
    ),
}
"""A line of `promises.py`, and what no checker may accept in its place."""


def mypy(file: Path) -> set[int]:
    """Return the lines with errors."""
    pytest.importorskip("mypy", reason="mypy is not installed")
    options = ["--config-file", str(ROOT / "pyproject.toml"), "--no-error-summary"]
    done = subprocess.run(
        [sys.executable, "-m", "mypy", *options, str(file)],
        cwd=ROOT, capture_output=True, text=True, env={**os.environ, "MYPYPATH": str(ROOT)},
    )  # fmt: skip
    assert done.returncode in (0, 1), done.stdout + done.stderr
    return {int(line) for line in re.findall(r"^\S+?:(\d+): error: ", done.stdout, re.MULTILINE)}


def pyright(file: Path) -> set[int]:
    """Return the lines with errors."""
    pytest.importorskip("pyright", reason="pyright is not installed")
    config = {**json.loads(CONFIG.read_text()), "include": [file.name], "extraPaths": [str(ROOT)]}
    project = file.with_name("pyrightconfig.json") if file != PROMISES else CONFIG
    if project != CONFIG:
        project.write_text(json.dumps(config))
    done = subprocess.run(
        [sys.executable, "-m", "pyright", "--outputjson", "--pythonpath", sys.executable,
         "--project", str(project)],
        cwd=file.parent, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode in (0, 1), done.stdout + done.stderr
    report = json.loads(done.stdout)
    assert report["summary"]["filesAnalyzed"] == 1
    return {
        found["range"]["start"]["line"] + 1
        for found in report["generalDiagnostics"]
        if found["severity"] == "error"
    }


CHECKERS = pytest.mark.parametrize("check", [mypy, pyright])


@pytest.mark.slow
@CHECKERS
def test_what_the_docs_promise_is_inferred(check: object) -> None:
    assert callable(check)
    assert check(PROMISES) == set()


@pytest.mark.slow
@CHECKERS
def test_every_promise_that_is_changed_is_refused(check: object, tmp_path: Path) -> None:
    assert callable(check)
    text = PROMISES.read_text(encoding="utf-8")
    for promise, wrong in WRONG.items():
        assert text.count(promise) == 1, promise
        text = text.replace(promise, wrong)
    file = tmp_path / "broken_promises.py"
    file.write_text(text, encoding="utf-8")
    lines = text.splitlines()
    expected = {
        number
        for number, line in enumerate(lines, 1)
        if any(line.strip() == wrong for wrong in WRONG.values())
    }
    assert len(expected) == len(WRONG)
    assert check(file) == expected
