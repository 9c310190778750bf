"""Debian's `promtool` and `prometheus`, both of the package prometheus."""

from __future__ import annotations

import shutil
import subprocess

import pytest


def needed(program: str) -> str:
    """Return the path of a program; without it the test is skipped."""
    path = shutil.which(program)
    if path is None:
        pytest.skip(f"{program} is not installed: apt-get install prometheus")
    return path


def said(*arguments: object, text: str = "") -> str:
    """Return all that promtool prints, which has to end with 0."""
    ended = subprocess.run(
        [needed("promtool"), *map(str, arguments)],
        input=text, capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return ended.stdout + ended.stderr
