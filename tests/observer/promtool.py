"""Debian's `promtool` and `prometheus`, both of the package prometheus."""

from __future__ import annotations

import os
import shutil
import subprocess

import pytest


def needed(program: str) -> str:
    """Return the path of a program. Where it is not installed, the test is skipped, and fails in
    CI: there a check that did not run must not pass.
    """
    path = shutil.which(program)
    if path is None:
        text = f"{program} is not installed: apt-get install prometheus"
        if os.environ.get("CI"):
            pytest.fail(text, pytrace=False)
        pytest.skip(text)
    return path


def said(*arguments: object, text: str = "") -> str:
    """Return all that promtool prints, which has to end with 0."""
    ended = subprocess.run(
        [needed("promtool"), *map(str, arguments)],
        input=text, capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return ended.stdout + ended.stderr
